#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <set>

#include <unistd.h>

#include "comm/launch/launch.h"
#include "comm/launch/launch_checks.h"
#include "core/log/log.h"
#include "core/parallel.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/commands/version.h"
#include "engine/config/config_io.h"
#include "engine/config/distributed_config.h"
#include "engine/config/finetune_config.h"
#include "engine/config/given_keys.h"
#include "engine/evaluation/evaluation_suite.h"
#include "engine/evaluation/inference_run.h"
#include "engine/files/file_io.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/planning/gpu_plan.h"
#include "engine/step/attention_watch.h"
#include "engine/text/image_geometry.h"
#include "engine/text/tokenizer_files.h"
#include "engine/training/deferred_error.h"
#include "engine/training/metrics_log.h"
#include "engine/training/progress.h"
#include "engine/training/run_evaluation.h"
#include "engine/training/run_folder.h"
#include "engine/training/run_hook.h"
#include "engine/training/run_lock.h"
#include "engine/training/run_log.h"
#include "engine/training/run_records.h"
#include "engine/training/run_saver.h"
#include "engine/training/speed.h"
#include "engine/training/stop_signal.h"
#include "engine/training/training_run.h"

namespace parka {
namespace {

void warn(const std::string& message) { log_line(LogLevel::kWarning, message); }

// Of config.json in the run folder.
std::string resolved_text(const Config& config) { return to_json(config).dump(2) + "\n"; }

// That of local time, "+0100".
std::string utc_offset() {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 8> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%z", &local)};
}

// Trains one run folder from where it stands to training.steps: one rank of it. Rank 0 alone writes the run's log,
// metrics and config; checkpoints are written and read by all ranks.
class TrainCommand {
 public:
  // `started` is when the program was; `gpu` the device's number on its host, -1 for the CPU.
  TrainCommand(const Config& config, const TrainOptions& options, Launch& launch, const RunLock& lock, int gpu,
               std::unique_ptr<Device> device, DecidedGemms gemms, RunRecords::Clock::time_point started)
      : config_(config),
        options_(options),
        launch_(launch),
        lock_(lock),
        gpu_(gpu),
        device_(std::move(device)),
        gemms_(std::move(gemms)),
        communicator_(launch.make_communicator(*device_)),
        run_(config, *device_, *communicator_,
             [this] { launch_.watchdog().at(0, "reading data.train or a base"); }),
        speed_(speed_of(config, run_.model().parameters(), device_->name())),
        records_(started, deferred_),
        attention_watch_(config),
        hook_(config.checkpoint, *communicator_,
              [this] { launch_.watchdog().at(0, "waiting for checkpoint.on_saved"); }),
        evaluation_(run_, *communicator_, records_, deferred_,
                    [this] { launch_.watchdog().at(run_.completed_steps(), "evaluation"); }),
        saver_(run_, *communicator_, config.checkpoint, save_options()) {
    run_.set_place(place());
  }

  int train() {
    try {
      const int code = start_and_train();
      hook_.finish();
      return code;
    } catch (const Error& e) {
      // A disk that is full says nothing of the checkpoint whose copy is being made.
      if (e.code() == ExitCode::kIo) hook_.finish();
      throw;
    }
  }

 private:
  int start_and_train() {
    launch_.require_same(
        "the tokens of data.train",
        fmt::format("{:016x} {}", run_.data().fingerprint(), fmt::join(run_.data().source_sequences(), " ")),
        "give all ranks the same files");
    evaluation_.open();
    if (is_first()) warn_of_tokenizers(run_.config(), evaluation_.suite());
    if (is_first()) warn_of_gaps(run_.data().files(), evaluation_.suite());
    launch_.require_same("what is evaluated on", describe_suite(evaluation_.suite()),
                         "give all ranks the same files");
    describe();
    resume_or_initialize();
    const bool is_done = run_.completed_steps() >= config_.training.steps;
    if (is_first() && (!is_done || evaluation_is_missing_)) {  // else nothing changes, and a loop may ask again
      write_run_config(config_.checkpoint.folder, resolved_text(config_), config_file(options_.config_path));
      keep_tokenizer(config_);
      warn_of_image_geometry(config_);
      keep_origin(config_.checkpoint.folder, config_.checkpoint.init_from);
      records_.open(metrics_path(), MetricsHooks{[this] { lock_.require_ours(); }, warn});
      records_.write_start(run_.completed_steps(), start_facts());
    }
    if (is_first()) clear_unfinished_saves(config_.checkpoint.folder, warn);  // the next save may need their room
    if (is_done) {
      log_info("nothing to do: the run is at step {} of {}; a larger training.steps continues it",
               run_.completed_steps(), config_.training.steps);
    }
    if (evaluation_is_missing_ && !evaluate()) return stop();
    if (communicator_->max(deferred_ ? 1.0 : 0.0) > 0) end_after_failure();
    if (is_done) {
      if (evaluation_is_missing_ && run_.skipped_in_a_row() == 0) saver_.remove_older();  // its losses are finite
      return 0;
    }
    saver_.prepare();
    return train_steps();
  }

