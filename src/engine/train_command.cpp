#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>

#include <sys/resource.h>
#include <unistd.h>

#include <spdlog/spdlog.h>

#include "comm/launch.h"
#include "core/parallel.h"
#include "data/read_only_file.h"
#include "engine/checkpoint_saver.h"
#include "engine/commands.h"
#include "engine/config_io.h"
#include "engine/device_setup.h"
#include "engine/evaluation.h"
#include "engine/evaluation_suite.h"
#include "engine/file_io.h"
#include "engine/gpu_plan.h"
#include "engine/inference_run.h"
#include "engine/metrics_log.h"
#include "engine/progress.h"
#include "engine/run_data.h"
#include "engine/run_folder.h"
#include "engine/run_lock.h"
#include "engine/speed.h"
#include "engine/stop_signal.h"
#include "engine/training_run.h"

namespace parka {
namespace {

void warn(const std::string& message) { spdlog::warn("{}", message); }

// Of config.json in the run folder.
std::string resolved_text(const Config& config) { return to_json(config).dump(2) + "\n"; }

double gib(int64_t bytes) { return static_cast<double>(bytes) / 0x1p30; }

double peak_resident_gib() {
  struct rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 0x1p20;  // Linux gives KiB
}

// Trains one run folder from where it stands to training.steps: one rank of it. Rank 0 alone writes the run's log,
// metrics and config; checkpoints are written and read by all ranks.
class TrainCommand {
 public:
  TrainCommand(const Config& config, const TrainOptions& options, Launch& launch, const RunLock& lock,
               std::unique_ptr<Device> device)
      : config_(config),
        options_(options),
        launch_(launch),
        lock_(lock),
        device_(std::move(device)),
        communicator_(launch.make_communicator(*device_)),
        run_(config, *device_, *communicator_),
        speed_(speed_of(config, run_.model().parameters(), device_->name())),
        saver_(config.checkpoint.folder, save_options()) {}

  int train() {
    launch_.require_same("the tokens of data.train", fmt::format("{:016x}", run_.data().fingerprint()),
                         "give all ranks the same files");
    suite_ = open_suite(config_);
    launch_.require_same("what is evaluated on", describe_suite(suite_), "give all ranks the same files");
    run_.on_evaluation_batch([this] { launch_.watchdog().at(run_.completed_steps(), "evaluation"); });
    describe();
    resume_or_initialize();
    if (is_first()) {
      write_run_config(config_.checkpoint.folder, resolved_text(config_), options_.config_path);
      metrics_.emplace(metrics_path(), MetricsHooks{[this] { lock_.require_ours(); }, warn});
    }
    if (run_.completed_steps() >= config_.training.steps) {
      if (is_first()) clear_unfinished_saves(config_.checkpoint.folder, warn);
      spdlog::info("nothing to do: the run is at step {} of {}", run_.completed_steps(), config_.training.steps);
      return 0;
    }
    const bool evaluates = config_.training.eval_interval > 0 && !suite_.empty();
    if (evaluates && run_.completed_steps() == 0) evaluate();
    const int exit_code = train_steps(evaluates);
    saver_.wait();
    report_memory();
    return exit_code;
  }

 private:
  bool is_first() const { return communicator_->rank() == 0; }

  void report_memory() const {
    const double planned = gib(run_.plan().total_bytes());
    if (device_->kind() == DeviceKind::kCpu) {
      spdlog::info("peak memory {:.2f} GiB resident, {:.2f} GiB of it planned", peak_resident_gib(), planned);
      return;
    }
    // Nothing is allocated after the start, so what is in use now is the peak.
    const Device::MemoryUse use = device_->memory_use();
    spdlog::info(
        "GPU memory {:.2f} GiB planned; {:.2f} GiB in use on the device, its context and libraries included",
        planned, gib(use.total_bytes - use.free_bytes));
  }

  std::string metrics_path() const { return config_.checkpoint.folder + "/metrics.jsonl"; }

