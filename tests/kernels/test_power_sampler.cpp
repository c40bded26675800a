#include "kernels/device/power_sampler.h"

#include <chrono>
#include <cmath>
#include <thread>

#include "kernels/device/device.h"
#include "tests/support/catch.h"
#include "tests/support/steady_counter.h"

using namespace parka;
using namespace parka::test;

namespace {

// A counter that is renewed every `period` seconds, of a card that takes `watts`, read every 10 ms for `seconds`
// from `begin` on, a moment of the counter's own time.
std::vector<PowerSample> read_counter(double watts, double period, double begin, double seconds) {
  std::vector<PowerSample> samples;
  const int count = static_cast<int>(std::lround(seconds / 0.01)) + 1;
  for (int i = 0; i < count; ++i) {
    const double at = 0.01 * i, renewed = period * std::floor((begin + at) / period + 1e-9);
    samples.push_back({at, watts * renewed, 1e9 + 1e6 * i});
  }
  return samples;
}

}  // namespace

TEST_CASE("mean power is that between the first and the last change of the counter", "[power]") {
  // In 1.05 s from 0.03 s on, a counter that is renewed every 0.1 s changes 10 times: of 1.05 s it has seen 1.0.
  // Changes are found at multiples of 10 ms, exactly.
  const std::vector<PowerSample> samples = read_counter(500, 0.1, 0.03, 1.05);
  const PowerUse use = mean_power(samples);
  REQUIRE(use.watts);
  CHECK(std::abs(*use.watts - 500) < 1e-6);
  REQUIRE(use.clock);
  CHECK(std::abs(*use.clock - 1.0525e9) < 1);  // of 106 samples, 1 GHz and 1 MHz more each time
}

TEST_CASE("a sample whose reading was kept waiting is left out", "[power]") {
  std::vector<PowerSample> samples = read_counter(500, 0.01, 0, 1);
  for (PowerSample& sample : samples) sample.reading_seconds = 2e-3;
  samples.back().joules = 600;  // of 0.2 s later than the moment that the sample gives
  CHECK(std::abs(*mean_power(samples).watts - 500) > 50);
  samples.back().reading_seconds = 0.4;
  REQUIRE(mean_power(samples).watts);
  CHECK(std::abs(*mean_power(samples).watts - 500) < 1e-6);
  // Where all readings take long, all count.
  std::vector<PowerSample> slow = read_counter(500, 0.1, 0.03, 1.05);
  for (PowerSample& sample : slow) sample.reading_seconds = 0.05;
  REQUIRE(mean_power(slow).watts);
  CHECK(std::abs(*mean_power(slow).watts - 500) < 1e-6);
}

TEST_CASE("a change behind a gap between samples does not count", "[power]") {
  // Changes at multiples of 0.1 s; nothing is read from 0.88 s to 1.09 s, where the last change of all is found,
  // late.
  std::vector<PowerSample> samples;
  for (const PowerSample& sample : read_counter(500, 0.1, 0, 1.09)) {
    if (sample.seconds < 0.885 || sample.seconds > 1.085) samples.push_back(sample);
  }
  REQUIRE(samples.size() == 90);
  REQUIRE(mean_power(samples).watts);
  CHECK(std::abs(*mean_power(samples).watts - 500) < 1e-6);
}

TEST_CASE("power is not measured in too short a time, or without a counter", "[power]") {
  // Of a counter renewed every 0.1 s: changes at 0.1 to 0.5 s are 0.4 s apart, those to 0.6 s 0.5 s.
  CHECK_FALSE(mean_power(read_counter(500, 0.1, 0, 0.55)).watts);
  CHECK(mean_power(read_counter(500, 0.1, 0, 0.65)).watts);
  CHECK_FALSE(mean_power({}).watts);
  CHECK_FALSE(mean_power({}).clock);
  std::vector<PowerSample> silent = read_counter(500, 0.1, 0, 2);
  for (PowerSample& sample : silent) sample.joules.reset();
  CHECK_FALSE(mean_power(silent).watts);
  CHECK(mean_power(silent).clock);
  const PowerSource source = find_power_counter(*make_cpu_device());
  CHECK(source.counter == nullptr);
  CHECK(source.missing == "only that of a GPU is read");
}

TEST_CASE("a sampler measures what a card takes meanwhile", "[power]") {
  SteadyCounter counter(300);
  PowerSampler sampler(counter);
  while (counter.seconds() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const PowerUse use = sampler.stop();
  REQUIRE(use.watts);
  CHECK(std::abs(*use.watts - 300) < 1e-6);
  CHECK(use.clock == 1.5e9);
}