  bool is_first() const { return communicator_->rank() == 0; }

  std::string place() const {
    const std::string device = gpu_ < 0 ? device_->name() : fmt::format("{} {}", device_->name(), gpu_);
    return fmt::format("rank {} ({}, {})", communicator_->rank(), launch_.host(), device);
  }

  nlohmann::ordered_json start_facts() const {
    nlohmann::ordered_json facts = {{"host", launch_.host()}, {"device", device_->name()}};
    for (const auto& [name, version] : device_->software()) facts[name] = version;
    if (gpu_ >= 0) facts["gemm_tuning"] = gemms_.source;
    facts["ranks"] = communicator_->size();
    if (communicator_->size() > 1) facts["collectives"] = communicator_->description();
    facts["version"] = parka_version();
    facts["commit"] = parka_commit();
    facts["command"] = options_.command_line;
    return facts;
  }

  std::string metrics_path() const { return config_.checkpoint.folder + "/metrics.jsonl"; }

  SaveOptions save_options() {
    SaveOptions options;
    options.group = {.rank = communicator_->rank(),
                     .size = communicator_->size(),
                     .id = communicator_->gather_text(make_save_id()).front()};
    options.keep = config_.checkpoint.keep;
    // The CPU trains on its own cores; beside a GPU most are idle, but the loader's.
    options.writers = device_->kind() == DeviceKind::kCpu ? 1 : std::clamp(num_threads() / 4, 1, 4);
    options.report = warn;
    options.progress = [this] { launch_.watchdog().at(run_.completed_steps(), "saving a checkpoint"); };
    options.saved = [this](const std::string& path, int64_t num_bytes, double seconds) {
      log_info("saved {}: {:.3g} GB in {:.1f} s", path, 1e-9 * static_cast<double>(num_bytes), seconds);
      hook_.run(path);
    };
    options.check_folder = [this] { lock_.require_ours(); };
    options.before_publish = [this] { sync_metrics(); };
    return options;
  }

  // After a power failure a checkpoint must not be there without the records of its steps; but it is worth more.
  void sync_metrics() {
    try {
      records_.sync();
    } catch (const Error& e) {
      warn(e.what());
    }
  }

  void describe() const {
    log_info("parka {} ({}) on {}; times here are UTC{}", parka_version(), parka_commit(), launch_.host(),
             utc_offset());
    log_info("{}; recipe {}", device_->description(), name_of(config_.precision.recipe));
    if (!gemms_.line.empty()) log_line(LogLevel::kInfo, gemms_.line);
    if (communicator_->size() > 1) {
      log_info("{}, ZeRO stage {}{}", communicator_->description(), config_.distributed.zero_stage,
               sharing_ranks(config_));
    }
    log_model(run_, speed_);
    log_data(run_.data(), config_);
    if (config_.checkpoint.interval == 0) {
      log_info("checkpoint.interval = 0: nothing is saved before the run {}; a crash loses its steps",
               config_.checkpoint.save_final ? "is stopped or has ended" : "is stopped");
    }
  }

