#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "engine/files/json.h"
#include "engine/files/safetensors.h"

// Checkpoints that survive a kill, a full disk or a power failure at any moment, and are never loaded damaged. Any
// number of ranks may save one together, and any other load it. docs/checkpoints.md describes the files.
namespace parka {

struct CheckpointIndex;
struct VerifiedFile;

// Everything that a checkpoint holds. `state` belongs to the engine: data position, seeds, resolved config,
// counters. It must be UTF-8; numbers that are not finite are read back as null. Ranks that save together pass the
// same step, and each its own tensors or pieces of them, each element once. The state is rank 0's.
struct CheckpointContents {
  int64_t step = 0;
  json state;
  std::vector<HostTensor> tensors = {};
  bool keeps_older = false;  // no older checkpoint is removed, whatever SaveOptions::keep says
};

// The ranks that save a checkpoint together. They coordinate through files in the run folder, which all of them
// must see. So they can save while their collectives continue.
struct SaveGroup {
  int rank = 0;
  int size = 1;
  // The id of this save: the same on all ranks, and never used before in this folder, so that files of a dead run
  // or an earlier save are not taken for a part of this one. Letters, digits, '-' and '_'. RunSaver adds the
  // number of the save to it, so one make_save_id() of rank 0 is enough for a run.
  std::string id = {};
  // How long a rank waits for the others after it has written its part.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // How often a waiting rank looks for files of the others.
  std::chrono::milliseconds poll_interval = std::chrono::milliseconds(50);
};

// Random, so never used before.
std::string make_save_id();

struct SaveOptions {
  int64_t keep = 3;                            // newest checkpoints to keep, this one counted; 0 keeps all
  int64_t max_shard_bytes = int64_t{1} << 30;  // a larger tensor gets a file of its own
  int writers = 1;                             // threads that write files at the same time
  // Called before every step that changes the file system, and every 256 KiB, so that a test can kill it there.
  std::function<void(std::string_view point)> observer = {};
  // On a thread beside the training, which says itself that it waits. Else the same steps are heartbeats.
  bool in_background = false;
  // Called with a line for a problem that does not harm this checkpoint, such as an old one that cannot be removed.
  std::function<void(const std::string& message)> report = {};
  // Called when the checkpoint is complete, on the rank that completes it, with what the save took.
  std::function<void(const std::string& path, int64_t num_bytes, double seconds)> saved = {};
  // Throws if the folder is no longer the run's (RunLock::require_ours). Called before a save begins, while it
  // waits for other ranks, before the checkpoint gets its name and before a removal. Then the save changes nothing.
  std::function<void()> check_folder = {};
  // With several ranks, asked again and again by one that waits for others. True ends the save with Error(kIo):
  // another rank has failed, and may have no place to say so, if its disk is full or its folder out of reach.
  std::function<bool()> is_given_up = {};
  // Called on rank 0 when everything is on disk, just before the checkpoint gets its name.
  std::function<void()> before_publish = {};
  SaveGroup group = {};
};

// Writes <folder>/step_<N> and then removes older checkpoints beyond `keep`. When it returns, the checkpoint is
// complete and on disk. Until then the checkpoints that were there can be loaded, even if the process is killed or
// step N is saved a second time. Only older steps are ever removed, and not before this one is complete. Newer
// steps (of a run resumed from an older one) stay and do not count. Leftovers of dead runs are removed. One process
// at a time may save into a folder; a missing one is created unless options.check_folder is set. Throws Error(kIo)
// if writing fails for any reason, and removes what was written of this checkpoint if possible.
//
// If options.group has several ranks, all of them must call this, and it returns on each when the whole checkpoint
// is on disk. An error of one rank is thrown on all, with that rank's number. If some ranks have not written their
// part after the time-out, Error(kIo) names them. Only rank 0 replaces and removes checkpoints.
void save_checkpoint(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options);

// Removes what the save of `step`, if it is saved, kept because of keeps_older. For rank 0.
void remove_outdated_checkpoints(const std::string& folder, int64_t step, const SaveOptions& options);

// Removes the leftovers of dead runs' saves, if no further save will. Warns of what cannot be removed.
void clear_unfinished_saves(const std::string& folder);

// Creates the run folder and its parents, and checks, before training starts, that a file can be written, synced
// and removed in it. Throws Error(kBadInput), or Error(kIo) if the disk is full.
void check_run_folder_writable(const std::string& folder);

struct CheckpointInfo {
  int64_t step = 0;
  std::string path;

