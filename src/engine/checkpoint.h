#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/safetensors.h"

// Checkpoints that survive a kill, a full disk or a power failure at any moment, and are never loaded damaged.
namespace parka {

// Everything that a checkpoint holds. `state` is the engine's: data position, seeds, resolved config, counters. It
// must be UTF-8; a number that is not finite comes back as null, for JSON has none.
struct CheckpointContents {
  int64_t step = 0;
  nlohmann::json state;
  std::vector<HostTensor> tensors = {};
};

struct SaveOptions {
  int64_t keep = 3;                            // newest checkpoints to keep, this one counted; 0 keeps all
  int64_t max_shard_bytes = int64_t{4} << 30;  // a larger tensor gets a file of its own
  // Called before every step that changes the file system, "write <path>" every 256 KiB, so that a test can
  // kill the process at any of them.
  std::function<void(std::string_view point)> observer = {};
  // Gets one line for what went wrong without harm to this checkpoint: an old one that could not be removed, a
  // damaged one found on the way.
  std::function<void(const std::string& message)> report = {};
};

// Writes <folder>/step_<N> and then removes what `keep` no longer covers. When it returns the checkpoint is on disk
// and complete; until then whatever was there before can be loaded, also when the process is killed or step N is
// saved a second time. Only older steps are ever removed, and not before this one is complete; steps newer than
// this one (of a run resumed from an older one) are left alone and not counted. Leftovers of dead runs are cleared
// away. One process at a time may save into a folder. Throws Error(kBadInput) when the folder cannot be used at all
// and Error(kIo) when writing fails; what was written of this checkpoint is then removed, as far as that works.
void save_checkpoint(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options);

// Creates the run folder, parents too, and proves that a file can be written, synced and removed in it. To be
// called before training starts, so that a bad folder is not found hours later. Throws Error(kBadInput), or
// Error(kIo) when the disk is full.
void check_run_folder_writable(const std::string& folder);

struct CheckpointInfo {
  int64_t step = 0;
  std::string path;
};

// The checkpoints in a run folder, newest first, unverified; unfinished ones are not among them. A missing folder
// has none. Where a step was being saved a second time it may be there twice, the newer one first.
std::vector<CheckpointInfo> list_checkpoints(const std::string& folder);

// A checkpoint that was found intact.
class LoadedCheckpoint {
 public:
  int64_t step() const { return step_; }
  const std::string& path() const { return path_; }
  const nlohmann::json& state() const { return state_; }

  // Passes all tensors to `callback` in the order of the files, one in memory at a time. The bytes are checked
  // again while they are read: throws Error(kBadInput) when a file changed after load_checkpoint, and what the
  // callback got is not to be used then.
  void for_each_tensor(const std::function<void(const SafetensorsEntry& tensor, ByteSpan bytes)>& callback) const;

 private:
  friend LoadedCheckpoint load_checkpoint(const std::string& path);

  struct Shard {
    std::string path;
    std::string checksum;
    SafetensorsHeader header;
  };

  int64_t step_ = 0;
  std::string path_;
  nlohmann::json state_;
  std::vector<Shard> shards_;
};

// Opens the checkpoint in folder `path` (a step_<N>, or a copy of one under any name) after reading every byte of
// it. Throws Error(kBadInput) that names the file and what is wrong with it.
LoadedCheckpoint load_checkpoint(const std::string& path);

// The newest intact checkpoint of a run folder. Each one that is refused on the way is passed to `report` with the
// reason. nullopt when there is none; Error(kBadInput) when there are some and none of them is intact.
std::optional<LoadedCheckpoint> load_newest(const std::string& folder,
                                            const std::function<void(const std::string& message)>& report);

}  // namespace parka