  void resume_or_initialize() {
    launch_.watchdog().at(0, "loading a checkpoint");
    const auto refused = [this](const std::string& message) {
      if (is_first()) warn(message);
    };
    const LoadGroup group = {.rank = communicator_->rank(),
                             .size = communicator_->size(),
                             .gather = [this](const std::string& text) { return communicator_->gather_text(text); },
                             .progress = [this] { launch_.watchdog().at(0, "loading a checkpoint"); }};
    const std::string& folder = config_.checkpoint.folder;
    if (options_.must_be_new && !list_checkpoints(folder).empty()) {
      throw_bad_input(
          "{}: has checkpoints of an earlier run and --must-be-new was given; remove them, or choose another "
          "checkpoint.folder",
          folder);
    }
    std::vector<CheckpointInfo> passed_over;
    const std::optional<LoadedCheckpoint> checkpoint = load_newest(folder, refused, group, &passed_over);
    if (checkpoint) {
      const std::vector<std::string> differences =
          run_.restore(*checkpoint, {.converts_states = options_.convert_states});
      if (is_first()) set_refused_aside(passed_over, warn);
      hook_.repeat(*checkpoint);
      log_info("resuming from {} (step {})", checkpoint->path(), checkpoint->step());
      for (const std::string& difference : differences) log_info("changed since: {}", difference);
      saver_.continue_from(checkpoint->step());
      keep_source();
    } else {
      start_new_run(group);
    }
    const int64_t step = first_step_ = run_.completed_steps();
    const RunHistory history = is_first() && checkpoint ? read_history(metrics_path(), step) : RunHistory();
    records_.set_history(history);
    // The save comes before the evaluation of its step, which may have been cut off.
    evaluation_is_missing_ = evaluation_.is_missing(step, history.evaluations);
    if (!is_first()) return;
    if (checkpoint) {
      if (step < config_.training.steps || evaluation_is_missing_) continue_folder();
    } else if (const std::string kept = MetricsLog::begin_anew(metrics_path()); !kept.empty()) {
      log_info("{}: is new; the records of an earlier run, which left no checkpoint, are now in {}", metrics_path(),
               kept);
    }
  }

  // What a run began with stays known, also where a later start gives something else or nothing.
  void keep_source() {
    const std::string& kept = run_.config().checkpoint.init_from;
    std::string& given = config_.checkpoint.init_from;
    if (is_first() && !given.empty() && given != kept) {
      log_warning(
          "checkpoint.init_from = {} is ignored: the run goes on from its own checkpoint, and began with {}; to start "
          "from it, choose another checkpoint.folder",
          given, kept.empty() ? "random weights" : kept);
    }
    given = kept;
  }

  void continue_folder() {
    log_removals(config_.checkpoint);
    const int64_t step = run_.completed_steps();
    const auto made_again = evaluation_is_missing_ ? evaluation_.names() : std::set<std::string>();
    const MetricsLog::Truncated result = MetricsLog::truncate_after(metrics_path(), step, made_again);
    if (result.later > 0)
      log_info("{}: {} records after step {} removed; those steps are run again", metrics_path(), result.later,
               step);
    if (result.evaluations > 0)
      log_info("{}: {} records of the evaluation of step {} removed; it is made again", metrics_path(),
               result.evaluations, step);
    if (!result.set_aside.empty()) {
      log_warning("{}: had no record of a run; it is now {}", metrics_path(), result.set_aside);
    } else if (result.unreadable > 0) {
      log_warning("{}: {} torn lines removed", metrics_path(), result.unreadable);
    }
    if (result.missing > 0) {
      log_warning(
          "{}: the records of {} of the steps {} to {} are missing: the file was cut or replaced, or could not "
          "be written",
          metrics_path(), result.missing, result.first_missing, result.last_missing);
    }
  }

  void start_new_run(const LoadGroup& group) {
    hook_.begin_anew();
    const std::string& source = config_.checkpoint.init_from;
    if (source.empty()) {
      run_.initialize();
      warn_of_random_weights(config_);
      log_info("starting a new run in {}", config_.checkpoint.folder);
      return;
    }
    const LoadedCheckpoint checkpoint = open_checkpoint(source, {}, group);
    const std::vector<std::string> differences = run_.initialize_from(checkpoint);
    log_info("starting a new run in {} with the weights of {}", config_.checkpoint.folder, checkpoint.path());
    for (const std::string& difference : differences) log_info("different from its config: {}", difference);
  }

  bool save_is_due(int64_t step) const {
    const CheckpointConfig& checkpoint = config_.checkpoint;
    return (checkpoint.interval > 0 && step % checkpoint.interval == 0) ||
           (checkpoint.save_final && step == config_.training.steps);
  }

