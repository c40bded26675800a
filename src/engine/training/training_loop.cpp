#include "engine/training/training_loop.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <optional>
#include <set>
#include <vector>

#include <fmt/ranges.h>

#include "core/heartbeat.h"
#include "core/log/log.h"
#include "core/parallel.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/inference_run.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/text/image_geometry.h"
#include "engine/text/tokenizer_files.h"
#include "engine/training/progress.h"
#include "engine/training/run_evaluation.h"
#include "engine/training/run_folder.h"
#include "engine/training/run_log.h"
#include "engine/training/run_saver.h"
#include "engine/training/saved_hook.h"
#include "engine/training/speed.h"
#include "engine/training/stop_signal.h"
#include "engine/training/training_run.h"

namespace parka {
namespace {

// Returns the offset of local time, "+0100".
std::string utc_offset() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 8> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%z", &local)};
}

// Calls `action`. Returns false, with a warning, where it fails as a save may: the run's own error must prevail.
template <typename Action>
bool succeeds(const Action& action) {
  try {
    action();
    return true;
  } catch (const Error& e) {
    if (e.code() != ExitCode::kIo && e.code() != ExitCode::kNonFinite) throw;
    log_warning("{}", e.what());
    return false;
  }
}

// Members use those above them alone: the run and its records know nothing of saves, nor these of the loop.
class TrainingLoop {
 public:
  TrainingLoop(const Config& config, const TrainingStart& start, Launch& launch, const RunLock& lock,
               Device& device, Communicator& communicator)
      : start_(start),
        launch_(launch),
        lock_(lock),
        device_(device),
        communicator_(communicator),
        is_first_(communicator.rank() == 0),
        run_(config, device, communicator),
        config_(run_.config()),
        speed_(speed_of(config, run_.model().parameters(), device.name())),
        records_(config, start.begun),
        hook_(config.checkpoint, communicator),
        saver_(run_, communicator, config_.checkpoint, save_options()) {
    run_.set_place(start.place);
  }

  int run() {
    try {
      open_data();
      describe();
      begin_or_resume();
      const int code = evaluate_and_train();
      hook_.finish();
      return code;
    } catch (const Error& e) {
      // A full disk does not invalidate the checkpoint that is being copied.
      if (e.code() == ExitCode::kIo) hook_.finish();
      throw;
    }
  }

 private:
  // The evaluation that an earlier start has left out comes first.
  int evaluate_and_train() {
    if (evaluation_is_missing_ && !evaluate()) return stop();
    if (communicator_.max(records_.deferred() ? 1.0 : 0.0) > 0) end_after_failure();
    if (run_.completed_steps() < config_.training.steps) return train();
    if (evaluation_is_missing_ && run_.skipped_in_a_row() == 0) saver_.remove_older();  // its losses are finite
    return 0;
  }

  // ---- the loop

  int train() {
    const int64_t steps = config_.training.steps;
    saver_.prepare();
    progress_.emplace(steps, run_.tokens_per_step(), speed_, communicator_.size());
    if (agree().stopped) return stop();  // asked while it was loading
    while (run_.completed_steps() < steps) {
      heartbeat("training", run_.completed_steps() + 1);
      take(run_.step());
      const int64_t step = run_.completed_steps();
      const bool is_last = step == steps, save_due = save_is_due(config_, step), eval_due = evaluation_is_due(step);
      const Agreement agreed = agree();
      if (eval_due || save_due || is_last || agreed.any()) take(run_.finish());
      if (agreed.failed) end_after_failure();
      if (agreed.stopped && (!is_last || eval_due)) return stop();
      const bool is_worth_it = is_last || run_.applied_steps() > 0;  // else a checkpoint would only bind the config
      if ((save_due && is_worth_it) || agreed.save_failed) save();
      if (eval_due && !evaluate()) return stop();
      if (is_last && eval_due && run_.skipped_in_a_row() == 0) saver_.remove_older();
    }
    saver_.finish();
    log_memory(run_, device_);
    if (records_.deferred()) {
      hook_.finish();
      records_.deferred().rethrow();
    }
    log_end(config_, run_.completed_steps(), saver_.newest_step());
    return 0;
  }

