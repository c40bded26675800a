#include "kernels/device/power_sampler.h"

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "core/median.h"
#include "core/thread.h"

namespace parka {
namespace {

constexpr std::chrono::milliseconds kInterval(10);

// Longer times are those of a thread that was kept waiting.
double longest_usual(const std::vector<double>& seconds) {
  const double least = std::chrono::duration<double>(kInterval).count();
  return seconds.empty() ? least : std::max(4 * median(seconds), least);
}

}  // namespace

PowerUse mean_power(const std::vector<PowerSample>& samples) {
  PowerUse use;
  double clocks = 0;
  int num_clocks = 0;
  std::vector<double> readings, gaps;
  for (size_t i = 0; i < samples.size(); ++i) {
    readings.push_back(samples[i].reading_seconds);
    if (i > 0) gaps.push_back(samples[i].seconds - samples[i - 1].seconds);
  }
  const double longest_reading = longest_usual(readings), longest_gap = longest_usual(gaps);
  const PowerSample *before = nullptr, *first = nullptr, *last = nullptr;
  for (const PowerSample& sample : samples) {
    if (sample.clock) {
      clocks += *sample.clock;
      ++num_clocks;
    }
    if (!sample.joules || sample.reading_seconds > longest_reading) {
      before = nullptr;
      continue;
    }
    const bool is_next = before != nullptr && sample.seconds - before->seconds <= longest_gap;
    if (is_next && *sample.joules > *before->joules) {
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
  stop_thread(thread_, mutex_, stopped_, stop_);
  return mean_power(samples_);
}

void PowerSampler::sample() {
  const double begin = counter_.seconds();
  const auto seconds = [&] { return counter_.seconds() - begin; };
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    PowerSample taken;
    const double asked = seconds();
    taken.joules = counter_.joules();
    taken.reading_seconds = seconds() - asked;
    taken.seconds = asked + taken.reading_seconds / 2;
    taken.clock = counter_.clock();
    samples_.push_back(taken);
    lock.lock();
    stopped_.wait_for(lock, kInterval, [this] { return stop_; });
  }
}

}  // namespace parka
