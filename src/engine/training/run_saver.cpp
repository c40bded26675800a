#include "engine/training/run_saver.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/parallel.h"

namespace parka {
namespace {

using Clock = std::chrono::steady_clock;

// How often ranks that wait for a save tell each other how they stand.
constexpr auto kSlice = std::chrono::milliseconds(200);

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

SaveOptions in_background(SaveOptions options, const std::atomic<bool>& is_given_up) {
  options.in_background = true;
  options.is_given_up = [&is_given_up] { return is_given_up.load(); };
  return options;
}

template <typename Action>
std::exception_ptr failure_of(const Action& action) {
  try {
    action();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

RunSaver::RunSaver(TrainingRun& run, Communicator& communicator, const CheckpointConfig& config,
                   SaveOptions options)
    : run_(run),
      communicator_(communicator),
      folder_(config.folder),
      async_(config.async),
      options_(in_background(std::move(options), is_given_up_)),
      thread_(start_thread("saves checkpoints", [this] { work(); })) {}

RunSaver::~RunSaver() {
  stop_thread(thread_, mutex_, changed_, stopping_);
  if (!failure_ || !options_.report) return;
  try {
    std::rethrow_exception(failure_);
  } catch (const std::exception& e) {
    options_.report(e.what());
  }
}

void RunSaver::prepare() {
  if (async_) run_.prepare_staging();
}

bool RunSaver::can_stage() {
  if (!async_) return false;
  prepare();
  const std::string& failure = run_.staging_failure();
  if (failure.empty()) return true;
  if (!told_ && options_.report) {
    options_.report(fmt::format(
        "training will pause during each save: {}; free host memory, or set checkpoint.async=false", failure));
  }
  told_ = true;
  return false;
}

bool RunSaver::is_so_on_any_rank(bool here) { return communicator_.max(here ? 1.0 : 0.0) > 0; }

bool RunSaver::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool RunSaver::wait_for(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [this] { return !next_ && !newest_good_ && !is_working_; });
}

// A rank that has failed may be unable to leave a note in the folder, and one that waits for it there takes no part
// in what the run does. So until all are done, each repeats whether it has failed or is done.
bool RunSaver::wait_for_all_ranks() {
  for (;;) {
    bool is_done = wait_for(kSlice);
    const bool any_failed = is_so_on_any_rank(failed());
    if (any_failed) {
      is_given_up_ = true;
      // Only this rank's own writing is left. Should its disk hang, the watchdog sees that it stays away.
      while (!is_done) is_done = wait_for(kSlice);
    }
    if (!is_so_on_any_rank(!is_done)) return any_failed;
  }
}

// Contents that the thread which trains alone can read. In between it says what wait_for_all_ranks() says.
void RunSaver::save_here(const CheckpointContents& contents) {
  SaveOptions options = options_;
  options.in_background = false;
  options.writers = 1;  // this thread: what is still on a device must be read by no other
  options.is_given_up = [this, last = Clock::now()]() mutable {
    if (Clock::now() - last < kSlice) return false;
    const bool any_failed = is_so_on_any_rank(false);
    is_so_on_any_rank(true);  // not done
    last = Clock::now();
    return any_failed;
  };
  std::exception_ptr failure = try_to_save(contents, std::move(options));
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
  }
  wait_for_all_ranks();
}

bool RunSaver::previous_failed() {
  const bool any_failed = wait_for_all_ranks();
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const Error& e) {
      if (e.code() == ExitCode::kCorrupted || e.code() == ExitCode::kNonFinite || is_second_try_) throw;
      if (options_.report) options_.report(fmt::format("{}; trying once more, with the current state", e.what()));
    }
  } else if (any_failed && is_second_try_) {
    throw_io("another rank could not save the checkpoint of step {}", newest_step_);
  }
  is_second_try_ = any_failed;
  return any_failed;
}

void RunSaver::begin() {
  using Form = TrainingRun::SnapshotForm;
  const Form form = is_so_on_any_rank(!can_stage()) ? Form::kDirect : Form::kStaged;
  run_.check_before_save(form);
  newest_step_ = run_.completed_steps();
  CheckpointContents contents = run_.snapshot(form);
  contents.keeps_older = keeps_older_;
  kept_beside_ = keeps_older_ ? newest_step_ : -1;
  is_given_up_ = false;
  if (form == Form::kDirect) return save_here(contents);
  {
    const std::lock_guard lock(mutex_);
    next_ = std::move(contents);
  }
  changed_.notify_all();
}

void RunSaver::save() {
  const Clock::time_point begun = Clock::now();
  previous_failed();
  begin();
  wait_seconds_ += seconds_since(begun);
}

void RunSaver::remove_older() {
  keeps_older_ = false;
  const int64_t step = std::exchange(kept_beside_, -1);
  if (step < 0 || options_.group.rank != 0) return;
  {
    const std::lock_guard lock(mutex_);
    newest_good_ = step;
  }
  changed_.notify_all();
}

void RunSaver::finish() {
  const Clock::time_point begun = Clock::now();
  while (previous_failed()) begin();
  wait_seconds_ += seconds_since(begun);
}

double RunSaver::take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }

std::exception_ptr RunSaver::try_to_save(const CheckpointContents& contents, SaveOptions options) {
  if (options.group.size > 1) options.group.id += fmt::format("_{}", ++num_saves_);
  return failure_of([&] { save_checkpoint(folder_, contents, options); });
}

void RunSaver::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return next_ || newest_good_ || stopping_; });
    if (!next_ && !newest_good_) return;
    std::optional<CheckpointContents> contents = std::exchange(next_, std::nullopt);
    const std::optional<int64_t> step = contents ? std::nullopt : std::exchange(newest_good_, std::nullopt);
    is_working_ = true;
    lock.unlock();
    std::exception_ptr failure = step ? failure_of([&] { remove_outdated_checkpoints(folder_, *step, options_); })
                                      : try_to_save(*contents, options_);
    contents.reset();
    lock.lock();
    is_working_ = false;
    if (!failure_) failure_ = std::move(failure);
    changed_.notify_all();
  }
}

}  // namespace parka
