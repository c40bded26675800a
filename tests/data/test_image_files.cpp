#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "core/ignored_target.h"
#include "data/batch_loader.h"
#include "data/token_files.h"
#include "tests/data/image_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequence = 8;

// Two token files of two sequences each, with images 0 to 3 in two files of pixels. Image 2 is cut to two slots,
// and the second file has image 0 again.
struct Pictures {
  TemporaryFolder folder;
  std::string first = folder / "a.npy", second = folder / "b.npy";

  Pictures() {
    write_tokens(first, std::vector<uint16_t>{1, 99, 99, 99, 99, 99, 99, 2, 3, 4, 5, 6, 7, 8, 99, 99});
    write_tokens(second, std::vector<uint16_t>{1, 2, 3, 4, 5, 6, 7, 8, 99, 99, 99, 9, 99, 99, 99, 9});
    write_file(first + ".images",
               reference_file({reference(1, 0, 0, 0), reference(4, 1, 0, 1), reference(14, 2, 1, 0, 2)}));
    write_file(second + ".images", reference_file({reference(8, 3, 1, 1), reference(12, 0, 0, 0)}));
    write_file(folder / "images-00000.pixels", pixel_file(0, 2));
    write_file(folder / "images-00001.pixels", pixel_file(2, 2));
  }

  TokenFiles open(int64_t sequence_length = kSequence, bool loss_mask = false) const {
    return TokenFiles({first, second}, TokenType::kUint16, sequence_length, 100,
                      {.loss_mask = loss_mask, .images = kImageRules});
  }
};

std::vector<uint8_t> nth_image(const ImageBatch& batch, int64_t number) {
  const auto begin = batch.pixels.begin() + number * kImageBytes;
  return {begin, begin + kImageBytes};
}

struct ExampleOf {
  std::vector<int32_t> tokens = std::vector<int32_t>(kSequence), targets = std::vector<int32_t>(kSequence);
  int64_t num_targets = 0;
};

ExampleOf read_example(const TokenFiles& files, int64_t sequence) {
  ExampleOf example;
  example.num_targets = files.read_example(sequence, {example.tokens.data(), example.targets.data(), nullptr});
  return example;
}

}  // namespace

TEST_CASE("a micro-batch has its images in the order of their slots, and padding", "[data][images]") {
  const Pictures pictures;
  const TokenFiles files = pictures.open();
  CHECK(files.most_images() == 2);
  const ImageBatch batch = read_image_batch(files, {3, 2, 0, 1}, 7);
  CHECK(batch.num_images == 5);
  const std::vector<int> numbers = {3, 0, 0, 1, 2};
  for (int64_t i = 0; i < 5; ++i) CHECK(nth_image(batch, i) == pixels_of_image(numbers[static_cast<size_t>(i)]));
  for (int64_t i = 5; i < 7; ++i) CHECK(nth_image(batch, i) == std::vector<uint8_t>(kImageBytes, 0));
  CHECK((batch.positions ==
         std::vector<int32_t>{0, 1, 2, 4, 5, 6, 17, 18, 19, 20, 21, 22, 30, 31, -1, -1, -1, -1, -1, -1, -1}));
}

TEST_CASE("an image that two sequences share has each of its slots in one of them", "[data][images]") {
  const Pictures pictures;
  const TokenFiles files = pictures.open(5);
  const ImageBatch batch = read_image_batch(files, {0, 1}, 3);
  CHECK(batch.num_images == 3);
  CHECK(nth_image(batch, 1) == nth_image(batch, 2));
  CHECK((batch.positions == std::vector<int32_t>{1, 2, 3, 4, -1, -1, -1, 5, 6}));
}

TEST_CASE("image slots are never targets", "[data][images]") {
  const Pictures pictures;
  const bool loss_mask = GENERATE(false, true);
  if (loss_mask) {
    for (const std::string& path : {pictures.first, pictures.second})
      write_file(path + ".mask", std::string(16, '\1'));
  }
  const TokenFiles files = pictures.open(kSequence, loss_mask);
  CHECK(files.targets_vary());
  const ExampleOf example = read_example(files, 0);
  constexpr int32_t kNone = kIgnoreTarget;
  CHECK((example.targets == std::vector<int32_t>{kNone, kNone, kNone, kNone, kNone, kNone, 2, kNone}));
  CHECK(example.num_targets == 1);  // predicted by the last slot
  CHECK(read_example(files, 1).num_targets == 5);
}

