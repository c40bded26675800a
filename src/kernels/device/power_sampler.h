#pragma once
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/device/power_counter.h"

namespace parka {

// The counters at a moment, the middle of the time that reading the energy took.
struct PowerSample {
  double seconds = 0;
  std::optional<double> joules, clock;
  double reading_seconds = 0;  // of the energy counter
};

// Means over some time; nothing where a counter could not be read, or the time was too short for it.
struct PowerUse {
  std::optional<double> watts, clock;
};

// The least time from the first to the last change of the energy counter: samples are up to 10 ms late at either
// end.
inline constexpr double kLeastPowerSeconds = 0.5;

// The energy counter stands still for tens of milliseconds. So watts are means from its first change to its last,
// and not from the first sample to the last one. Where the thread was kept waiting, in a reading or between two,
// for far longer than it mostly takes, the moment of a change is not known, and that change does not count.
PowerUse mean_power(const std::vector<PowerSample>& samples);

// Reads counters every 10 ms, in a thread, from its construction until stop().
class PowerSampler {
 public:
  explicit PowerSampler(PowerCounter& counter);
  ~PowerSampler();
  PowerSampler(const PowerSampler&) = delete;
  PowerSampler& operator=(const PowerSampler&) = delete;

  PowerUse stop();

 private:
  void sample();

  PowerCounter& counter_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::vector<PowerSample> samples_;  // the thread's, until it has ended
  std::thread thread_;
};

}  // namespace parka
