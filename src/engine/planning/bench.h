#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/training/speed.h"
#include "kernels/device/device.h"

namespace parka {

// All runs of one op on one shape within a step.
struct OpSummary {
  StepSection section = StepSection::kNone;
  std::string op;
  OpCost cost;  // of one run
  int64_t count = 0;
  double seconds = 0;        // of all runs
  double floor_seconds = 0;  // the same if each reached what the device can do; 0: not measured
};

struct BenchResult {
  std::string device;
  int ranks = 1;
  DocumentMode documents = DocumentMode::kJoined;  // as measured, see SyntheticTokens::apply()
  ModelSpeed speed;
  int64_t tokens_per_step = 0;
  int64_t sequences_per_step = 0, images_per_sequence = 0;
  int64_t blocks_per_step = 0;       // layers x micro-batches: what block times are divided by
  std::vector<double> step_seconds;  // of each timed step
  double queue_seconds = 0;          // that the host took to queue a step
  double timed_step_seconds = 0;     // of the step whose ops were timed one by one
  std::vector<OpSummary> ops;        // of that step, longest first
  std::vector<OpSummary> waits;      // of that step, where ops waited for copies and collectives
  std::vector<double> op_seconds;    // of that step, all ops together, of each rank
  double copy_bandwidth = 0;         // bytes per second, read and written, of a large copy within the device
  int64_t planned_bytes = 0;
  int64_t context_bytes = 0;  // expected beside the plan on a GPU
  int64_t used_bytes = 0;     // on the GPU by everything, after the last step, of the rank with most; 0 on the CPU
  int64_t planned_host_bytes = 0;   // of tensors and offloaded blocks in host memory
  int64_t resident_host_bytes = 0;  // the most that the process had of it, of the rank with most

  double median_step_seconds() const;
  double tokens_per_second() const { return static_cast<double>(tokens_per_step) / median_step_seconds(); }
  double sequences_per_second() const { return static_cast<double>(sequences_per_step) / median_step_seconds(); }
  double tokens_per_second_per_rank() const { return tokens_per_second() / ranks; }
  double floor_seconds() const;  // sum over all ops; 0 if not measured
  double own_op_seconds() const;
};

// Trains `steps` steps of `config` on synthetic tokens after two that are not timed, then one with every op timed.
// With `roofline`, what each op could reach is measured too. All ranks call it; times are this rank's.
BenchResult run_benchmark(const Config& config, Device& device, Communicator& communicator, int64_t steps,
                          bool roofline);

// A temporary token file for measuring speed on: ids with the skew of text, where a few are most of all tokens
// (log-uniform, the same on every machine). A model with a tower computes blank images, as many as with data.
class SyntheticTokens {
 public:
  explicit SyntheticTokens(const Config& config);
  ~SyntheticTokens();
  SyntheticTokens& operator=(SyntheticTokens&&) = delete;

  // `config` with this file to train on, and without a disk. Documents are separate only where an id ends them.
  Config apply(Config config) const;

 private:
  std::string path_;
  TokenType type_;
};

}  // namespace parka