TEST_CASE("a token file without a file of images has none", "[data][images]") {
  const Pictures pictures;
  std::filesystem::remove(pictures.first + ".images");
  write_tokens(pictures.first, std::vector<uint16_t>(16, 5));
  const TokenFiles files = pictures.open();
  CHECK(read_image_batch(files, {0, 1}, 2).num_images == 0);
  CHECK(read_image_batch(files, {3, 0}, 2).num_images == 2);
  CHECK(read_example(files, 0).num_targets == 7);
}

TEST_CASE("without image rules token files with images are refused", "[data][images]") {
  const Pictures pictures;
  const auto open = [&] { return TokenFiles({pictures.first}, TokenType::kUint16, kSequence, 100); };
  const Error error = error_of(open);
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, pictures.first + ": has 3 images, and the model has no tower"));

  // scripts/prepare_images.py writes a file of references beside text, too.
  write_file(pictures.first + ".images", reference_file({}));
  const TokenFiles files = open();
  CHECK(files.most_images() == 0);
  CHECK(files.files().size() == 1);
  CHECK(read_example(files, 0).num_targets == 7);
}

TEST_CASE("patterns leave files of images out", "[data][images]") {
  const Pictures pictures;
  CHECK(expand_source(pictures.folder / "*") == std::vector<std::string>{pictures.first, pictures.second});
}

TEST_CASE("slots that are not where the images are are named", "[data][images]") {
  const Pictures pictures;
  const std::string references = pictures.first + ".images";
  write_tokens(pictures.first, std::vector<uint16_t>{1, 99, 99, 9, 99, 99, 99, 2, 3, 4, 99, 6, 7, 8, 99, 99});
  const TokenFiles files = pictures.open();
  const Error no_slot = error_of([&] { read_example(files, 0); });
  CHECK(no_slot.code() == ExitCode::kBadInput);
  CHECK(contains(no_slot, pictures.first + ": token 3 is id 9, but " + references + " has an image there"));
  const Error no_image = error_of([&] { read_example(files, 1); });
  CHECK(contains(no_image, pictures.first + ": token 10 has the id of image slots, 99, but " + references));
}

TEST_CASE("slots in a file without images are of another tokenizer, or lack their images", "[data][images]") {
  const Pictures pictures;
  const std::string references = pictures.first + ".images";
  std::filesystem::remove(references);
  const TokenFiles files = pictures.open();
  const Error error = error_of([&] { read_example(files, 0); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, pictures.first + ": token 1 has the id of image slots, 99, and the file has no images"));
  CHECK(contains(error, "copy " + references));
  CHECK(contains(error, "tokenizer"));
}

TEST_CASE("pixels that have changed are refused when they are read", "[data][images]") {
  const Pictures pictures;
  const std::string path = pictures.folder / "images-00001.pixels";
  std::string bytes = pixel_file(2, 2);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(path, bytes);
  const TokenFiles files = pictures.open();
  CHECK(read_image_batch(files, {1}, 2).num_images == 1);
  const Error error = error_of([&] { read_image_batch(files, {3}, 2); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, path + ": image 1 has other pixels than when it was made"));
}

