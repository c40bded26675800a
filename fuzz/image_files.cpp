#include "data/image_files.h"

#include "data/batch_loader.h"
#include "data/token_files.h"
#include "data/xxh3.h"
#include "engine/commands/data_statistics.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

constexpr int64_t kSequenceLength = 4;
constexpr int64_t kVocabSize = 1000;
// Those of the seeds.
const ImageRules kRules{.token = 9, .slots = 2, .size = 2};

// With a checksum that holds: what fuzzing alone would never find.
std::string sealed(std::string_view references) {
  std::string bytes(references);
  const uint64_t checksum = xxh3_64(std::as_bytes(std::span(references)));
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  return bytes;
}

void read_images(const std::string& path) {
  const TokenFiles files({path}, TokenType::kUint16, kSequenceLength, kVocabSize, {.images = kRules});
  const int64_t most = files.most_images();
  require(most <= kSequenceLength, "a sequence has more images than tokens");
  std::vector<int32_t> tokens(kSequenceLength), targets(kSequenceLength);
  for (int64_t i = 0; i < files.num_sequences(); ++i) {
    const bool has_slots = accepts([&] { files.read_example(i, {tokens.data(), targets.data(), nullptr}); });
    accepts([&] {
      const ImageBatch batch = read_image_batch(files, {i}, most);
      for (const int32_t position : batch.positions) {
        require(position >= -1 && position < kSequenceLength, "an image slot is outside of its sequence");
        if (has_slots && position >= 0) require(tokens[position] == kRules.token, "an image is where no slot is");
      }
    });
  }
  files.fingerprint();
}

}  // namespace

// A token file with images. The parts are: the tokens; the references without their checksum; the pixels.
FUZZ_TARGET(image_files) {
  const std::vector<std::string_view> parts = parts_of(input, 3);
  const std::string path = place_file("tokens.npy", parts[0]);
  place_file("tokens.npy.images", sealed(parts[1]));
  place_file("images-00000.pixels", parts[2]);
  if (parts[0].empty()) return;
  accepts([&] { read_images(path); });
  DataDescriptions descriptions;
  accepts([&] { data_statistics(TokenFile(path, TokenType::kUint16), descriptions, {}, kVocabSize); });
}
