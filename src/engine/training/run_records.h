#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/step/telemetry.h"
#include "engine/training/deferred_error.h"
#include "engine/training/metrics_log.h"
#include "engine/training/run_lock.h"
#include "engine/training/speed.h"
#include "engine/training/training_run.h"

namespace parka {

// The earlier starts of a run, as metrics.jsonl tells.
struct RunHistory {
  double wall_seconds = 0;            // that processes of the run have run
  double step_seconds = 0;            // of the steps up to the one from which this start resumes
  std::set<std::string> evaluations;  // what was evaluated after that step, by evaluated()
  std::string gemm_tuning;  // the file of algorithms that the newest start used; empty: none, or that is not known
};
// Reads the history, before later records are removed. A missing file and records of older versions count as zero.
RunHistory read_history(const std::string& metrics_path, int64_t step);

// Local time with its zone: "2026-11-23T14:03:07.120+01:00".
std::string time_text(std::chrono::system_clock::time_point time);

// The records of a run in metrics.jsonl, with the time and how long this start has run, and how much of the
// wall-clock time went into steps. For rank 0; on other ranks, where it is not opened, it only adds up.
class RunRecords {
 public:
  using Clock = std::chrono::steady_clock;
  RunRecords(const Config& config, Clock::time_point program_started)
      : path_(config.checkpoint.folder + "/metrics.jsonl"),
        begun_(program_started),
        attention_(BlockWatch::of_attention(config)),
        expert_load_(BlockWatch::of_expert_load(config)),
        idle_experts_(BlockWatch::of_idle_experts(config)) {}

  // Before it is opened: of a run that resumes after `step`, the evaluations of that step that are on record...
  std::set<std::string> read_earlier(int64_t step);
  // ... whose later records are removed, and with them those of evaluations of `step` that are `made_again`...
  void continue_after(int64_t step, const std::set<std::string>& made_again) const;
  // ... or of a new run, those of one before that left no checkpoint.
  void begin_anew() const;

  // Opens the file and writes the record that begins a start: `facts` and what goodput needs of the starts before.
  // `lock`, of the run's folder, must outlive this. Throws Error(kIo).
  void open(const RunLock& lock, int64_t step, const ordered_json& facts);
  // Writes a record with "time" and "wall_seconds" added. An Error(kIo) is deferred: the run ends once its state is
  // saved. From a deferred error on nothing is written, but what could not be waits for write_again.
  void write(ordered_json record, Clock::time_point when = Clock::now());
  // The records of a step, of its telemetry, too, and of what it warns of. Returns the goodput: the share of the
  // run's time so far, all starts together, that went into steps.
  double write_step(const StepReport& report, const TrainingRun& run, const ModelSpeed& speed,
                    double save_wait_seconds);
  // Writes what write() could not, once more: a disk that was full may have room again. What fails again is lost.
  void write_again();
  // After a power failure no checkpoint may lack the records of its steps; but it is worth more: this only warns.
  void sync();

  // The error that ends the run though its state is sound: of write(), or kept here by others.
  DeferredError& deferred() { return deferred_; }

 private:
  // The speed of a step by the wall clock, besides the device's own times.
  struct WallTime {
    double tokens_per_second = 0;  // since the step before was counted
    double goodput = 0;
  };
  WallTime count_step(double step_seconds, int64_t tokens, Clock::time_point finished);
  void warn_of(BlockWatch& watch, std::span<const double> blocks, int64_t step);
  void add_time(ordered_json& record, Clock::time_point when) const;
  double wall_seconds(Clock::time_point when) const { return std::chrono::duration<double>(when - begun_).count(); }

  const std::string path_;
  DeferredError deferred_;
  RunHistory history_;  // of the starts before
  std::optional<MetricsLog> log_;
  std::vector<ordered_json> unwritten_;
  Clock::time_point begun_;
  double step_seconds_ = 0;
  double last_step_ = 0;  // wall_seconds() when a step was counted last
  BlockWatch attention_, expert_load_, idle_experts_;
};

}  // namespace parka
