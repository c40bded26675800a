#include "engine/training/progress.h"

#include <fmt/format.h>

#include <array>
#include <chrono>
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

std::string format_duration(double seconds) {
  const auto total = static_cast<int64_t>(std::llround(std::fmin(std::fmax(seconds, 0.0), 1e15)));
  const int64_t h = total / 3600, m = total / 60 % 60, s = total % 60;
  if (h >= 48) return fmt::format("{}d{:02}h", h / 24, h % 24);
  if (h > 0) return fmt::format("{}h{:02}m", h, m);
  if (m > 0) return fmt::format("{}m{:02}s", m, s);
  return fmt::format("{}s", s);
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Progress::add(const StepReport& report, double goodput) {
  last_ = report;
  goodput_ = goodput;
  ++interval_steps_;
  interval_seconds_ += report.seconds;
}

std::string Progress::take_line() {
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
  const std::string mfu =
      speed_.peak_flops > 0 ? fmt::format("  MFU {:.1f}%", 100 * speed_.utilization(flops, num_cards_)) : "";
  std::string others;
  for (const auto& [name, value] : last_.scalars) {
    if (name != "loss" && name != "grad_norm") others += fmt::format("  {} {:.4g}", name, value);
  }
  const std::string total = std::to_string(total_steps_);
  return fmt::format(
      "step {:>{}}/{}  tokens {}  loss {:.4f}  norm {:.3f}{}  lr {:.2e}  {} tok/s  {:.3g} TFLOP/s{}  goodput {:.1f}% "
      " ETA {}",
      last_.step, total.size(), total, format_count(static_cast<double>(last_.step * tokens_per_step_)), last_.loss,
      last_.grad_norm, others, last_.learning_rate, format_count(tokens_per_second), 1e-12 * flops, mfu,
      100 * goodput_, format_duration(left));
}

}  // namespace parka
