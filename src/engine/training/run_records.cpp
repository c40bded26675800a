#include "engine/training/run_records.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

double number(const json& record, const char* key) {
  const auto found = record.find(key);
  return found != record.end() && found->is_number() ? found->get<double>() : 0.0;
}

// One whose loss was not finite is made again: what it has found must not be forgotten.
bool is_finished_evaluation(const std::string& kind, const json& record) {
  if (kind == "task") return true;
  const auto loss = record.find("loss");
  return (kind == "eval" || kind == "eval_set") && loss != record.end() && loss->is_number();
}

// Takes lines from the last to the first. What is before the newest record of an earlier step tells only of starts,
// and of the file of a long run nothing else is parsed.
class HistoryReader {
 public:
  explicit HistoryReader(int64_t step) : step_(step) {}

  // Returns false once no line before this one matters.
  bool take(std::string_view line) {
    const bool is_settled = has_earlier_step_ && goodput_ > 0;
    if (is_settled && has_start_ && is_counted_) return false;
    if (is_settled && !line.starts_with(R"({"kind":"start")")) return true;
    const auto record = parse_json_if_valid(line);
    if (!record.is_object() || !record.contains("kind") || !record["kind"].is_string()) return true;
    const std::string kind = record["kind"];
    if (!has_start_) latest_ = std::max(latest_, number(record, "wall_seconds"));
    if (kind == "start") take_start(record);
    const auto of_step = static_cast<int64_t>(number(record, "step"));
    if (kind == "train" && of_step <= step_) take_step(record, of_step);
    if (is_finished_evaluation(kind, record) && of_step == step_) history_.evaluations.insert(evaluated(record));
    return true;
  }

  RunHistory finish() {
    count_goodput(0);  // where its start is not there
    history_.wall_seconds = earlier_ + latest_;
    return history_;
  }

 private:
  void take_start(const json& record) {
    const double earlier = number(record, "earlier_seconds");
    count_goodput(earlier);
    if (has_start_) return;
    has_start_ = true;
    earlier_ = earlier;
    const auto tuning = record.find("gemm_tuning");
    if (tuning != record.end() && tuning->is_string()) history_.gemm_tuning = tuning->get<std::string>();
  }

  // By a record's own goodput: those before it may have gone with a rotated file. Older versions have none.
  void take_step(const json& record, int64_t of_step) {
    has_earlier_step_ = has_earlier_step_ || of_step < step_;
    if (goodput_ > 0) return;
    goodput_ = std::max(0.0, number(record, "goodput"));
    wall_of_goodput_ = number(record, "wall_seconds");
    if (goodput_ == 0) history_.step_seconds += number(record, "seconds");
  }

  void count_goodput(double earlier) {
    if (goodput_ == 0 || is_counted_) return;
    is_counted_ = true;
    history_.step_seconds += goodput_ * (earlier + wall_of_goodput_);
  }

  const int64_t step_;
  RunHistory history_;
  bool has_start_ = false, has_earlier_step_ = false, is_counted_ = false;
  double earlier_ = 0, latest_ = 0;  // before the newest start, and in it
  double goodput_ = 0,
         wall_of_goodput_ = 0;  // of the newest record that has it, and the time of its start up to it
};

}  // namespace

RunHistory read_history(const std::string& metrics_path, int64_t step) {
  HistoryReader reader(step);
  if (file_exists(metrics_path)) {
    for_each_line_from_end(InputFile(metrics_path),
                           [&](std::string_view line, int64_t /*begin*/) { return reader.take(line); });
  }
  return reader.finish();
}

std::string time_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  const auto since_epoch = std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
  std::tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 32> date{}, zone{};
  std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%S", &local);
  std::strftime(zone.data(), zone.size(), "%z", &local);  // +0100
  const std::string offset = zone.data();
  return fmt::format("{}.{:03}{}:{}", date.data(), since_epoch % 1000, offset.substr(0, 3), offset.substr(3));
}

RunRecords::WallTime RunRecords::count_step(double step_seconds, int64_t tokens, Clock::time_point finished) {
  const double now = wall_seconds(finished);
  step_seconds_ += step_seconds;
  const double since_last = now - last_step_;
  last_step_ = now;
  const double all = history_.wall_seconds + now;
  return {since_last > 0 ? static_cast<double>(tokens) / since_last : 0.0,
          all > 0 ? (history_.step_seconds + step_seconds_) / all : 0.0};
}

void RunRecords::add_time(ordered_json& record, Clock::time_point when) const {
  const auto ago = std::chrono::duration_cast<std::chrono::system_clock::duration>(Clock::now() - when);
  record["time"] = time_text(std::chrono::system_clock::now() - ago);
  record["wall_seconds"] = wall_seconds(when);
}