  bool operator==(const CheckpointInfo&) const = default;
};

// The checkpoints in a run folder, newest first, unverified, without unfinished ones. A missing folder has none. A
// step that was being saved a second time may be listed twice, the newer save first.
std::vector<CheckpointInfo> list_checkpoints(const std::string& folder);

// Some elements of a tensor.
struct TensorRange {
  std::string name;
  ElementRange elements;
};

// A checkpoint that was found intact. Bytes are compared with their checksums again when they are read:
// Error(kBadInput) if a file changed after load_checkpoint.
class LoadedCheckpoint {
 public:
  int64_t step() const { return step_; }
  const std::string& path() const { return path_; }
  const json& state() const { return state_; }

  // All tensors with their whole shape, in the order of the files; `offset` is where a file has the first piece.
  const std::vector<SafetensorsEntry>& tensors() const;
  // The tensor of this name; null if there is none.
  const SafetensorsEntry* find(const std::string& name) const;

  // Null: it needs no other.
  const LoadedCheckpoint* base() const { return base_.get(); }
  // From here on `names`, tensors of `base`, are among this checkpoint's, after its own.
  void set_base(std::shared_ptr<const LoadedCheckpoint> base, const std::vector<std::string>& names);

  // Passes the elements that `ranges` name to `callback`, in pieces of at most kMaxPieceBytes, in the order of the
  // files: `bytes` are elements `first_element` and following of `tensor`, valid during the call. It reads little
  // more, and prefetches while `callback` works. Throws Error(kBadInput) for an unknown tensor.
  static constexpr int64_t kMaxPieceBytes = 16 << 20;
  using RangeCallback = std::function<void(const SafetensorsEntry& tensor, int64_t first_element, ByteSpan bytes)>;
  void read_ranges(const std::vector<TensorRange>& ranges, const RangeCallback& callback) const;
  // Reads one range of a tensor into `bytes`, of that size.
  void read_elements(const SafetensorsEntry& tensor, ElementRange range, std::span<std::byte> bytes) const;
  // The whole tensor.
  std::vector<std::byte> read(const SafetensorsEntry& tensor) const;

 private:
  friend LoadedCheckpoint load_checkpoint(const std::string& path, Communicator& ranks);

  void read_own_ranges(const std::vector<TensorRange>& ranges, const RangeCallback& callback) const;

  int64_t step_ = 0;
  std::string path_;
  json state_;
  std::shared_ptr<const std::vector<VerifiedFile>> files_;
  std::shared_ptr<const CheckpointIndex> index_;
  std::shared_ptr<const LoadedCheckpoint> base_;  // may be null
  std::vector<SafetensorsEntry> with_base_;       // tensors(), if there is a base
  std::set<std::string> of_base_;
};

// Opens the checkpoint in folder `path` (a step_<N>, or a copy of one under any name) after reading every byte of
// it, each of `ranks` a share of the files: all must call this, and if one throws, all do. Throws Error(kBadInput),
// which names the file and what is wrong with it. Reading, here and later, is a heartbeat().
LoadedCheckpoint load_checkpoint(const std::string& path, Communicator& ranks = *make_single_communicator());

// The newest intact checkpoint of a run folder; nullopt if there are none. Damaged ones are skipped: `report` gets
// the reason, and `refused`, if given, a list of them. If a run removes one in the meantime, its successor is used.
// Throws Error(kBadInput) if all are damaged or one has a later Parka's format, and Error(kIo) if one that may be
// intact cannot be read. All of `ranks` must call this, and all get the same.
std::optional<LoadedCheckpoint> load_newest(const std::string& folder,
                                            const std::function<void(const std::string& message)>& report,
                                            Communicator& ranks = *make_single_communicator(),
                                            std::vector<CheckpointInfo>* refused = nullptr);

// For a run that resumes from an older checkpoint than the refused ones: renames these to step_<N>.refused, so that
// a later start cannot return to them. Warns of each.
void set_refused_aside(const std::vector<CheckpointInfo>& refused);

}  // namespace parka
