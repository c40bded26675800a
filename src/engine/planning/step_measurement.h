#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/config/config_io.h"
#include "engine/planning/bench.h"
#include "engine/planning/step_actions.h"

namespace parka {

// A measurement of `parka bench --json`.
struct StepMeasurement {
  std::string path, device;
  int64_t ranks = 1;
  Config config;
  double step_seconds = 0;       // median
  double host_wait_seconds = 0;  // of a step that waited for states from and to host memory
  double copy_bandwidth = 0;     // bytes per second, read and written
  std::vector<OpSummary> ops;    // of one rank and one step

  int64_t tokens_per_step() const { return config.training.global_batch_size * config.data.sequence_length; }
  double tokens_per_second_per_gpu() const {
    return static_cast<double>(tokens_per_step()) / step_seconds / static_cast<double>(ranks);
  }
  // Names of the ops that are a product with what reads it, which was one kernel: the config does not say.
  std::set<std::string> one_kernel() const;
  int64_t num_micro_batches() const { return config.micro_batches_per_step(ranks); }
};

// Throws Error(kBadInput) for a file that is none, or has times that cannot be.
StepMeasurement read_step_measurement(const std::string& path);

// Throws Error(kBadInput) unless a step has whole micro-batches.
void require_whole_micro_batches(const Config& config, int64_t num_gpus);

// The time of work by a measurement on one GPU, so that the measured step takes `slowest` times as long. Throws
// Error(kBadInput) for a measurement on several GPUs.
WorkSeconds measured_work(const StepMeasurement& one, double slowest = 1);

// Throws Error(kBadInput) naming the keys of `config` that differ from the measured one, of those that `speed`
// says.
void require_same_speed(const StepMeasurement& measured, const Config& config, SpeedOf speed);

// The step of a rank of `num_gpus` under `config`, in whose time ops take what they took in a measurement on one
// GPU. `config` may differ from the measured one in what it is asked about: batch over accumulation and ranks,
// sharding, and which copies of weights are kept (SpeedOf::kOneGpu). Ranks wait for the slowest GPU, which takes
// `slowest` times as long as the measured one.
std::vector<StepAction> step_actions_by(const StepMeasurement& one, const Config& config, int64_t num_gpus,
                                        double slowest = 1);

// Throws Error(kBadInput) unless `measured` is of `config` on `num_gpus` GPUs.
void require_measurement_of(const StepMeasurement& measured, const Config& config, int64_t num_gpus);

}  // namespace parka
