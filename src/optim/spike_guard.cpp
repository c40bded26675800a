#include "optim/spike_guard.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace parka {

double SpikeGuard::limit(double Step::*value) const {
  const auto count = static_cast<double>(steps_.size());
  double sum = 0, squares = 0;
  for (const Step& step : steps_) sum += step.*value;
  const double mean = sum / count;
  for (const Step& step : steps_) squares += (step.*value - mean) * (step.*value - mean);
  constexpr double kSigma = 6;  // as OLMo 2
  return mean + kSigma * std::sqrt(squares / (count - 1));
}

SpikeGuard::Step SpikeGuard::limits() const {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  const auto count = static_cast<int64_t>(steps_.size());
  if (window_ == 0 || count < std::max<int64_t>(2, window_ / 2)) return {kNone, kNone};
  return {limit(&Step::loss), limit(&Step::grad_norm)};
}

void SpikeGuard::add(const Step& step) {
  if (window_ == 0 || !std::isfinite(step.loss) || !std::isfinite(step.grad_norm)) return;
  steps_.push_back(step);
  if (static_cast<int64_t>(steps_.size()) > window_) steps_.pop_front();
}

void SpikeGuard::restore(const std::vector<Step>& steps) {
  steps_.clear();
  for (const Step& step : steps) add(step);
}

}  // namespace parka
