#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/files/safetensors.h"

// Checkpoints that survive a kill, a full disk or a power failure at any moment, and are never loaded damaged. Any
// number of ranks may save one together, each the pieces of tensors that it holds, and any other number load it.
// What lies in the files is written down in docs/checkpoints.md.
namespace parka {

struct CheckpointIndex;
struct VerifiedFile;

// Everything that a checkpoint holds. `state` is the engine's: data position, seeds, resolved config, counters. It
// must be UTF-8; a number that is not finite comes back as null, for JSON has none. Of ranks that save together
// each gives the same step and tensors, or pieces of them, of its own: every element must come from exactly one
// rank. The state is rank 0's.
struct CheckpointContents {
  int64_t step = 0;
  nlohmann::json state;
  std::vector<HostTensor> tensors = {};
};

// The ranks that save a checkpoint together. They agree through files in the run folder, which all of them must
// see, and so may save beside anything else that they do together.
struct SaveGroup {
  int rank = 0;
  int size = 1;
  // Of this save: the same on all ranks, and never used before for this folder, so that nothing which a dead run or
  // an earlier save left is taken for a part of this one. Letters, digits, '-' and '_'. CheckpointSaver adds the
  // number of the save to it, so that one make_save_id() of rank 0 is enough for a run.
  std::string id = {};
  // How long a rank that has written its part waits for the others.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // How often a rank that waits looks for files of the others.
  std::chrono::milliseconds poll_interval = std::chrono::milliseconds(50);
};

// Random, so never used before.
std::string make_save_id();

struct SaveOptions {
  int64_t keep = 3;                            // newest checkpoints to keep, this one counted; 0 keeps all
  int64_t max_shard_bytes = int64_t{1} << 30;  // a larger tensor gets a file of its own
  int writers = 1;                             // threads that write files at the same time
  // Called before every step that changes the file system, "write <path>" every 256 KiB, so that a test can
  // kill the process at any of them.
  std::function<void(std::string_view point)> observer = {};
  // Gets one line for what went wrong without harm to this checkpoint: an old one that could not be removed, a
  // damaged one found on the way.
  std::function<void(const std::string& message)> report = {};
  // Called when the checkpoint is complete, on the rank that makes it so: its folder, the bytes of its files, and
  // how long the save took.
  std::function<void(const std::string& path, int64_t num_bytes, double seconds)> saved = {};
  // Throws when the folder is not the run's any more (RunLock::require_ours). Called before a save begins, while it
  // waits for other ranks, before the checkpoint gets its name and before anything is removed; after it has thrown
  // the save touches nothing.
  std::function<void()> check_folder = {};
  // Of rank 0: called when everything is on disk, just before the checkpoint gets its name.
  std::function<void()> before_publish = {};
  SaveGroup group = {};
};

// Writes <folder>/step_<N> and then removes what `keep` no longer covers. When it returns the checkpoint is on disk
// and complete; until then whatever was there before can be loaded, also when the process is killed or step N is
// saved a second time. Only older steps are ever removed, and not before this one is complete; steps newer than
// this one (of a run resumed from an older one) are left alone and not counted. Leftovers of dead runs are cleared
// away. One process at a time may save into a folder; a missing one is created unless options.check_folder watches
// over it. Throws Error(kIo) when writing fails, for whatever reason; what was written of this checkpoint is then
// removed, as far as that works.
//
// Where options.group has several ranks all of them must call this, and it returns on each when the whole
// checkpoint is on disk. An error of one rank is thrown on all of them, on the others with that rank's number;
// Error(kIo) that names the ranks when some have not written their part after the time-out. Only rank 0 replaces
// and removes what is there.
void save_checkpoint(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options);

// Removes what dead runs left of saves, where no further save will. What cannot be removed is reported.
void clear_unfinished_saves(const std::string& folder,
                            const std::function<void(const std::string& message)>& report);

// Creates the run folder, parents too, and proves that a file can be written, synced and removed in it. To be
// called before training starts, so that a bad folder is not found hours later. Throws Error(kBadInput), or
// Error(kIo) when the disk is full.
void check_run_folder_writable(const std::string& folder);

struct CheckpointInfo {
  int64_t step = 0;
  std::string path;