  // Takes the result of a step, which step() and finish() report as soon as it is known.
  void take(const std::optional<StepReport>& report) {
    if (!report) return;
    progress_->add(*report, records_.write_step(*report, run_, speed_, saver_.take_wait_seconds()));
    if (!report->is_finite() && ends_run(config_, run_.skipped_in_a_row())) end_at_bad_step(*report);
    if (!report->applied && is_first_) log_skipped_step(*report, config_);
    // The weights that were saved before this step are sound.
    if (report->is_finite() && saver_.newest_step() >= 0) saver_.remove_older();
    const bool is_last = report->step == config_.training.steps;
    if (report->step % config_.training.log_interval == 0 || is_last) {
      constexpr size_t kTime = 20;  // the columns before a line that stays
      const size_t columns = log_columns();
      const std::string line = progress_->take_line(is_last && columns > kTime ? columns - kTime : columns);
      columns > 0 && !is_last ? show_line(line) : log_line(LogLevel::kInfo, line);
    }
  }

  // Ranks learn of these at different steps, and act on them in the same.
  struct Agreement {
    bool stopped = false;      // a signal asks to save and stop
    bool save_failed = false;  // in the background
    bool failed = false;       // reading data or writing metrics: the state is sound
    bool any() const { return stopped || save_failed || failed; }
  };

  Agreement agree() {
    DeferredError& failure = records_.deferred();
    if (!failure && run_.completed_steps() < config_.training.steps) failure.keep(run_.data_failure());
    // The largest value wins: what is left out is still there in the next step.
    const int own = (failure ? 4 : 0) + (stop_signal() != 0 ? 2 : 0) + (saver_.failed() ? 1 : 0);
    const int most = static_cast<int>(communicator_.max(own));
    return {(most & 2) != 0, (most & 1) != 0, (most & 4) != 0};
  }

  // Weights are known to be sound once a step or evaluation with them was finite; until then older checkpoints
  // stay. A save while steps are skipped holds the last update's weights, which may be their reason.
  void save() {
    const int64_t step = run_.completed_steps();
    const bool is_sound = !ends_at_bad_step_ && run_.skipped_in_a_row() == 0;
    if (is_sound) saver_.remove_older();  // those beside the checkpoint that the run was resumed from, too
    saver_.keep_older(!is_sound || step < config_.training.steps || evaluation_is_due(step));
    heartbeat("saving a checkpoint", step);
    saver_.save();
  }

  bool evaluation_is_due(int64_t step) const { return parka::evaluation_is_due(config_.training, suite_, step); }

  // Returns false where a signal asks to stop: what is missing then is evaluated when the run goes on.
  bool evaluate() {
    EvaluationEnd end = EvaluationEnd::kDone;
    try {
      end = evaluate_run(run_, communicator_, suite_, *prompts_, records_);
    } catch (const Error& e) {
      if (e.code() != ExitCode::kNonFinite) throw;
      // The run ends, but not before what is being saved, and the command that follows, end.
      succeeds([this] { saver_.finish(); });
      hook_.finish_on_all_ranks();
      throw;
    }
    if (end == EvaluationEnd::kDeferred) end_after_failure();
    return end == EvaluationEnd::kDone;
  }

  // ---- the start

  void open_data() {
    launch_.require_same(
        "the tokens of data.train",
        fmt::format("{:016x} {}", run_.data().fingerprint(), fmt::join(run_.data().source_sequences(), " ")),
        "give all ranks the same files");
    suite_ = open_suite(config_);
    if (is_first_) {
      check_tokenizers(config_, suite_, tokenizer_of_run(config_));
      warn_of_tokenizers(config_, suite_);
      warn_of_gaps(run_.data().files(), suite_);
      warn_of_repeats(run_.data().token_files(), run_.data().rules().images);
      warn_of_training_files(run_.data(), config_);
    }
    prompts_.emplace(config_, communicator_);
    launch_.require_same("what is evaluated on", describe_suite(suite_), "give all ranks the same files");
  }

  void describe() const {
    const auto fact = [&](const char* name) { return start_.facts.at(name).get<std::string>(); };
    log_info("parka {} ({}) on {}; times here are UTC{}", fact("version"), fact("commit"), launch_.host(),
             utc_offset());
    log_info("{}; recipe {}", device_.description(), name_of(config_.precision.recipe));
    if (!start_.gemm_line.empty()) log_line(LogLevel::kInfo, start_.gemm_line);
    if (communicator_.size() > 1) {
      log_info("{}, ZeRO stage {}{}", communicator_.description(), config_.distributed.zero_stage,
               sharing_ranks(config_));
    }
    log_model(run_, speed_);
    log_data(run_.data(), config_);
    if (config_.checkpoint.interval == 0) {
      log_info("checkpoint.interval = 0: nothing is saved before the run {}; a crash loses its steps",
               config_.checkpoint.save_final ? "is stopped or has ended" : "is stopped");
    }
  }

