#pragma once
#include <atomic>
#include <optional>

#include "kernels/device/power_counter.h"

namespace parka::test {

// Of a card that always takes so many watts. Its clock goes on by a quarter of a second with each reading, so that
// what a sampler finds does not hang on when its thread gets a core: three readings are enough. Its seconds may be
// asked for by any thread at any time.
class SteadyCounter final : public PowerCounter {
 public:
  explicit SteadyCounter(double watts) : watts_(watts) {}
  std::optional<double> joules() override {
    seconds_ = seconds_ + 0.25;
    return watts_ * seconds_;
  }
  std::optional<double> clock() override { return 1.5e9; }
  std::optional<double> limit() override { return 700; }
  double seconds() override { return seconds_; }

 private:
  double watts_;
  std::atomic<double> seconds_ = 0;
};

}  // namespace parka::test
