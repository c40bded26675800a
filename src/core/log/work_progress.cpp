#include "core/log/work_progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/log/log.h"

namespace parka {

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

WorkProgress::WorkProgress(std::string what, int64_t total, std::function<double()> clock)
    : what_(std::move(what)), total_(total), clock_(std::move(clock)), begun_(clock_()), next_(begun_ + 5) {}

WorkProgress::~WorkProgress() {
  if (is_shown_) show_line("");
}

bool WorkProgress::add(int64_t count) {
  const std::lock_guard lock(mutex_);
  done_ += count;
  const double now = clock_();
  if (now < next_ || done_ <= 0) return false;
  const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  const std::string line =
      fmt::format("{}: {:.0f} %, {} left", what_, 100 * share, format_duration((now - begun_) * (1 / share - 1)));
  is_shown_ = log_columns() > 0;
  is_shown_ ? show_line(line) : log_line(LogLevel::kInfo, line);
  next_ = now + (is_shown_ ? 0.5 : 10);
  return true;
}

}  // namespace parka