  int train_steps() {
    const TrainingConfig& training = config_.training;
    Progress progress(training.steps, run_.tokens_per_step(), speed_, communicator_->size());
    const auto handle = [&](const std::optional<StepReport>& report) {
      if (!report) return;
      progress.add(*report, record(*report));
      if (!report->is_finite() && ends_run(config_, run_.skipped_in_a_row())) end_at_bad_step(*report);
      if (!report->applied && is_first()) log_skipped_step(*report, config_);
      // The weights that were saved before this step are sound.
      if (report->is_finite() && saver_.newest_step() >= 0) saver_.remove_older();
      const bool last = report->step == training.steps;
      if (report->step % training.log_interval == 0 || last) log_line(LogLevel::kInfo, progress.take_line());
    };
    if (agree().stopped) return stop();  // asked while it was loading
    while (run_.completed_steps() < training.steps) {
      launch_.watchdog().at(run_.completed_steps() + 1, "training");
      handle(run_.step());
      const int64_t step = run_.completed_steps();
      const bool last = step == training.steps, save_due = save_is_due(step), eval_due = evaluation_.is_due(step);
      const Agreement agreed = agree();
      if (eval_due || save_due || last || agreed.any()) handle(run_.finish());
      if (agreed.failed) end_after_failure();
      if (agreed.stopped && (!last || eval_due)) return stop();
      const bool is_worth_it = last || run_.applied_steps() > 0;  // else a checkpoint would only bind the config
      if ((save_due && is_worth_it) || agreed.save_failed) save();
      if (eval_due && !evaluate()) return stop();
      if (last && eval_due && run_.skipped_in_a_row() == 0) saver_.remove_older();
    }
    saver_.finish();
    log_memory(run_, *device_);
    if (!deferred_) log_end(config_, run_.completed_steps(), saver_.newest_step());
    if (!deferred_) return 0;
    hook_.finish();
    deferred_.rethrow();
  }

  // What some rank has met with: ranks learn of things at different steps, and act on them in the same.
  struct Agreement {
    bool stopped = false;      // a signal asks to save and stop
    bool save_failed = false;  // in the background
    bool failed = false;       // reading data or writing metrics: the state is sound
    bool any() const { return stopped || save_failed || failed; }
  };

  Agreement agree() {
    if (!deferred_ && run_.completed_steps() < config_.training.steps) deferred_.keep(run_.data_failure());
    // The largest value wins: what is left out is still there in the next step.
    const int own = (deferred_ ? 4 : 0) + (stop_signal() != 0 ? 2 : 0) + (saver_.failed() ? 1 : 0);
    const int most = static_cast<int>(communicator_->max(own));
    return {(most & 2) != 0, (most & 1) != 0, (most & 4) != 0};
  }

  // Whether the weights are of use is known once a step or an evaluation with them was finite; until then older
  // checkpoints stay. What is saved while steps are skipped is what the last update has left, which may be their
  // reason.
  void save() {
    const int64_t step = run_.completed_steps();
    const bool is_sound = !ends_at_bad_step_ && run_.skipped_in_a_row() == 0;
    if (is_sound) saver_.remove_older();  // those beside the checkpoint that the run was resumed from, too
    saver_.keep_older(!is_sound || step < config_.training.steps || evaluation_.is_due(step));
    launch_.watchdog().at(run_.completed_steps(), "saving a checkpoint");
    saver_.save();
  }

  // Returns when the present state is saved.
  void save_now() {
    if (saver_.newest_step() != run_.completed_steps()) save();
    launch_.watchdog().at(run_.completed_steps(), "saving a checkpoint");
    saver_.finish();
  }

  // Where this process has made no update there is nothing to save: the state is that of the checkpoint which was
  // loaded, or of an untrained model, and a checkpoint of that would only bind the config.
  bool has_trained() const { return run_.completed_steps() > first_step_ && run_.applied_steps() > 0; }

  int stop() {
    const bool is_new = has_trained();
    if (is_new) save_now();
    return stopped(is_new ? "saved" : "nothing to save at");
  }

  [[noreturn]] void end_at_bad_step(const StepReport& bad) {
    ends_at_bad_step_ = true;
    const int64_t skipped = run_.skipped_in_a_row();
    const std::optional<int64_t> saved = save_sound_state(bad);
    hook_.finish_on_all_ranks();
    throw_bad_step(bad, config_, skipped, saved);
  }