  void begin_or_resume() {
    heartbeat("loading a checkpoint");
    const CheckpointConfig& checkpoint = config_.checkpoint;
    if (start_.must_be_new && !list_checkpoints(checkpoint.folder).empty()) {
      throw_bad_input(
          "{}: has checkpoints of an earlier run and --must-be-new was given; remove them, or choose another "
          "checkpoint.folder",
          checkpoint.folder);
    }
    const bool resumes = resume();
    if (!resumes) begin();
    const int64_t step = first_step_ = run_.completed_steps();
    const auto recorded = is_first_ && resumes ? records_.read_earlier(step) : std::set<std::string>();
    // The save comes before the evaluation of its step, which may have been cut off, or have grown by now.
    const bool is_missing = evaluation_is_due(step) && !std::ranges::includes(recorded, evaluated_by(suite_));
    evaluation_is_missing_ = communicator_.max(is_first_ && is_missing ? 1.0 : 0.0) > 0;
    const bool is_done = step >= config_.training.steps;
    if (is_first_) {
      if (!is_done) warn_of_odd_values(config_);
      if (!resumes) records_.begin_anew();
      if (!is_done || evaluation_is_missing_)
        open_folder(resumes);                     // else nothing changes, and a loop may ask again
      clear_unfinished_saves(checkpoint.folder);  // the next save may need their room
    }
    if (is_done) {
      log_info("nothing to do: the run is at step {} of {}; a larger training.steps continues it", step,
               config_.training.steps);
    }
  }

  // From the newest good checkpoint of the folder, if it has one.
  bool resume() {
    const auto refused = [this](const std::string& message) {
      if (is_first_) log_line(LogLevel::kWarning, message);
    };
    std::vector<CheckpointInfo> passed_over;
    const std::string given = config_.checkpoint.init_from;
    const std::optional<LoadedCheckpoint> checkpoint =
        load_newest(config_.checkpoint.folder, refused, communicator_, &passed_over);
    if (!checkpoint) return false;
    const std::vector<std::string> differences = run_.restore(*checkpoint, start_.convert_states);
    if (is_first_) set_refused_aside(passed_over);
    hook_.repeat(*checkpoint);
    log_info("resuming from {} (step {})", checkpoint->path(), checkpoint->step());
    for (const std::string& difference : differences) log_info("changed since: {}", difference);
    saver_.continue_from(checkpoint->step());
    // The source of a run stays known, also where a later start gives something else or nothing.
    const std::string& kept = config_.checkpoint.init_from;
    if (is_first_ && !given.empty() && given != kept) {
      log_warning(
          "checkpoint.init_from = {} is ignored: the run goes on from its own checkpoint, and began with {}; to start "
          "from it, choose another checkpoint.folder",
          given, kept.empty() ? "random weights" : kept);
    }
    return true;
  }

  void begin() {
    hook_.begin_anew();
    const std::string& source = config_.checkpoint.init_from;
    if (source.empty()) {
      run_.initialize();
      log_info("starting a new run in {}", config_.checkpoint.folder);
      return;
    }
    const LoadedCheckpoint checkpoint = open_checkpoint(source, {}, communicator_);
    if (is_first_) check_start(config_);
    const std::vector<std::string> differences = run_.initialize_from(checkpoint);
    log_info("starting a new run in {} with the weights of {}", config_.checkpoint.folder, checkpoint.path());
    for (const std::string& difference : differences) log_info("different from its config: {}", difference);
  }

  void open_folder(bool resumes) {
    const int64_t step = run_.completed_steps();
    if (resumes) {
      log_removals(config_.checkpoint);
      records_.continue_after(step, evaluation_is_missing_ ? evaluated_by(suite_) : std::set<std::string>());
    }
    write_run_config(config_.checkpoint.folder, resolved_text(config_), start_.config_file);
    keep_tokenizer(config_);
    warn_of_image_geometry(config_);
    keep_origin(config_.checkpoint.folder, config_.checkpoint.init_from);
    records_.open(lock_, step, start_.facts);
  }

