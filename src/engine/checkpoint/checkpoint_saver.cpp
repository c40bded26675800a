#include "engine/checkpoint/checkpoint_saver.h"

#include <utility>

#include <fmt/format.h>

#include "core/thread.h"

namespace parka {
namespace {

SaveOptions in_background(SaveOptions options, const std::atomic<bool>& is_given_up) {
  options.in_background = true;
  options.is_given_up = [&is_given_up] { return is_given_up.load(); };
  return options;
}

}  // namespace

CheckpointSaver::CheckpointSaver(std::string folder, SaveOptions options)
    : folder_(std::move(folder)),
      options_(in_background(std::move(options), is_given_up_)),
      thread_(start_thread("saves checkpoints", [this] { work(); })) {}

CheckpointSaver::~CheckpointSaver() {
  stop_thread(thread_, mutex_, changed_, stopping_);
  if (!failure_ || !options_.report) return;
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& e) {
    options_.report(e.what());
  }
}

void CheckpointSaver::save(CheckpointContents contents) {
  {
    std::unique_lock lock(mutex_);
    wait_until_idle(lock);
    is_given_up_ = false;
    next_ = std::move(contents);
  }
  changed_.notify_all();
}

void CheckpointSaver::remove_outdated(int64_t step) {
  if (options_.group.rank != 0) return;
  {
    const std::lock_guard lock(mutex_);
    newest_good_ = step;
  }
  changed_.notify_all();
}

void CheckpointSaver::wait() {
  std::unique_lock lock(mutex_);
  wait_until_idle(lock);
}

bool CheckpointSaver::wait_for(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return is_idle(); });
}

std::exception_ptr CheckpointSaver::take_failure() {
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, nullptr);
}

bool CheckpointSaver::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void CheckpointSaver::save_here(const CheckpointContents& contents, std::function<bool()> is_given_up) {
  std::unique_lock lock(mutex_);
  wait_until_idle(lock);
  is_given_up_ = false;
  SaveOptions options = options_;
  if (is_given_up) options.is_given_up = std::move(is_given_up);
  options.in_background = false;
  options.writers = 1;  // this thread: what is still on a device must be read by no other
  failure_ = try_to_save(contents, std::move(options));
}

std::exception_ptr CheckpointSaver::try_to_save(const CheckpointContents& contents, SaveOptions options) {
  try {
    if (options.group.size > 1) options.group.id += fmt::format("_{}", ++num_saves_);
    save_checkpoint(folder_, contents, options);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr CheckpointSaver::try_to_remove_outdated(int64_t step) const {
  try {
    remove_outdated_checkpoints(folder_, step, options_);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

void CheckpointSaver::wait_until_idle(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return is_idle(); });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void CheckpointSaver::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return next_ || newest_good_ || stopping_; });
    if (!next_ && !newest_good_) return;
    std::optional<CheckpointContents> contents = std::exchange(next_, std::nullopt);
    const std::optional<int64_t> step = contents ? std::nullopt : std::exchange(newest_good_, std::nullopt);
    saving_ = true;
    lock.unlock();
    std::exception_ptr failure = step ? try_to_remove_outdated(*step) : try_to_save(*contents, options_);
    contents.reset();
    lock.lock();
    saving_ = false;
    if (!failure_) failure_ = std::move(failure);
    changed_.notify_all();
  }
}

}  // namespace parka
