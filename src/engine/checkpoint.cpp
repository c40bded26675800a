#include "engine/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "engine/checkpoint_layout.h"
#include "engine/json_text.h"

namespace parka {
namespace {

[[noreturn]] void throw_checksum_mismatch(const std::string& path, const std::string& found,
                                          const std::string& expected) {
  throw_bad_input("{}: has checksum {}, the manifest says {}: damaged or replaced", path, found, expected);
}

void verify_checksum(const std::string& path, const std::string& expected) {
  const std::string found = checksum_of(InputFile(path));
  if (found != expected) throw_checksum_mismatch(path, found, expected);
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointInfo> checkpoints;
  for (const StepFolder& found : list_step_folders(folder)) {
    if (found.kind == StepFolderKind::kComplete || found.kind == StepFolderKind::kDisplaced) {
      checkpoints.push_back({found.step, step_folder_path(folder, found.step, found.kind)});
    }
  }
  return checkpoints;
}

LoadedCheckpoint load_checkpoint(const std::string& path) {
  Manifest manifest = read_manifest(path);
  LoadedCheckpoint loaded;
  loaded.step_ = manifest.step;
  loaded.path_ = path;
  loaded.state_ = std::move(manifest.state);
  for (const Manifest::File& file : manifest.files) {
    loaded.shards_.push_back({(std::filesystem::path(path) / file.name).string(), file.checksum, {}});
  }
  parallel_for(static_cast<int64_t>(loaded.shards_.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) verify_checksum(loaded.shards_[i].path, loaded.shards_[i].checksum);
  });
  std::set<std::string_view> names;
  for (LoadedCheckpoint::Shard& shard : loaded.shards_) {
    shard.header = read_safetensors_header(InputFile(shard.path));
    for (const SafetensorsEntry& tensor : shard.header.tensors) {
      if (!names.insert(tensor.name).second) {
        throw_bad_input("{}: tensor \"{}\" is in another shard too", shard.path, printable(tensor.name));
      }
    }
  }
  if (static_cast<int64_t>(names.size()) != manifest.num_tensors) {
    throw_bad_input("{}: its shards hold {} tensors, its manifest says {}", path, names.size(),
                    manifest.num_tensors);
  }
  return loaded;
}

void LoadedCheckpoint::for_each_tensor(
    const std::function<void(const SafetensorsEntry& tensor, ByteSpan bytes)>& callback) const {
  std::vector<std::byte> buffer;
  for (const Shard& shard : shards_) {
    const InputFile file(shard.path);
    // Header and tensors in file order are the whole file, so this adds up to the file's checksum.
    Checksum checksum;
    buffer.resize(static_cast<size_t>(shard.header.num_bytes));
    file.read(0, buffer);
    checksum.update(buffer);
    for (const SafetensorsEntry& tensor : shard.header.tensors) {
      buffer.resize(static_cast<size_t>(tensor.num_bytes));
      file.read(tensor.offset, buffer);
      checksum.update(buffer);
      callback(tensor, buffer);
    }
    if (checksum.hex() != shard.checksum) throw_checksum_mismatch(shard.path, checksum.hex(), shard.checksum);
  }
}

std::optional<LoadedCheckpoint> load_newest(const std::string& folder,
                                            const std::function<void(const std::string& message)>& report) {
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(folder);
  for (const CheckpointInfo& checkpoint : checkpoints) {
    try {
      return load_checkpoint(checkpoint.path);
    } catch (const Error& e) {
      if (report) report(fmt::format("checkpoint of step {} refused: {}", checkpoint.step, e.what()));
    }
  }
  if (checkpoints.empty()) return std::nullopt;
  throw_bad_input(
      "{}: none of its {} checkpoints can be loaded (reasons above); restore one from a backup, or move its step_* "
      "folders away to train from the start",
      folder, checkpoints.size());
}

}  // namespace parka
