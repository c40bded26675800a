#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/checkpoint/checkpoint.h"

namespace parka {

// Saves checkpoints from a background thread while training continues. Use it from one thread; the observer and the
// report of `options` are called from the background thread. If options.group has several ranks, each has a saver,
// and all savers get the same saves in the same order.
class CheckpointSaver {
 public:
  // Throws Error(kBadInput) where the system allows no further thread.
  CheckpointSaver(std::string folder, SaveOptions options);
  // Waits for the current save. An error that nobody has seen yet goes to options.report.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Saves `contents` in the background; its memory is freed after that. Waits for the previous save first, so that
  // only one copy is in memory. Throws the previous save's error, if it had one; then `contents` is not saved.
  void save(CheckpointContents contents);
  // The same on this thread, for contents that only it can read. An error is kept like one of the background
  // thread. `is_given_up` is asked on this thread while it waits for other ranks, instead of what give_up() sets.
  void save_here(const CheckpointContents& contents, std::function<bool()> is_given_up = {});
  // On rank 0 removes in the background, once nothing is left to save, what remove_outdated_checkpoints() does. An
  // error is kept like one of a save. Does nothing on other ranks.
  void remove_outdated(int64_t step);
  // Waits until nothing is left to save. Throws the error of the last save, if it had one, once.
  void wait();
  // Waits for so long at most. Returns whether nothing is left to save.
  bool wait_for(std::chrono::milliseconds patience);
  // The error of the last save, if it had one, once. Nothing may be left to save.
  std::exception_ptr take_failure();
  // Ends the present save if it waits for other ranks, one of which has failed.
  void give_up() { is_given_up_ = true; }
  // Whether the last save has failed and its error has not been thrown or returned yet.
  bool failed() const;

 private:
  void work();
  // Saves; returns the error, if there is one.
  std::exception_ptr try_to_save(const CheckpointContents& contents, SaveOptions options);
  std::exception_ptr try_to_remove_outdated(int64_t step) const;
  bool is_idle() const { return !next_ && !newest_good_ && !saving_; }
  void wait_until_idle(std::unique_lock<std::mutex>& lock);

  const std::string folder_;
  std::atomic<bool> is_given_up_ = false;  // the present save
  const SaveOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<CheckpointContents> next_;  // handed over, not yet taken by the thread
  std::optional<int64_t> newest_good_;      // the step of remove_outdated(), likewise
  bool saving_ = false;                     // or removing
  int64_t num_saves_ = 0;                   // begun; the same on all ranks
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace parka
