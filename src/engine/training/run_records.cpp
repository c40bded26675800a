#include "engine/training/run_records.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace parka {
namespace {

double number(const nlohmann::json& record, const char* key) {
  const auto found = record.find(key);
  return found != record.end() && found->is_number() ? found->get<double>() : 0.0;
}

// One whose loss was not finite is made again: what it has found must not be forgotten.
bool is_finished_evaluation(const std::string& kind, const nlohmann::json& record) {
  if (kind == "task") return true;
  const auto loss = record.find("loss");
  return (kind == "eval" || kind == "eval_set") && loss != record.end() && loss->is_number();
}

}  // namespace

RunHistory read_history(const std::string& metrics_path, int64_t step) {
  RunHistory history;
  std::ifstream file(metrics_path);
  double earlier = 0, latest = 0;  // before the newest start, and in it
  for (std::string line; std::getline(file, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object() || !record.contains("kind") || !record["kind"].is_string()) continue;
    const std::string kind = record["kind"];
    if (kind == "start") {
      earlier = number(record, "earlier_seconds");
      latest = 0;
      const auto tuning = record.find("gemm_tuning");
      history.gemm_tuning = tuning != record.end() && tuning->is_string() ? tuning->get<std::string>() : "";
    }
    latest = std::max(latest, number(record, "wall_seconds"));
    const auto of_step = static_cast<int64_t>(number(record, "step"));
    if (kind == "train" && of_step <= step) {
      // By the record's own goodput: those before it may have gone with a file that was rotated.
      const double of_steps = number(record, "goodput") * (earlier + number(record, "wall_seconds"));
      history.step_seconds = of_steps > 0 ? of_steps : history.step_seconds + number(record, "seconds");
    }
    if (is_finished_evaluation(kind, record) && of_step == step) history.evaluations.insert(evaluated(record));
  }
  history.wall_seconds = earlier + latest;
  return history;
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

void RunRecords::add_time(nlohmann::ordered_json& record, Clock::time_point when) const {
  const auto ago = std::chrono::duration_cast<std::chrono::system_clock::duration>(Clock::now() - when);
  record["time"] = time_text(std::chrono::system_clock::now() - ago);
  record["wall_seconds"] = wall_seconds(when);
}

void RunRecords::write(nlohmann::ordered_json record, Clock::time_point when) {
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

void RunRecords::write_start(int64_t step, const nlohmann::ordered_json& facts) {
  nlohmann::ordered_json record = {{"kind", "start"}, {"step", step}};
  record.update(facts);
  record["earlier_seconds"] = history_.wall_seconds;
  const Clock::time_point now = Clock::now();
  last_step_ = wall_seconds(now);
  if (!log_) return;
  add_time(record, now);
  log_->write_first(record);
}

}  // namespace parka