  SaveOptions save_options() {
    SaveOptions options;
    options.group = {.rank = communicator_->rank(),
                     .size = communicator_->size(),
                     .id = communicator_->gather_text(make_save_id()).front()};
    options.keep = config_.checkpoint.keep;
    options.report = warn;
    options.check_folder = [this] { lock_.require_ours(); };
    options.before_publish = [this] { sync_metrics(); };
    if (options_.drill_step > 0 && is_first()) {
      // The fault drill of docs/testing.md: die as if the power went, at a chosen point of a chosen save.
      options.observer = [step_name = fmt::format("step_{:08}", options_.drill_step), left = options_.drill_point,
                          armed = false](std::string_view point) mutable {
        armed = armed || point.find(step_name) != std::string_view::npos;
        if (armed && --left <= 0) kill(getpid(), SIGKILL);
      };
    }
    return options;
  }

  // After a power failure a checkpoint must not be there without the records of its steps; but it is worth more.
  void sync_metrics() {
    try {
      if (metrics_) metrics_->sync();
    } catch (const Error& e) {
      warn(e.what());
    }
  }

  void describe() const {
    const ParameterTable& table = run_.model().parameters();
    spdlog::info("{}; recipe {}", device_->description(), name_of(config_.precision.recipe));
    if (communicator_->size() > 1) {
      spdlog::info("{}, ZeRO stage {}", communicator_->description(), config_.distributed.zero_stage);
    }
    spdlog::info("model: {} parameters, {} FLOP/token = {}",
                 format_count(static_cast<double>(table.num_parameters())), format_count(speed_.flop_per_token),
                 kFlopFormula);
    if (speed_.peak_flops > 0) {
      spdlog::info("MFU is against the dense peak of {:.0f} TFLOP/s", 1e-12 * speed_.peak_flops);
    }
    std::string parts;
    for (const auto& total : run_.plan().summary()) {
      parts += fmt::format("{}{} {:.1f}", parts.empty() ? "" : ", ", total.category,
                           static_cast<double>(total.bytes) / 0x1p20);
    }
    spdlog::info("memory plan: {:.1f} MiB: {}", static_cast<double>(run_.plan().total_bytes()) / 0x1p20, parts);
    describe_data();
  }

  void describe_data() const {
    const TokenFiles& data = run_.data();
    const DataConfig& config = config_.data;
    const int64_t batch = config_.training.global_batch_size;
    const std::string tokens =
        fmt::format("data: {} tokens in {} sequences of {}", format_count(static_cast<double>(data.num_tokens())),
                    data.num_sequences(), config.sequence_length);
    if (config.weights.empty()) {
      spdlog::info("{}; {} steps per epoch", tokens, data.num_sequences() / batch);
      return;
    }
    spdlog::info("{}, from {} sources by weight", tokens, config.weights.size());
    const double sum = std::accumulate(config.weights.begin(), config.weights.end(), 0.0);
    for (size_t i = 0; i < config.weights.size(); ++i) {
      const double share = config.weights[i] / sum, sequences = static_cast<double>(data.source_sequences()[i]);
      spdlog::info("  {:.3f} %: {}, {} sequences; {:.0f} steps per epoch", 100 * share, config.train[i],
                   data.source_sequences()[i], sequences / (share * static_cast<double>(batch)));
    }
  }

  void resume_or_initialize() {
    launch_.watchdog().at(0, "loading a checkpoint");
    const auto refused = [this](const std::string& message) {
      if (is_first()) spdlog::warn("{}", message);
    };
    const LoadGroup group = {
        .rank = communicator_->rank(), .size = communicator_->size(), .gather = [this](const std::string& text) {
          return communicator_->gather_text(text);
        }};
    const std::string& folder = config_.checkpoint.folder;
    if (options_.fresh && !list_checkpoints(folder).empty()) {
      throw_bad_input(
          "{}: has checkpoints of an earlier run and --fresh was given; remove them, or choose another "
          "checkpoint.folder",
          folder);
    }
    std::vector<CheckpointInfo> passed_over;
    const std::optional<LoadedCheckpoint> checkpoint = load_newest(folder, refused, group, &passed_over);
    if (checkpoint) {
      const std::vector<std::string> differences = run_.restore(*checkpoint);
      if (is_first()) set_refused_aside(passed_over, warn);
      spdlog::info("resuming from {} (step {})", checkpoint->path(), checkpoint->step());
      for (const std::string& difference : differences) spdlog::info("changed since: {}", difference);
    } else {
      start_new_run(group);
    }
    if (!is_first()) return;
    if (checkpoint) {
      continue_metrics();
    } else if (const std::string kept = MetricsLog::begin_anew(metrics_path()); !kept.empty()) {
      spdlog::info("{}: begins anew; the records of the run before, of which there is no checkpoint, are in {}",
                   metrics_path(), kept);
    }
  }

