#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace parka {

// The command that `checkpoint.on_saved` gives with its {path} replaced by a checkpoint's folder, as one word of a
// shell.
std::string command_for(const std::string& on_saved, const std::string& path);

// Runs checkpoint.on_saved for checkpoints that are complete, with /bin/sh, one at a time and beside the training.
// A checkpoint that comes during a command waits for its end; if another comes meanwhile, only the newer one has
// its turn. The command's processes get no Ctrl-C of the terminal and no stop signal that the training gets.
class SavedHook {
 public:
  struct Listener {
    std::function<void(const std::string& message)> report;  // of a command that fails: a line
    std::function<void(const std::string& path)> done;       // of one that ended with 0
  };
  // The listener is called from another thread. Throws Error(kBadInput) where the system allows no further thread.
  SavedHook(std::string on_saved, Listener listener);
  // Without a finish() before it, a command that runs goes on by itself, and what waits has no turn.
  ~SavedHook();
  SavedHook(const SavedHook&) = delete;
  SavedHook& operator=(const SavedHook&) = delete;

  void run(const std::string& path);
  // Waits until all is done; `waiting` is called first if there is something to wait for. Once `is_given_up` it
  // waits no longer, and returns false.
  bool finish(const std::function<void()>& waiting, const std::function<bool()>& is_given_up);

 private:
  void work();
  bool run_command(const std::string& path, std::string& failure);

  const std::string on_saved_;
  const Listener listener_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string next_;  // empty: none
  bool running_ = false, stopping_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace parka
