#pragma once
#include <atomic>
#include <optional>

#include "kernels/device/power_counter.h"

namespace parka::test {

// Of a card that always takes so many watts. Its clock goes on by half a second with each reading, or by what is
// given, so that what a sampler finds does not hang on when its thread gets a core: three readings are enough. Its
// seconds may be asked for by any thread at any time.
class SteadyCounter final : public PowerCounter {
 public:
  explicit SteadyCounter(double watts, double seconds_of_reading = 0.5)
      : watts_(watts), seconds_of_reading_(seconds_of_reading) {}
  std::optional<double> joules() override {
    seconds_ = seconds_ + seconds_of_reading_;
    return watts_ * seconds_;
  }
  std::optional<double> clock() override { return 1.5e9; }
  std::optional<double> limit() override { return 700; }
  double seconds() override { return seconds_; }

 private:
  double watts_, seconds_of_reading_;
  std::atomic<double> seconds_ = 0;
};

}  // namespace parka::test
