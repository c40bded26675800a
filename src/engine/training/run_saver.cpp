#include "engine/training/run_saver.h"

#include <chrono>
#include <utility>

#include <fmt/format.h>

namespace parka {
namespace {

using Clock = std::chrono::steady_clock;

// How often ranks that wait for a save tell each other how they stand.
constexpr auto kSlice = std::chrono::milliseconds(200);

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

RunSaver::RunSaver(TrainingRun& run, Communicator& communicator, const CheckpointConfig& config,
                   SaveOptions options)
    : run_(run),
      communicator_(communicator),
      async_(config.async),
      report_(options.report),
      saver_(config.folder, std::move(options)) {}

void RunSaver::prepare() {
  if (async_) run_.prepare_staging();
}

bool RunSaver::can_stage() {
  if (!async_) return false;
  prepare();
  const std::string& failure = run_.staging_failure();
  if (failure.empty()) return true;
  if (!told_ && report_) {
    report_(fmt::format("training will pause during each save: {}; free host memory, or set checkpoint.async=false",
                        failure));
  }
  told_ = true;
  return false;
}

bool RunSaver::is_so_on_any_rank(bool here) { return communicator_.max(here ? 1.0 : 0.0) > 0; }

// A rank that has failed may be unable to leave a note in the folder, and one that waits for it there takes no part
// in what the run does. So until all are done, each says again and again whether it has failed, and whether it is
// done.
bool RunSaver::wait_for_all_ranks() {
  for (;;) {
    bool is_done = saver_.wait_for(kSlice);
    const bool failed = is_so_on_any_rank(saver_.failed());
    if (failed) {
      saver_.give_up();
      // What is left is this rank's own writing. Should its disk hang, the watchdog sees that this rank stays away.
      while (!is_done) is_done = saver_.wait_for(kSlice);
    }
    if (!is_so_on_any_rank(!is_done)) return failed;
  }
}

// On the thread that trains, which says in between what wait_for_all_ranks() says.
void RunSaver::save_directly(const CheckpointContents& contents) {
  saver_.save_here(contents, [this, last = Clock::now()]() mutable {
    if (Clock::now() - last < kSlice) return false;
    const bool failed = is_so_on_any_rank(false);
    is_so_on_any_rank(true);  // not done
    last = Clock::now();
    return failed;
  });
  wait_for_all_ranks();
}

bool RunSaver::previous_failed() {
  const bool failed = wait_for_all_ranks();
  const std::exception_ptr failure = saver_.take_failure();
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const Error& e) {
      if (e.code() == ExitCode::kCorrupted || e.code() == ExitCode::kNonFinite || is_second_try_) throw;
      if (report_) report_(fmt::format("{}; trying once more, with the current state", e.what()));
    }
  } else if (failed && is_second_try_) {
    throw_io("another rank could not save the checkpoint of step {}", newest_step_);
  }
  is_second_try_ = failed;
  return failed;
}

void RunSaver::begin() {
  using Form = TrainingRun::SnapshotForm;
  const Form form = is_so_on_any_rank(!can_stage()) ? Form::kDirect : Form::kStaged;
  run_.check_before_save(form);
  newest_step_ = run_.completed_steps();
  CheckpointContents contents = run_.snapshot(form);
  contents.keeps_older = keeps_older_;
  kept_beside_ = keeps_older_ ? newest_step_ : -1;
  if (form == Form::kStaged) {
    saver_.save(std::move(contents));
  } else {
    save_directly(contents);
  }
}

void RunSaver::save() {
  const Clock::time_point begun = Clock::now();
  previous_failed();
  begin();
  wait_seconds_ += seconds_since(begun);
}

void RunSaver::remove_older() {
  keeps_older_ = false;
  if (kept_beside_ >= 0) saver_.remove_outdated(std::exchange(kept_beside_, -1));
}

void RunSaver::finish() {
  const Clock::time_point begun = Clock::now();
  while (previous_failed()) begin();
  wait_seconds_ += seconds_since(begun);
}

double RunSaver::take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }

}  // namespace parka