  bool operator==(const CheckpointInfo&) const = default;
};

// The checkpoints in a run folder, newest first, unverified; unfinished ones are not among them. A missing folder
// has none. Where a step was being saved a second time it may be there twice, the newer one first.
std::vector<CheckpointInfo> list_checkpoints(const std::string& folder);

// The ranks that load a checkpoint together, each of which then verifies a share of its files only.
struct LoadGroup {
  int rank = 0;
  int size = 1;
  // Gives every rank the texts of all ranks, by rank (Communicator::gather_text).
  std::function<std::vector<std::string>(const std::string& text)> gather = {};
};

// Some elements of a tensor.
struct TensorRange {
  std::string name;
  ElementRange elements;
};

// A checkpoint that was found intact. Its bytes are compared with their checksums again while they are read, before
// anyone gets them: Error(kBadInput) when a file changed after load_checkpoint.
class LoadedCheckpoint {
 public:
  int64_t step() const { return step_; }
  const std::string& path() const { return path_; }
  const nlohmann::json& state() const { return state_; }

  // All tensors with their whole shape, in the order of the files; `offset` is where a file has the first piece.
  const std::vector<SafetensorsEntry>& tensors() const;
  // One of them; null when there is none of that name.
  const SafetensorsEntry* find(const std::string& name) const;

  // Passes all tensors, whole, to `callback` in the order of the files, one in memory at a time.
  void for_each_tensor(const std::function<void(const SafetensorsEntry& tensor, ByteSpan bytes)>& callback) const;

  // Passes the elements that `ranges` name to `callback`, in pieces of at most kMaxPieceBytes as they lie in the
  // files: `bytes` are elements `first_element` and following of `tensor`, valid during the call. Of the files
  // little more is read than what is asked for, and what comes next while `callback` works. Throws Error(kBadInput)
  // for a tensor that the checkpoint does not have.
  static constexpr int64_t kMaxPieceBytes = 16 << 20;
  using RangeCallback = std::function<void(const SafetensorsEntry& tensor, int64_t first_element, ByteSpan bytes)>;
  void read_ranges(const std::vector<TensorRange>& ranges, const RangeCallback& callback) const;

 private:
  friend LoadedCheckpoint load_checkpoint(const std::string& path, const LoadGroup& group);

  int64_t step_ = 0;
  std::string path_;
  nlohmann::json state_;
  std::shared_ptr<const std::vector<VerifiedFile>> files_;
  std::shared_ptr<const CheckpointIndex> index_;
};

// Opens the checkpoint in folder `path` (a step_<N>, or a copy of one under any name) after reading every byte of
// it. Throws Error(kBadInput) that names the file and what is wrong with it. All ranks of the group must call this;
// every byte is read by one of them, and what one of them throws all of them throw.
LoadedCheckpoint load_checkpoint(const std::string& path, const LoadGroup& group = {});

// The newest intact checkpoint of a run folder. One that is damaged is passed over: `report` gets the reason, and
// `refused`, where given, which they were. One that a run removes meanwhile is not missed: its successor is taken.
// nullopt when there is none. Throws Error(kBadInput) when there are some and all of them are damaged, or when one
// is of a format that a later Parka wrote, and Error(kIo) when one cannot be read for another reason than damage:
// what it holds must not be given up for that. All ranks of the group must call this, and all get the same.
std::optional<LoadedCheckpoint> load_newest(const std::string& folder,
                                            const std::function<void(const std::string& message)>& report,
                                            const LoadGroup& group = {},
                                            std::vector<CheckpointInfo>* refused = nullptr);

// For a run that goes on from an older checkpoint than those that were refused: gives these the names
// step_<N>.refused, so that a later start cannot go back to one of them. Tells `report`.
void set_refused_aside(const std::vector<CheckpointInfo>& refused,
                       const std::function<void(const std::string& message)>& report);

}  // namespace parka
