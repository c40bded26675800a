#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/training/deferred_error.h"
#include "engine/training/metrics_log.h"

namespace parka {

// What metrics.jsonl says about the earlier starts of a run.
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

// Writes the records of a run, with the time and how long this start has run, and adds up how much of the
// wall-clock time went into steps. For rank 0; on other ranks, without a log, it only adds up.
class RunRecords {
 public:
  using Clock = std::chrono::steady_clock;
  // `deferred` takes the error of writing a record, and must outlive this.
  RunRecords(Clock::time_point program_started, DeferredError& deferred)
      : deferred_(deferred), begun_(program_started) {}
  void set_history(const RunHistory& history) { history_ = history; }  // of the starts before
  void open(const std::string& path, MetricsHooks hooks) { log_.emplace(path, std::move(hooks)); }

  // The speed of a step by the wall clock, besides the device's own times.
  struct WallTime {
    double tokens_per_second = 0;  // since the step before was counted
    double goodput = 0;            // share of the run's time so far, all starts together, that went into steps
  };
  WallTime count_step(double step_seconds, int64_t tokens, Clock::time_point finished);

  // Writes a record with "time" and "wall_seconds" added. An Error(kIo) is deferred: a run that cannot write its
  // records ends, but not before its state is saved. From a deferred error on, whatever it is, nothing is written,
  // but what could not be waits for write_again.
  void write(nlohmann::ordered_json record, Clock::time_point when = Clock::now());
  // Writes what write() could not, once more: a disk that was full may have room again. What fails again is lost.
  void write_again();
  void sync() {
    if (log_) log_->sync();
  }
  // The record that begins a start: `facts` and what goodput needs of the starts before. Throws Error(kIo).
  void write_start(int64_t step, const nlohmann::ordered_json& facts);
  bool is_open() const { return log_.has_value(); }

 private:
  void add_time(nlohmann::ordered_json& record, Clock::time_point when) const;
  double wall_seconds(Clock::time_point when) const { return std::chrono::duration<double>(when - begun_).count(); }

  DeferredError& deferred_;
  RunHistory history_;
  std::optional<MetricsLog> log_;
  std::vector<nlohmann::ordered_json> unwritten_;
  Clock::time_point begun_;
  double step_seconds_ = 0;
  double last_step_ = 0;  // wall_seconds() when a step was counted last
};

}  // namespace parka
