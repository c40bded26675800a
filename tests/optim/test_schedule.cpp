#include <cmath>
#include <vector>

#include "optim/optimizer.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

struct Point {
  int64_t step;
  double want;  // learning rate
};

OptimizerConfig config_of(double lr, const ScheduleConfig& schedule) {
  OptimizerConfig config;
  config.lr = lr;
  config.schedule = schedule;
  return config;
}

// How many points are off by more than 1e-12 of the peak.
int num_wrong(const OptimizerConfig& config, int64_t training_steps, const std::vector<Point>& points) {
  int wrong = 0;
  for (const Point& p : points) {
    const double got = learning_rate(config, training_steps, p.step);
    if (!(std::abs(got - p.want) <= 1e-12 * config.lr)) {
      ++wrong;
      UNSCOPED_INFO("step " << p.step << ": " << got << ", wanted " << p.want);
    }
  }
  return wrong;
}

}  // namespace

TEST_CASE("cosine schedule of OLMo-1B", "[optim][schedule]") {
  const auto config = config_of(4e-4, {.kind = ScheduleKind::kCosine, .warmup_steps = 2000, .total_steps = 739328});
  // Warm-up 4e-4 * (0.1 + 0.9 s / 2000); then 4e-5 + 1.8e-4 * (1 + cos(pi (s - 2000) / 737328)).
  CHECK(num_wrong(config, 1000,
                  {{1, 4e-4 * (0.1 + 0.9 / 2000)},
                   {1000, 2.2e-4},
                   {1999, 4e-4 * (0.1 + 0.9 * 1999 / 2000)},
                   {2000, 4e-4},
                   {2000 + 737328 / 4, 4e-5 + 1.8e-4 * (1 + std::sqrt(0.5))},
                   {2000 + 737328 / 2, 2.2e-4},
                   {2000 + 737328 / 4 * 3, 4e-5 + 1.8e-4 * (1 - std::sqrt(0.5))},
                   {739328, 4e-5},
                   {10000000, 4e-5}}) == 0);
}

TEST_CASE("linear schedule of OLMo-7B", "[optim][schedule]") {
  const auto config = config_of(3e-4, {.kind = ScheduleKind::kLinear, .warmup_steps = 5000, .total_steps = 476838});
  CHECK(num_wrong(config, 1000,
                  {{1, 3e-4 * (0.1 + 0.9 / 5000)},
                   {2500, 3e-4 * 0.55},
                   {5000, 3e-4},
                   {5001, 3e-4 - 2.7e-4 / 471838},
                   {240919, 1.65e-4},
                   {476837, 3e-5 + 2.7e-4 / 471838},
                   {476838, 3e-5},
                   {476839, 3e-5}}) == 0);
}

TEST_CASE("wsd schedule: warm-up, stable, straight line at the end", "[optim][schedule]") {
  const auto tenth =
      config_of(1.0, {.kind = ScheduleKind::kWsd, .warmup_steps = 10, .warmup_start = 0, .final_fraction = 0});
  CHECK(num_wrong(tenth, 1000,
                  {{1, 0.1},
                   {9, 0.9},
                   {10, 1},
                   {500, 1},
                   {900, 1},
                   {901, 0.99},
                   {950, 0.5},
                   {999, 0.01},
                   {1000, 0},
                   {1001, 0}}) == 0);
  const auto given = config_of(2.0, {.kind = ScheduleKind::kWsd, .final_fraction = 0.5, .decay_steps = 40});
  CHECK(num_wrong(given, 100, {{1, 2}, {60, 2}, {80, 1.5}, {99, 1.025}, {100, 1}}) == 0);
  // A decay that would begin inside the warm-up begins after it.
  const auto early =
      config_of(1.0, {.kind = ScheduleKind::kWsd, .warmup_steps = 50, .final_fraction = 0, .decay_steps = 80});
  CHECK(num_wrong(early, 100, {{50, 1}, {75, 0.5}, {100, 0}}) == 0);
}

TEST_CASE("constant schedule warms up and stays", "[optim][schedule]") {
  const auto config = config_of(1e-3, {.kind = ScheduleKind::kConstant, .warmup_steps = 4, .warmup_start = 0.2});
  CHECK(num_wrong(config, 10, {{1, 0.4e-3}, {2, 0.6e-3}, {3, 0.8e-3}, {4, 1e-3}, {10, 1e-3}, {1000000, 1e-3}}) ==
        0);
}

TEST_CASE("schedules without warm-up, of one step, or shorter than their warm-up", "[optim][schedule]") {
  const auto kind =
      GENERATE(ScheduleKind::kCosine, ScheduleKind::kLinear, ScheduleKind::kWsd, ScheduleKind::kConstant);
  const double end = kind == ScheduleKind::kConstant ? 1.0 : 0.1;
  CHECK(num_wrong(config_of(1.0, {.kind = kind}), 1, {{0, 1.0}, {1, end}}) == 0);
  CHECK(num_wrong(config_of(1.0, {.kind = kind, .warmup_steps = 1}), 1, {{1, end}}) == 0);
  CHECK(num_wrong(config_of(1.0, {.kind = kind, .warmup_steps = 100}), 10, {{10, 0.19}, {50, 0.55}, {100, end}}) ==
        0);
}

TEST_CASE("total_steps 0 means the steps of the run", "[optim][schedule]") {
  const auto kind = GENERATE(ScheduleKind::kCosine, ScheduleKind::kLinear, ScheduleKind::kWsd);
  auto from_run = config_of(1.0, {.kind = kind, .warmup_steps = 7}), given = from_run;
  given.schedule.total_steps = 300;
  int wrong = 0;
  for (int64_t step = 1; step <= 310; ++step) {
    wrong += learning_rate(from_run, 300, step) != learning_rate(given, 12345, step);
  }
  CHECK(wrong == 0);
}

TEST_CASE("after warm-up no schedule rises, falls below its floor or jumps", "[optim][schedule]") {
  const auto kind = GENERATE(ScheduleKind::kCosine, ScheduleKind::kLinear, ScheduleKind::kWsd);
  const auto config = config_of(1.0, {.kind = kind, .warmup_steps = 100, .decay_steps = 300});
  int wrong = 0;
  for (int64_t step = 100; step < 2000; ++step) {
    const double now = learning_rate(config, 1500, step), next = learning_rate(config, 1500, step + 1);
    wrong += !(next <= now && next >= 0.1 - 1e-15 && now - next <= 0.0031);
  }
  CHECK(wrong == 0);
}