  SaveOptions save_options() {
    SaveOptions options;
    options.group = {.rank = communicator_.rank(),
                     .size = communicator_.size(),
                     .id = communicator_.gather_text(make_save_id()).front()};
    options.keep = config_.checkpoint.keep;
    // The CPU trains on its own cores; beside a GPU most are idle, but the loader's.
    options.writers = device_.kind() == DeviceKind::kCpu ? 1 : std::clamp(num_threads() / 4, 1, 4);
    options.report = [](const std::string& message) { log_line(LogLevel::kWarning, message); };
    options.saved = [this](const std::string& path, int64_t num_bytes, double seconds) {
      log_info("saved {}: {:.3g} GB in {:.1f} s", path, 1e-9 * static_cast<double>(num_bytes), seconds);
      hook_.run(path);
    };
    options.check_folder = [this] { lock_.require_ours(); };
    options.before_publish = [this] { records_.sync(); };
    return options;
  }

  // ---- the ends

  // Returns when the present state is saved.
  void save_now() {
    if (saver_.newest_step() != run_.completed_steps()) save();
    heartbeat("saving a checkpoint", run_.completed_steps());
    saver_.finish();
  }

  // Before its first update a process has nothing to save: the state is that of the checkpoint which was loaded, or
  // of an untrained model, and a checkpoint of that would only bind the config.
  bool has_trained() const { return run_.completed_steps() > first_step_ && run_.applied_steps() > 0; }

  // Because of a signal. Returns the exit code of a run that has more to do.
  int stop() {
    const bool is_new = has_trained();
    if (is_new) save_now();
    const int signal = stop_signal();
    log_info("{}: {} step {} and stopping; the same command continues the run{}",
             signal == 0 ? "another rank was asked to stop" : strsignal(signal),
             is_new ? "saved" : "nothing to save at", run_.completed_steps(), warnings_above());
    return static_cast<int>(ExitCode::kStopped);
  }

  [[noreturn]] void end_at_bad_step(const StepReport& bad) {
    ends_at_bad_step_ = true;
    const int64_t skipped = run_.skipped_in_a_row();
    const std::optional<int64_t> saved = save_sound_state(bad);
    hook_.finish_on_all_ranks();
    throw_bad_step(bad, config_, skipped, saved);
  }

  // Saves what a step that is not finite has left, and returns the step of that state; nothing where it is in no
  // checkpoint. The cause may have begun long before, so older checkpoints stay.
  std::optional<int64_t> save_sound_state(const StepReport& bad) {
    if (config_.optimizer.release_gradients) return std::nullopt;
    if (config_.training.non_finite == NonFinitePolicy::kStop) {
      run_.take_back(bad);
    } else if (const std::optional<StepReport> next = run_.finish()) {
      records_.write_step(*next, run_, speed_, saver_.take_wait_seconds());
    }
    const int64_t step = run_.completed_steps();
    if (run_.applied_steps() == 0) return std::nullopt;
    const bool is_saved = step == first_step_ || succeeds([this] { save_now(); });
    return is_saved ? std::optional(step) : std::nullopt;
  }

  // Saves what is sound before the run ends because of something else, which all ranks then throw.
  [[noreturn]] void end_after_failure() {
    const bool is_saved = has_trained() && succeeds([this] { save_now(); });
    records_.write_again();
    hook_.finish_on_all_ranks();
    records_.deferred().throw_on_all_ranks(communicator_, [&](ExitCode code) -> std::string {
      if (!is_saved) return "";
      return fmt::format(
          "; step {} is saved: once this is mended, the same command resumes from there{}", run_.completed_steps(),
          code == ExitCode::kBadInput ? ", or where data.train changes a new run with checkpoint.init_from" : "");
    });
  }

  const TrainingStart& start_;
  Launch& launch_;
  const RunLock& lock_;
  Device& device_;
  Communicator& communicator_;
  const bool is_first_;
  TrainingRun run_;
  const Config& config_;  // the run's, which knows what it began with
  const ModelSpeed speed_;
  EvaluationSuite suite_;
  std::optional<RunPrompts> prompts_;
  std::optional<Progress> progress_;
  RunRecords records_;
  SavedHook hook_;
  RunSaver saver_;
  int64_t first_step_ = 0;              // completed when this process began to train
  bool evaluation_is_missing_ = false;  // of that step
  bool ends_at_bad_step_ = false;
};

}  // namespace

std::string resolved_text(const Config& config) { return to_json(config).dump(2) + "\n"; }

int train(const Config& config, const TrainingStart& start, Launch& launch, const RunLock& lock, Device& device,
          Communicator& communicator) {
  return TrainingLoop(config, start, launch, lock, device, communicator).run();
}

}  // namespace parka