  void continue_metrics() {
    const int64_t step = run_.completed_steps();
    const MetricsLog::Truncated result = MetricsLog::truncate_after(metrics_path(), step);
    if (result.later > 0)
      spdlog::info("{}: {} records after step {} removed; those steps are run again", metrics_path(), result.later,
                   step);
    if (result.unreadable > 0) spdlog::warn("{}: {} torn lines removed", metrics_path(), result.unreadable);
    if (result.last_train_step < step) {
      spdlog::warn("{}: the records of steps {} to {} are missing: the file was cut or replaced", metrics_path(),
                   result.last_train_step + 1, step);
    }
  }

  void start_new_run(const LoadGroup& group) {
    const std::string& source = config_.checkpoint.init_from;
    if (source.empty()) {
      run_.initialize();
      spdlog::info("starting a new run in {}", config_.checkpoint.folder);
      return;
    }
    const LoadedCheckpoint checkpoint = open_checkpoint(source, group);
    const std::vector<std::string> differences = run_.initialize_from(checkpoint);
    spdlog::info("starting a new run in {} with the weights of {}", config_.checkpoint.folder, checkpoint.path());
    for (const std::string& difference : differences) spdlog::info("other than there: {}", difference);
  }

  int train_steps(bool evaluates) {
    const TrainingConfig& training = config_.training;
    Progress progress(training.steps, run_.tokens_per_step(), speed_);
    int64_t skipped_in_a_row = 0;
    const auto handle = [&](const std::optional<StepReport>& report) {
      if (!report) return;
      record(*report);
      progress.add(*report);
      skipped_in_a_row = report->applied ? 0 : skipped_in_a_row + 1;
      if (!report->applied) handle_bad_step(*report, skipped_in_a_row);
      const bool last = report->step == training.steps;
      if (report->step % training.log_interval == 0 || last) spdlog::info("{}", progress.take_line());
    };
    while (run_.completed_steps() < training.steps) {
      launch_.watchdog().at(run_.completed_steps() + 1, "training");
      handle(run_.step());
      const int64_t step = run_.completed_steps();
      const bool last = step == training.steps;
      const bool eval_due = evaluates && (step % training.eval_interval == 0 || last);
      const bool save_due = (config_.checkpoint.interval > 0 && step % config_.checkpoint.interval == 0) ||
                            (last && config_.checkpoint.save_final);
      // Ranks are told at different steps: they stop where the first of them has been.
      const int signal = static_cast<int>(communicator_->max(stop_signal()));
      if (eval_due || save_due || last || signal != 0) handle(run_.finish());
      if (eval_due) evaluate();
      if (save_due || signal != 0) save();
      if (signal != 0) {
        saver_.wait();
        spdlog::info("{}: saved step {} and stopping; the same command continues the run", strsignal(signal), step);
        return 0;
      }
    }
    return 0;
  }

  void record(const StepReport& report) {
    if (!metrics_) return;
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
                                   {"model_tflops", 1e-12 * tokens_per_second * speed_.flop_per_token},
                                   {"targets", report.num_targets},
                                   {"seconds", report.seconds},
                                   {"data_wait_seconds", report.data_wait_seconds}};
    if (!config_.data.weights.empty()) line["source_epochs"] = run_.source_epochs(report.data);
    if (!report.culprit.empty()) line["culprit"] = report.culprit;
    metrics_->write(line);
    if (!report.telemetry) return;
    for (const auto& telemetry : telemetry_records(*report.telemetry, report.step, run_.model().parameters())) {
      metrics_->write(telemetry);
    }
  }

  void handle_bad_step(const StepReport& report, int64_t skipped_in_a_row) const {
    const std::string what = fmt::format(
        "step {}: loss {} and gradient norm {} are not both finite{}; batch: epoch {}, sequences {} to {} of its "
        "order",
        report.step, report.loss, report.grad_norm,
        report.culprit.empty() ? "" : fmt::format(" (first bad gradient: {})", report.culprit), report.data.epoch,
        report.data.consumed, report.data.consumed + config_.training.global_batch_size - 1);
    if (config_.training.non_finite == NonFinitePolicy::kStop) {
      throw Error(ExitCode::kNonFinite,
                  what + "; the weights were not changed; set training.non_finite=skip to pass over such steps");
    }
    if (skipped_in_a_row >= config_.training.max_skipped_steps) {
      throw Error(
          ExitCode::kNonFinite,
          what + fmt::format("; {} steps in a row were skipped (training.max_skipped_steps)", skipped_in_a_row));
    }
    spdlog::warn("{}; skipped", what);
  }

