#include <filesystem>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_index.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

constexpr size_t kShards = 3;

// How many tensors the shards make up, where they make up any.
int64_t count_tensors(const std::vector<std::string_view>& shards) {
  std::vector<CheckpointFile> files;
  int64_t count = 0;
  accepts([&] {
    for (const std::string_view shard : shards) {
      const auto bytes = static_cast<int64_t>(shard.size());
      files.push_back({"shard", parse_safetensors_header(as_bytes(shard), bytes, "shard")});
    }
    count = static_cast<int64_t>(index_tensors(files).tensors.size());
  });
  return count;
}

void read_all(const LoadedCheckpoint& checkpoint) {
  std::vector<TensorRange> ranges;
  for (const SafetensorsEntry& tensor : checkpoint.tensors()) {
    checkpoint.read(tensor);
    const int64_t numel = num_elements_of(tensor.shape);
    ranges.push_back({tensor.name, {numel / 3, numel - numel / 4}});
  }
  int64_t wanted = 0, got = 0;
  for (const TensorRange& range : ranges) wanted += range.elements.size();
  checkpoint.read_ranges(ranges, [&](const SafetensorsEntry& tensor, int64_t, ByteSpan bytes) {
    got += static_cast<int64_t>(bytes.size()) / size_of(tensor.dtype);
  });
  require(got == wanted, "ranges of tensors are not read whole");
}

}  // namespace

// A checkpoint of up to three files of tensors, pieces of tensors among them, whose checksums hold.
FUZZ_TARGET(checkpoint) {
  std::vector<std::string_view> shards = parts_of(input, kShards);
  while (!shards.empty() && shards.back().empty()) shards.pop_back();
  Manifest manifest{.step = 1, .state = {}, .files = {}, .num_tensors = count_tensors(shards)};
  for (const std::string_view shard : shards) {
    Checksum checksum;
    checksum.update(as_bytes(shard));
    const std::string name = shard_name(manifest.files.size());
    test::write_file(folder() / name, std::string(shard));
    manifest.files.push_back({name, static_cast<int64_t>(shard.size()), checksum.hex()});
  }
  place_file(std::string(kManifestName), encode_manifest(manifest));
  accepts([&] { read_all(load_checkpoint(folder().path().string())); });
}
