#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "data/batch_loader.h"
#include "tests/data/image_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequence = 8;

// 13 sequences in two files. Sequence i has i % 3 images, number 2 i and 2 i + 1 of two files of pixels; its other
// tokens are i.
struct Corpus {
  static constexpr int kNumSequences = 13, kFirstFile = 7;

  TemporaryFolder folder;
  TokenFiles files = make();

  TokenFiles make() const {
    std::vector<std::string> paths;
    for (const int begin : {0, kFirstFile}) {
      const int end = begin == 0 ? kFirstFile : kNumSequences;
      std::vector<uint16_t> ids;
      std::vector<ImageReference> references;
      for (int i = begin; i < end; ++i) {
        ids.insert(ids.end(), kSequence, static_cast<uint16_t>(i));
        for (int k = 0; k < i % 3; ++k) {
          const int64_t first = (i - begin) * kSequence + 4 * k;
          std::fill_n(ids.begin() + first, kImageSlots, kSlot);
          const int number = 2 * i + k;
          references.push_back(reference(first, number, number >= 14, static_cast<uint32_t>(number % 14)));
        }
      }
      paths.push_back(folder / (begin == 0 ? "a.npy" : "b.npy"));
      write_tokens(paths.back(), ids);
      write_file(paths.back() + ".images", reference_file(references));
    }
    write_file(folder / "images-00000.pixels", pixel_file(0, 14));
    write_file(folder / "images-00001.pixels", pixel_file(14, 12));
    return TokenFiles(paths, TokenType::kUint16, kSequence, 100, {.images = kImageRules});
  }
};

struct Read {
  std::vector<int32_t> tokens;
  int64_t num_images, step_targets;
  std::vector<uint8_t> pixels;
  std::vector<int32_t> positions;
  DataPosition after;
  bool operator==(const Read&) const = default;
};

std::vector<Read> read_micro_batches(const TokenFiles& files, BatchLoaderOptions options, int count) {
  options.images_per_sequence = 2;
  BatchLoader loader(files, options);
  std::vector<Read> reads;
  for (int i = 0; i < count; ++i) {
    MicroBatch b = loader.next();
    reads.push_back({b.tokens, b.images.num_images, b.step_targets, b.images.pixels, b.images.positions, b.after});
  }
  return reads;
}

// Whether the images of a micro-batch are those of its sequences, by what Corpus puts into them.
bool has_its_images(const Read& read, int64_t rows) {
  std::vector<uint8_t> pixels;
  std::vector<int32_t> positions;
  int64_t images = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t sequence = read.tokens[static_cast<size_t>((row + 1) * kSequence - 1)];
    for (int32_t k = 0; k < sequence % 3; ++k, ++images) {
      const std::vector<uint8_t> own = pixels_of_image(2 * sequence + k);
      pixels.insert(pixels.end(), own.begin(), own.end());
      for (int64_t slot = 0; slot < kImageSlots; ++slot) {
        positions.push_back(static_cast<int32_t>(row * kSequence + 4 * k + slot));
      }
    }
  }
  pixels.resize(static_cast<size_t>(2 * rows * kImageBytes), 0);
  positions.resize(static_cast<size_t>(2 * rows * kImageSlots), -1);
  return read.num_images == images && read.pixels == pixels && read.positions == positions;
}

}  // namespace

TEST_CASE("every micro-batch comes with the images of its sequences", "[data][images]") {
  const Corpus corpus;
  const int64_t prefetch = GENERATE(1, 3, 100);
  const BatchLoaderOptions options{.seed = 6198, .global_batch = 6, .micro_batch = 2, .prefetch = prefetch};
  int wrong = 0;
  int64_t images = 0;
  for (const Read& read : read_micro_batches(corpus.files, options, 30)) {
    wrong += !has_its_images(read, 2);
    images += read.num_images;
  }
  CHECK(wrong == 0);
  CHECK(images > 30);
}

TEST_CASE("a run with images that resumes continues as if never stopped", "[data][images]") {
  const Corpus corpus;
  const BatchLoaderOptions options{.seed = 3, .global_batch = 6, .micro_batch = 2, .prefetch = 2};
  constexpr int kCount = 12;  // 4 steps over two epochs
  const std::vector<Read> straight = read_micro_batches(corpus.files, options, kCount);
  int wrong = 0;
  for (int stop = 1; stop < kCount; ++stop) {
    BatchLoaderOptions resumed = options;
    resumed.start = straight[static_cast<size_t>(stop - 1)].after;
    const int finished = stop / 3 * 3;  // micro-batches of whole steps
    const std::vector<Read> rest = read_micro_batches(corpus.files, resumed, kCount - finished);
    wrong += !std::equal(rest.begin(), rest.end(), straight.begin() + finished, straight.end());
  }
  CHECK(wrong == 0);
}

TEST_CASE("ranks share the sequences of a step with their images", "[data][images]") {
  const Corpus corpus;
  const int64_t world_size = GENERATE(1, 2, 4);
  const SampleOrder order(Corpus::kNumSequences, 6198, true);
  const std::vector<uint32_t> entries = order.epoch(0);
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const BatchLoaderOptions options{
        .seed = 6198, .global_batch = 8, .micro_batch = 1, .rank = rank, .world_size = world_size, .prefetch = 2};
    int64_t nth = 0;
    int wrong = 0;
    for (const Read& read : read_micro_batches(corpus.files, options, static_cast<int>(8 / world_size))) {
      const uint32_t want = entries[static_cast<size_t>(rank + world_size * nth++)];
      wrong += read.tokens.back() != static_cast<int32_t>(want) || !has_its_images(read, 1);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a damaged image is reported by the call that would have returned it, and after", "[data][images]") {
  const Corpus corpus;
  const std::string path = corpus.folder / "images-00000.pixels";
  std::string bytes = pixel_file(0, 14);
  bytes[static_cast<size_t>(64 + 10 * kImageBytes)] = '\1';  // of sequence 5
  write_file(path, bytes);
  BatchLoader loader(
      corpus.files,
      {.shuffle = false, .global_batch = 8, .micro_batch = 2, .prefetch = 9, .images_per_sequence = 2});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(loader.next().images.num_images == 1);  // sequences 0 and 1
  CHECK(loader.next().images.num_images == 2);
  for (int call = 0; call < 2; ++call) {
    const Error error = error_of([&] { loader.next(); });
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(contains(error, path + ": image 10 has other pixels"));
  }
}

TEST_CASE("micro-batches that are kept ready come with their images at once", "[data][images]") {
  const Corpus corpus;
  constexpr int kPrefetch = 4;
  BatchLoader loader(corpus.files,
                     {.global_batch = 6, .micro_batch = 2, .prefetch = kPrefetch, .images_per_sequence = 2});
  // What a step of training leaves time for.
  REQUIRE(loader.failure_within(kPrefetch) == nullptr);
  const double waited = loader.wait_seconds();
  for (int i = 0; i < kPrefetch; ++i) CHECK(loader.next().images.pixels.size() == 4 * kImageBytes);
  CHECK(loader.wait_seconds() - waited < 1e-3);
}

TEST_CASE("sequences with more images than there is room for are refused at once", "[data][images]") {
  const Corpus corpus;
  const Error error = error_of([&] { BatchLoader(corpus.files, {.images_per_sequence = 1}); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, "a sequence of the data has 2 images, but there is room for 1"));
}