void RunRecords::write(ordered_json record, Clock::time_point when) {
  if (!log_ || (deferred_ && unwritten_.empty())) return;
  add_time(record, when);
  try {
    if (unwritten_.empty()) return log_->write(record);
  } catch (const Error&) {
    deferred_.keep(std::current_exception());
  }
  unwritten_.push_back(std::move(record));
}

void RunRecords::write_again() {
  try {
    for (const auto& record : std::exchange(unwritten_, {})) log_->write(record);
  } catch (const Error&) {
    // The run ends with the error that was deferred; this one tells nothing more.
    return;
  }
}

double RunRecords::write_step(const StepReport& report, const TrainingRun& run, const ModelSpeed& speed,
                              double save_wait_seconds) {
  const int64_t tokens = run.tokens_per_step();
  const WallTime wall = count_step(report.seconds, tokens, report.finished);
  if (!log_) return wall.goodput;
  const double tokens_per_second = static_cast<double>(tokens) / report.seconds;
  ordered_json line = {
      {"kind", "train"}, {"step", report.step}, {"tokens", report.step * tokens}, {"epoch", report.data.epoch}};
  for (const StepScalar& scalar : report.scalars) line[scalar.name] = scalar.value;
  line.update({{"lr", report.learning_rate},
               {"applied", report.applied},
               {"tokens_per_second", tokens_per_second},
               {"wall_tokens_per_second", wall.tokens_per_second},
               {"goodput", wall.goodput},
               {"model_tflops", 1e-12 * tokens_per_second * speed.flop_per_token},
               {"targets", report.num_targets},
               {"seconds", report.seconds},
               {"data_wait_seconds", report.data_wait_seconds},
               {"save_wait_seconds", save_wait_seconds}});
  if (!run.config().data.weights.empty()) line["source_epochs"] = run.source_epochs(report.data);
  if (!report.culprit.empty()) line["culprit"] = report.culprit;
  write(line, report.finished);
  const auto of_experts = [&](double ExpertUse::*number) {
    std::vector<double> blocks;
    for (const ExpertUse& block : report.experts) blocks.push_back(block.*number);
    return blocks;
  };
  warn_of(expert_load_, of_experts(&ExpertUse::load), report.step);
  warn_of(idle_experts_, of_experts(&ExpertUse::idle), report.step);
  if (!report.telemetry) return wall.goodput;
  for (const auto& telemetry : telemetry_records(*report.telemetry, report.step, run.model().parameters())) {
    write(telemetry);
  }
  if (!report.experts.empty()) write(routing_record(report.experts, report.step));
  std::vector<double> imbalances;
  for (const AttentionTotals& block : report.telemetry->attention) imbalances.push_back(imbalance(block));
  warn_of(attention_, imbalances, report.step);
  return wall.goodput;
}

void RunRecords::warn_of(BlockWatch& watch, std::span<const double> blocks, int64_t step) {
  const std::optional<Warning> warning = watch.add(blocks, step);
  if (!warning) return;
  write(warning->record);
  log_line(warning->raised ? LogLevel::kWarning : LogLevel::kInfo, warning->line);
}

void RunRecords::sync() {
  try {
    if (log_) log_->sync();
  } catch (const Error& e) {
    log_warning("{}", e.what());
  }
}

std::set<std::string> RunRecords::read_earlier(int64_t step) {
  history_ = read_history(path_, step);
  return history_.evaluations;
}

void RunRecords::continue_after(int64_t step, const std::set<std::string>& made_again) const {
  const MetricsLog::Truncated result = MetricsLog::truncate_after(path_, step, made_again);
  if (result.later > 0)
    log_info("{}: {} records after step {} removed; those steps are run again", path_, result.later, step);
  if (result.evaluations > 0)
    log_info("{}: {} records of the evaluation of step {} removed; it is made again", path_, result.evaluations,
             step);
  if (!result.set_aside.empty()) {
    log_warning("{}: had no record of a run; it is now {}", path_, result.set_aside);
  } else if (result.unreadable > 0) {
    log_warning("{}: {} torn lines removed", path_, result.unreadable);
  }
  if (result.missing > 0) {
    log_warning(
        "{}: the records of {} of the steps {} to {} are missing: the file was cut or replaced, or could not be written",
        path_, result.missing, result.first_missing, result.last_missing);
  }
}

void RunRecords::begin_anew() const {
  const std::string kept = MetricsLog::begin_anew(path_);
  if (kept.empty()) return;
  log_info("{}: is new; the records of an earlier run, which left no checkpoint, are now in {}", path_, kept);
}

void RunRecords::open(const RunLock& lock, int64_t step, const ordered_json& facts) {
  log_.emplace(path_, &lock);
  ordered_json record = {{"kind", "start"}, {"step", step}};
  record.update(facts);
  record["earlier_seconds"] = history_.wall_seconds;
  const Clock::time_point now = Clock::now();
  last_step_ = wall_seconds(now);
  add_time(record, now);
  log_->write_first(record);
}

}  // namespace parka