  void evaluate() {
    launch_.watchdog().at(run_.completed_steps(), "evaluation");
    if (suite_.held_out) report_loss(run_.evaluate(*suite_.held_out), "held-out", {{"kind", "eval"}});
    for (const EvaluationSuite::Set& set : suite_.sets) {
      report_loss(run_.evaluate(set.files), set.name, {{"kind", "eval_set"}, {"set", set.name}});
    }
    for (const EvalTask& task : suite_.tasks) report_task(task, run_.evaluate(task));
  }

  // `record` says in metrics.jsonl what was evaluated.
  void report_loss(const EvaluationResult& result, const std::string& name, nlohmann::ordered_json record) {
    spdlog::info("step {}: {} loss {:.4f} (perplexity {:.3f}) over {} tokens", run_.completed_steps(), name,
                 result.loss, std::exp(result.loss), format_count(static_cast<double>(result.num_targets)));
    if (!metrics_) return;
    record.update({{"step", run_.completed_steps()}, {"loss", result.loss}, {"num_targets", result.num_targets}});
    metrics_->write(record);
  }

  void report_task(const EvalTask& task, const TaskResult& result) {
    spdlog::info("step {}: {} {} {:.4f} over {} documents", run_.completed_steps(), task.name, name_of(task.metric),
                 result.score, result.documents.size());
    if (!metrics_) return;
    metrics_->write({{"kind", "task"},
                     {"step", run_.completed_steps()},
                     {"task", task.name},
                     {"metric", name_of(task.metric)},
                     {"score", result.score},
                     {"acc", result.acc},
                     {"len_norm", result.len_norm},
                     {"bits_per_byte", result.bits_per_byte},
                     {"documents", result.documents.size()}});
  }

  void save() {
    launch_.watchdog().at(run_.completed_steps(), "saving a checkpoint");
    saver_.save(run_.snapshot());
    if (!config_.checkpoint.async) saver_.wait();
  }

  Config config_;
  TrainOptions options_;
  Launch& launch_;
  const RunLock& lock_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Communicator> communicator_;
  TrainingRun run_;
  ModelSpeed speed_;
  EvaluationSuite suite_;
  std::optional<MetricsLog> metrics_;
  CheckpointSaver saver_;
};

}  // namespace

int run_train(const TrainOptions& options) {
  return run_launched({.version = PARKA_VERSION, .watchdog = {}}, [&](Launch& launch) {
    if (launch.rank() != 0) spdlog::set_level(spdlog::level::warn);
    const Config config = load_config(options.config_path, options.overrides);
    launch.require_same("the config", to_lines(config), "start all ranks with one config and --set");
    if (config.data.train.empty()) {
      throw_bad_input("{}: data.train: nothing to train on; list token files (scripts/prepare_data.py makes them)",
                      options.config_path);
    }
    if (file_exists(config.checkpoint.folder + "/manifest.json")) {
      throw_bad_input(
          "{}: is a checkpoint, not a run folder; to train from it name it in checkpoint.init_from, and give "
          "another "
          "checkpoint.folder",
          config.checkpoint.folder);
    }
    std::optional<RunLock> lock;
    if (launch.rank() == 0) {
      check_run_folder(config.checkpoint.folder, resolved_text(config));
      check_run_folder_writable(config.checkpoint.folder);
      lock.emplace(config.checkpoint.folder, RunLock::Role::kHolder, warn);
      clear_write_tests(config.checkpoint.folder);
    }
    launch.hosts().barrier();  // no rank looks at a folder that is not there
    require_one_folder(launch, config.checkpoint.folder);
    if (!lock) lock.emplace(config.checkpoint.folder, RunLock::Role::kWitness, warn);
    catch_stop_signals();
    std::unique_ptr<Device> device = make_device(config, std::max(0, launch.agree_on_gpu(wants_gpu(config))));
    check_memory(config, *device, launch.size());
    return TrainCommand(config, options, launch, *lock, std::move(device)).train();
  });
}

}  // namespace parka