  // Saves what a step that is not finite has left, and returns the step of that state; nothing where it is in no
  // checkpoint. What led to the step may have begun long before, so older checkpoints stay.
  std::optional<int64_t> save_sound_state(const StepReport& bad) {
    if (config_.optimizer.release_gradients) return std::nullopt;
    if (config_.training.non_finite == NonFinitePolicy::kStop) {
      run_.take_back(bad);
    } else if (const std::optional<StepReport> next = run_.finish()) {
      record(*next);
    }
    const int64_t step = run_.completed_steps();
    if (run_.applied_steps() == 0) return std::nullopt;
    if (step == first_step_) return step;
    return try_to_save() ? std::optional(step) : std::nullopt;
  }

  // Before the run ends because of something else, of which a save that fails must not take the place.
  bool try_to_save() {
    return try_to([this] { save_now(); });
  }

  bool try_to(const std::function<void()>& save) {
    try {
      save();
      return true;
    } catch (const Error& e) {
      if (e.code() != ExitCode::kIo && e.code() != ExitCode::kNonFinite) throw;
      warn(e.what());
      return false;
    }
  }

  // The exit code of a run that has more to do.
  int stopped(const char* what) const {
    const int signal = stop_signal();
    log_info("{}: {} step {} and stopping; the same command continues the run{}",
             signal == 0 ? "another rank was asked to stop" : strsignal(signal), what, run_.completed_steps(),
             warnings_above());
    return static_cast<int>(ExitCode::kStopped);
  }

  // Saves what is sound before the run ends because of something else, which all ranks then throw.
  [[noreturn]] void end_after_failure() {
    const bool is_saved = has_trained() && try_to_save();
    records_.write_again();
    hook_.finish_on_all_ranks();
    deferred_.throw_on_all_ranks(*communicator_, [&](ExitCode code) -> std::string {
      if (!is_saved) return "";
      return fmt::format(
          "; step {} is saved: once this is mended, the same command resumes from there{}", run_.completed_steps(),
          code == ExitCode::kBadInput ? ", or where data.train changes a new run with checkpoint.init_from" : "");
    });
  }

  // Returns the share of the run's time that has gone into steps.
  double record(const StepReport& report) {
    const RunRecords::WallTime wall = records_.count_step(report.seconds, run_.tokens_per_step(), report.finished);
    if (!records_.is_open()) return wall.goodput;
    const double tokens_per_second = static_cast<double>(run_.tokens_per_step()) / report.seconds;
    nlohmann::ordered_json line = {{"kind", "train"},
                                   {"step", report.step},
                                   {"tokens", report.step * run_.tokens_per_step()},
                                   {"epoch", report.data.epoch},
                                   {"loss", report.loss},
                                   {"grad_norm", report.grad_norm},
                                   {"lr", report.learning_rate},
                                   {"applied", report.applied},
                                   {"tokens_per_second", tokens_per_second},
                                   {"wall_tokens_per_second", wall.tokens_per_second},
                                   {"goodput", wall.goodput},
                                   {"model_tflops", 1e-12 * tokens_per_second * speed_.flop_per_token},
                                   {"targets", report.num_targets},
                                   {"seconds", report.seconds},
                                   {"data_wait_seconds", report.data_wait_seconds},
                                   {"save_wait_seconds", saver_.take_wait_seconds()}};
    if (!config_.data.weights.empty()) line["source_epochs"] = run_.source_epochs(report.data);
    if (!report.culprit.empty()) line["culprit"] = report.culprit;
    records_.write(line, report.finished);
    if (!report.telemetry) return wall.goodput;
    for (const auto& telemetry : telemetry_records(*report.telemetry, report.step, run_.model().parameters())) {
      records_.write(telemetry);
    }
    if (const auto change = attention_watch_.add(report.telemetry->attention)) {
      records_.write(warning_record(*change, report.step));
      log_line(change->raised ? LogLevel::kWarning : LogLevel::kInfo, warning_line(*change, report.step));
    }
    return wall.goodput;
  }

  // Returns false where a signal asks to stop: what is missing then is evaluated when the run goes on.
  bool evaluate() {
    const RunEvaluation::End end = evaluate_or_end_saves();
    if (end == RunEvaluation::End::kDeferred) end_after_failure();
    return end == RunEvaluation::End::kDone;
  }

