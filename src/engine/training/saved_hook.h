#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "comm/communicator.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace parka {

// checkpoint.on_saved of a run: rank 0, which completes checkpoints, runs the command for them with /bin/sh, one at
// a time and beside the training. A checkpoint that comes during a command waits for its end; if another comes
// meanwhile, only the newer one has its turn. The command's processes get no Ctrl-C of the terminal and no stop
// signal that the training gets. on_saved.done of the run folder names the newest checkpoint for which the command
// ended with 0. Without a command in the config nothing happens.
class SavedHook {
 public:
  // Throws Error(kBadInput) where the system allows no further thread. The communicator must outlive it.
  SavedHook(const CheckpointConfig& config, Communicator& communicator);
  // Without a finish() before it, a command that runs goes on by itself, and what waits has no turn.
  ~SavedHook();
  SavedHook& operator=(SavedHook&&) = delete;

  // `path` is {path} in the command, as one word of a shell. From any thread.
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
  void work();
  bool run_command(const std::string& path, std::string& failure);
  void note_done(const std::string& path) const;

  Communicator& communicator_;
  const std::string on_saved_, done_path_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string next_;  // empty: none
  bool running_ = false, stopping_ = false;
  std::thread thread_;  // of rank 0, where there is a command; last: it uses everything above
};

}  // namespace parka
