#include "engine/training/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace parka {

std::string format_count(double value) {
  constexpr std::array<const char*, 5> kSuffix = {"", "k", "M", "B", "T"};
  size_t i = 0;
  while (std::abs(value) >= 999.5 && i + 1 < kSuffix.size()) {
    value /= 1000.0;
    ++i;
  }
  return i == 0 ? fmt::format("{:.0f}", value) : fmt::format("{:.3g}{}", value, kSuffix[i]);
}

std::string parameters_text(const ParameterTable& table) {
  const int64_t all = table.num_parameters(), active = table.num_active_parameters();
  const std::string text = format_count(static_cast<double>(all)) + " parameters";
  return active == all
             ? text
             : fmt::format("{}, of which a token uses {}", text, format_count(static_cast<double>(active)));
}

void Progress::add(const StepReport& report, double goodput) {
  last_ = report;
  goodput_ = goodput;
  ++interval_steps_;
  interval_seconds_ += report.seconds;
}

namespace {

constexpr int kNever = 99;  // only in a line for a terminal

// The parts, without as many as do not fit into so many columns; 0: all.
std::string joined(const std::vector<std::pair<int, std::string>>& parts, size_t columns) {
  std::string line;
  for (int most = kNever - 1; most >= 0; --most) {
    line.clear();
    for (const auto& [rank, text] : parts) {
      if (rank <= most) line += (line.empty() ? "" : "  ") + text;
    }
    if (columns == 0 || line.size() < columns) break;
  }
  return line;
}

}  // namespace

std::string Progress::take_line(size_t columns) {
  const double per_step = interval_steps_ > 0 ? interval_seconds_ / static_cast<double>(interval_steps_) : 0.0;
  const double now = clock_();
  const double wall = interval_steps_ > 0 ? (now - last_line_) / static_cast<double>(interval_steps_) : 0.0;
  last_line_ = now;
  wall_per_step_ = wall_per_step_ == 0 ? wall : 0.8 * wall_per_step_ + 0.2 * wall;
  const double tokens_per_second = per_step > 0 ? static_cast<double>(tokens_per_step_) / per_step : 0.0;
  const double left = wall_per_step_ * static_cast<double>(total_steps_ - last_.step);
  interval_steps_ = 0;
  interval_seconds_ = 0;
  const double flops = tokens_per_second * speed_.flop_per_token;
  const std::string total = std::to_string(total_steps_), step = std::to_string(last_.step);
  const double share = static_cast<double>(last_.step) / static_cast<double>(std::max<int64_t>(total_steps_, 1));
  // What a short line lacks first has the largest number.
  std::vector<std::pair<int, std::string>> parts = {
      {0, fmt::format("step {:>{}}/{}", step, total.size(), total)},
      {columns == 0 ? kNever : 2, fmt::format("{:.0f}%", 100 * share)},
      {columns == 0 ? 0 : 8, "tokens " + format_count(static_cast<double>(last_.step * tokens_per_step_))},
      {0, fmt::format("loss {:.4f}", last_.loss)},
      {5, fmt::format("norm {:.3f}", last_.grad_norm)}};
  for (const auto& [name, value] : last_.scalars) {
    if (name != "loss" && name != "grad_norm") parts.emplace_back(9, fmt::format("{} {:.4g}", name, value));
  }
  parts.emplace_back(4, fmt::format("lr {:.2e}", last_.learning_rate));
  parts.emplace_back(1, format_count(tokens_per_second) + " tok/s");
  parts.emplace_back(7, fmt::format("{:.3g} TFLOP/s", 1e-12 * flops));
  if (speed_.peak_flops > 0)
    parts.emplace_back(3, fmt::format("MFU {:.1f}%", 100 * speed_.utilization(flops, num_cards_)));
  parts.emplace_back(6, fmt::format("goodput {:.1f}%", 100 * goodput_));
  parts.emplace_back(0, "ETA " + format_duration(left));
  return joined(parts, columns);
}

}  // namespace parka
