#include "kernels/device/power_sampler.h"

#include <chrono>

#include "core/thread.h"

namespace parka {

PowerUse mean_power(const std::vector<PowerSample>& samples) {
  PowerUse use;
  double clocks = 0;
  int num_clocks = 0;
  const PowerSample *before = nullptr, *first = nullptr, *last = nullptr;
  for (const PowerSample& sample : samples) {
    if (sample.clock) {
      clocks += *sample.clock;
      ++num_clocks;
    }
    if (!sample.joules) continue;
    if (before != nullptr && *sample.joules > *before->joules) {
      if (first == nullptr) first = &sample;
      last = &sample;
    }
    before = &sample;
  }
  if (num_clocks > 0) use.clock = clocks / num_clocks;
  if (first == nullptr) return use;
  const double seconds = last->seconds - first->seconds;
  if (seconds >= kLeastPowerSeconds) use.watts = (*last->joules - *first->joules) / seconds;
  return use;
}

PowerSampler::PowerSampler(PowerCounter& counter)
    : counter_(counter), thread_(start_thread("reads the GPU's counters", [this] { sample(); })) {}

PowerSampler::~PowerSampler() { stop(); }

PowerUse PowerSampler::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
  return mean_power(samples_);
}

void PowerSampler::sample() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kInterval(10);
  const Clock::time_point begin = Clock::now();
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    PowerSample taken;
    taken.joules = counter_.joules();
    taken.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    taken.clock = counter_.clock();
    samples_.push_back(taken);
    lock.lock();
    stopped_.wait_for(lock, kInterval, [this] { return stop_; });
  }
}

}  // namespace parka