  // A loss that is not finite ends the run, but not before what is being saved, and the command that follows, end.
  RunEvaluation::End evaluate_or_end_saves() {
    try {
      return evaluation_.evaluate();
    } catch (const Error& e) {
      if (e.code() != ExitCode::kNonFinite) throw;
      try_to([this] { saver_.finish(); });
      hook_.finish_on_all_ranks();
      throw;
    }
  }

  Config config_;
  TrainOptions options_;
  Launch& launch_;
  const RunLock& lock_;
  int gpu_;
  std::unique_ptr<Device> device_;
  DecidedGemms gemms_;
  std::unique_ptr<Communicator> communicator_;
  TrainingRun run_;
  ModelSpeed speed_;
  DeferredError deferred_;
  RunRecords records_;
  AttentionWatch attention_watch_;
  int64_t first_step_ = 0;              // completed when this process began to train
  bool evaluation_is_missing_ = false;  // of that step
  bool ends_at_bad_step_ = false;
  RunHook hook_;
  RunEvaluation evaluation_;
  RunSaver saver_;  // last: it uses these
};

// The folder of a run that was moved or copied has a config that names the place before: training there would leave
// the folder alone that was named, and go on with another run, or begin one.
void require_named_run(const TrainOptions& options, const std::string& folder) {
  namespace fs = std::filesystem;
  const fs::path file = config_file(options.config_path);
  const fs::path named = file.has_parent_path() ? file.parent_path() : ".";
  const bool is_run = file.filename() == "config.json" && file_exists((named / "lock").string());
  const bool is_given = is_overridden(options.overrides, "checkpoint.folder");
  std::error_code ignored;
  if (!is_run || is_given || fs::equivalent(named, folder, ignored)) return;
  throw_bad_input(
      "{}: is the config of a run in this folder, but has checkpoint.folder = {}, another place; to go on with the run "
      "here give --set checkpoint.folder={}, and to train there --set checkpoint.folder={}",
      file.string(), folder, named.string(), folder);
}

}  // namespace

int run_train(const TrainOptions& options) {
  const auto started = RunRecords::Clock::now();
  end_on_stop_signals();
  const LaunchOptions starts = launch_options(options.config_path, options.overrides, options.started);
  return run_launched(starts, [&](Launch& launch) {
    if (launch.rank() != 0) log_from(LogLevel::kWarning);
    const Config config = load_config(options.config_path, options.overrides);
    launch.require_same("the config", to_lines(config), "start all ranks with the same config and --set");
    require_named_run(options, config.checkpoint.folder);
    if (config.data.train.empty()) {
      throw_bad_input("{}: data.train: nothing to train on; list token files (scripts/prepare_data.py makes them)",
                      options.config_path);
    }
    if (file_exists(config.checkpoint.folder + "/manifest.json")) {
      throw_bad_input(
          "{}: is a checkpoint, not a run folder; to train from it name it in checkpoint.init_from, and give "
          "another checkpoint.folder",
          config.checkpoint.folder);
    }
    std::optional<RunLock> lock;
    if (launch.rank() == 0) {
      check_run_folder(config.checkpoint.folder, resolved_text(config));
      check_tokenizer(config);
      check_run_folder_writable(config.checkpoint.folder);
      lock.emplace(config.checkpoint.folder, RunLock::Role::kHolder, warn);
      clear_write_tests(config.checkpoint.folder);
    }
    launch.hosts().barrier();  // no rank looks at a folder that is not there
    require_one_folder(launch, config.checkpoint.folder);
    if (launch.rank() != 0) check_run_folder_writable(config.checkpoint.folder);
    if (!lock) lock.emplace(config.checkpoint.folder, RunLock::Role::kWitness, warn);
    catch_stop_signals();
    const int gpu = launch.agree_on_gpu(wants_gpu(config, options.started));
    const std::string idle = idle_gpus(launch.size(), gpu < 0 ? 0 : num_cuda_devices());
    if (!idle.empty()) log_info("{}", idle);
    std::unique_ptr<Device> device = make_untuned_device(config, std::max(0, gpu));
    check_memory(config, GivenConfig::read(options.config_path, options.overrides), *device, launch.size());
    DecidedGemms gemms;
    if (gpu >= 0) gemms = decide_gemms(config, options.config_path, launch, gpu, device);
    return TrainCommand(config, options, launch, *lock, gpu, std::move(device), std::move(gemms), started).train();
  });
}

}  // namespace parka