TEST_CASE("a file of pixels that becomes shorter is an error of reading", "[data][images]") {
  const Pictures pictures;
  const TokenFiles files = pictures.open();
  const std::string path = pictures.folder / "images-00001.pixels";
  std::filesystem::resize_file(path, 70);
  const Error error = error_of([&] { read_image_batch(files, {1}, 2); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(contains(error, path + ": ends at byte 70"));
}

TEST_CASE("bad files of pixels are refused by name", "[data][images]") {
  const Pictures pictures;
  const std::string path = pictures.folder / "images-00000.pixels", good = pixel_file(0, 2);
  const auto with = [&](size_t offset, char value) {
    std::string bytes = good;
    bytes[offset] = value;
    return bytes;
  };
  const auto [bytes, message] = GENERATE_REF(table<std::string, std::string>({
      {"", "is no file of pixels"},
      {good.substr(0, 63), "is no file of pixels"},
      {with(0, 'Q'), "is no file of pixels"},
      {with(8, 2), "has version 2 of files of pixels, but only version 1"},
      {with(12, 4), "its header says 2 images of 4 x 2 x 2 pixels, but 24 bytes follow it"},
      {with(16, 0), "its header says 2 images of 3 x 0 x 2 pixels"},
      {with(19, 1), "its header says 2 images of 3 x 16777218 x 2 pixels"},
      {with(24, 3), "its header says 3 images of 3 x 2 x 2 pixels, but 24 bytes"},
      {with(31, 1), "its header says 72057594037927938 images"},
      {good.substr(0, good.size() - 1), "but 23 bytes follow it; copy it again"},
      {good + "x", "but 25 bytes follow it"},
      {pixel_file(0, 1), "a.npy.images names image 1 of it; the two"},
  }));
  CAPTURE(message);
  write_file(path, bytes);
  const Error error = error_of([&] { pictures.open(); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, path + ": "));
  CHECK(contains(error, message));
  CHECK_FALSE(contains(error, "\n"));
}

TEST_CASE("a file of pixels that is missing is refused by name", "[data][images]") {
  const Pictures pictures;
  std::filesystem::remove(pictures.folder / "images-00001.pixels");
  const Error error = error_of([&] { pictures.open(); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, pictures.folder / "images-00001.pixels" + ": no such file"));
}

TEST_CASE("bad files of references are refused by name", "[data][images]") {
  const Pictures pictures;
  const std::string path = pictures.first + ".images";
  const std::vector<ImageReference> one = {reference(1, 0, 0, 0)};
  const std::string bare = references_without_checksum(one), good = sealed(bare);
  const auto with = [&](size_t offset, char value) {
    std::string bytes = bare;
    bytes[offset] = value;
    return sealed(bytes);
  };
  const auto damaged = [&](size_t offset) {
    std::string bytes = good;
    bytes[offset] = static_cast<char>(bytes[offset] ^ 1);
    return bytes;
  };
  const auto [bytes, message] = GENERATE_REF(table<std::string, std::string>({
      {"", "is no file of references to images"},
      {good.substr(0, 71), "is no file of references"},
      {with(0, 'Q'), "is no file of references"},
      {damaged(70), "its checksum does not fit; copy it again"},
      {damaged(20), "its checksum does not fit"},
      {damaged(good.size() - 1), "its checksum does not fit"},
      {good.substr(0, good.size() - 1), "its checksum does not fit"},
      {sealed(bare + "x"), "its checksum does not fit"},
      {with(32, 2), "its checksum does not fit"},
      {with(8, 2), "has version 2 of references to images"},
      {with(12, 98), "has 3 slots of id 98 for each image of 2 x 2 pixels, but the model has 3 of id 99 for 2 x 2"},
      {with(16, 4), "has 4 slots of id 99"},
      {with(20, 3), "of 3 x 2 pixels"},
      {with(24, 3), "of 2 x 3 pixels"},
      {reference_file({reference(4, 0, 0, 0), reference(1, 1, 0, 1)}), "with 3 slots from token 1 on does not fit"},
      {reference_file({reference(1, 0, 0, 0), reference(3, 1, 0, 1)}), "with 3 slots from token 3 on does not fit"},
      {reference_file({reference(14, 0, 0, 0)}), "with 3 slots from token 14 on does not fit"},
      {reference_file({reference(-1, 0, 0, 0)}), "from token 18446744073709551615 on does not fit"},
      {reference_file({reference(1, 0, 0, 0, 0)}), "with 0 slots"},
      {reference_file({reference(1, 0, 0, 0, 4)}), "with 4 slots"},
  }));
  CAPTURE(message);
  write_file(path, bytes);
  const Error error = error_of([&] { pictures.open(); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, path + ": "));
  CHECK(contains(error, message));
  CHECK_FALSE(contains(error, "\n"));
}

TEST_CASE("files of images are part of what a checkpoint knows of its data", "[data][images]") {
  const Pictures pictures;
  const TokenFiles before = pictures.open();
  std::vector<std::string> names;
  for (const TokenFiles::FileIdentity& identity : before.identities()) names.push_back(identity.name);
  CHECK((names == std::vector<std::string>{"a.npy", "b.npy", "a.npy.images", "b.npy.images", "images-00000.pixels",
                                           "images-00001.pixels"}));
  const uint64_t fingerprint = before.fingerprint();
  CHECK(pictures.open().fingerprint() == fingerprint);
  write_file(pictures.folder / "images-00001.pixels", pixel_file(4, 2));
  CHECK(pictures.open().fingerprint() != fingerprint);
}
