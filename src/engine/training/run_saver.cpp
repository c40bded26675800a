#include "engine/training/run_saver.h"

#include <chrono>
#include <utility>

#include <fmt/format.h>

namespace parka {
namespace {

using Clock = std::chrono::steady_clock;

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

bool RunSaver::previous_failed() {
  const std::exception_ptr failure = saver_.wait_for_failure();
  const bool failed = communicator_.max(failure ? 1.0 : 0.0) > 0;
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
  const Form form = can_stage() ? Form::kStaged : Form::kDirect;
  run_.check_before_save(form);
  newest_step_ = run_.completed_steps();
  if (form == Form::kStaged) {
    saver_.save(run_.snapshot(form));
  } else {
    saver_.save_here(run_.snapshot(form));
  }
}

void RunSaver::save() {
  const Clock::time_point begun = Clock::now();
  previous_failed();
  begin();
  wait_seconds_ += seconds_since(begun);
}

void RunSaver::finish() {
  const Clock::time_point begun = Clock::now();
  while (previous_failed()) begin();
  wait_seconds_ += seconds_since(begun);
}

double RunSaver::take_wait_seconds() { return std::exchange(wait_seconds_, 0.0); }

}  // namespace parka
