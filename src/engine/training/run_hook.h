#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/saved_hook.h"
#include "engine/config/config.h"

namespace parka {

// checkpoint.on_saved of a run. Rank 0, which completes checkpoints, runs the command, and names in on_saved.done
// of the run folder the newest checkpoint for which it ended with 0. Where the config has no command nothing
// happens.
class RunHook {
 public:
  // `waiting` is called again and again while the training waits for a command. The communicator must outlive it.
  RunHook(const CheckpointConfig& config, Communicator& communicator, std::function<void()> waiting);

  void run(const std::string& path);
  // A new run begins in the folder, where one before may have had checkpoints of the same names.
  void begin_anew();
  // Runs it again for the checkpoint that a run goes on from, unless it has ended well for that: the process may
  // have ended while it ran, and what it copies is a run's only way to another machine.
  void repeat(const LoadedCheckpoint& checkpoint);
  // On rank 0 waits until all is done. A run that was asked to stop waits, too: what the command copies may be all
  // that remains of this machine. One that is asked only now, as the command hangs, does not.
  void finish();
  // All ranks wait: a launcher would end rank 0 with the first that ends. For all ranks at once.
  void finish_on_all_ranks();

 private:
  Communicator& communicator_;
  const std::string done_path_;
  std::function<void()> waiting_;
  const bool has_command_;
  std::unique_ptr<SavedHook> hook_;  // of rank 0
};

}  // namespace parka
