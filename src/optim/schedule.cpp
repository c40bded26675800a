#include <algorithm>
#include <cmath>
#include <numbers>

#include "optim/optimizer.h"

namespace parka {
namespace {

// Fraction of the way from `begin` to `end` that `step`, between them, has gone.
double progress(int64_t step, int64_t begin, int64_t end) {
  return static_cast<double>(step - begin) / static_cast<double>(end - begin);
}

// Fraction of the peak learning rate at W <= step < S.
double fraction_after_warmup(const ScheduleConfig& schedule, int64_t step, int64_t warmup, int64_t total) {
  const double drop = 1.0 - schedule.final_fraction;
  switch (schedule.kind) {
    case ScheduleKind::kCosine: {
      const double x = progress(step, warmup, total);
      return schedule.final_fraction + drop * (1.0 + std::cos(std::numbers::pi * x)) / 2.0;
    }
    case ScheduleKind::kLinear: return 1.0 - drop * progress(step, warmup, total);
    case ScheduleKind::kWsd: {
      const int64_t decay_steps = schedule.decay_steps == 0 ? total / 10 : schedule.decay_steps;
      const int64_t decay_begin = std::max(total - decay_steps, warmup);
      return step <= decay_begin ? 1.0 : 1.0 - drop * progress(step, decay_begin, total);
    }
    case ScheduleKind::kConstant: return 1.0;
  }
  throw_internal("unknown schedule {}", static_cast<int>(schedule.kind));
}

}  // namespace

double learning_rate(const OptimizerConfig& config, int64_t training_steps, int64_t step) {
  const ScheduleConfig& schedule = config.schedule;
  const int64_t warmup = schedule.warmup_steps;
  const int64_t total = schedule.total_steps == 0 ? training_steps : schedule.total_steps;
  if (step < warmup) {
    return config.lr * (schedule.warmup_start + (1.0 - schedule.warmup_start) * progress(step, 0, warmup));
  }
  if (step >= total && schedule.kind != ScheduleKind::kConstant) return config.lr * schedule.final_fraction;
  return config.lr * fraction_after_warmup(schedule, step, warmup, total);
}

}  // namespace parka
