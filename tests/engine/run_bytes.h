#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/training/training_run.h"
#include "tests/support/thread_ranks.h"

// What runs hold in their tensors, for comparisons of bits.
namespace parka::test {

using TensorBytes = std::map<std::string, std::vector<std::byte>>;

inline std::vector<std::byte> bytes_of(const TensorView& t) {
  const auto* const data = static_cast<const std::byte*>(t.data);  // of the CPU
  return {data, data + t.bytes()};
}

// Of what a checkpoint has of this rank.
inline TensorBytes tensors_of(const TrainingRun& run) {
  TensorBytes all;
  for (const NamedTensor& t : run.tensors()) all[t.name] = bytes_of(t.view);
  return all;
}

// Puts what this rank has of each tensor of a run where it belongs in all of it.
inline void collect(const TrainingRun& run, Device& device, TensorBytes& whole) {
  for (const NamedTensor& t : run.tensors()) {
    std::vector<std::byte>& bytes = whole[t.name];
    const int64_t size = size_of(t.view.dtype);
    int64_t numel = 1;
    for (const int64_t extent : t.shape) numel *= extent;
    bytes.resize(static_cast<size_t>(numel * size));
    PARKA_REQUIRE(t.box.is_one_run());
    device.copy_to_host(bytes.data() + t.box.run(0).begin * size, t.view.data, t.view.bytes());
  }
}

// What came of steps of several ranks, whose tensors stay apart.
struct RankOutcome {
  std::vector<double> losses, norms;
  double held_out = 0;
  std::vector<TensorBytes> initial, tensors;  // of each rank
};

// `before_step` is called by each rank before each of its steps.
inline RankOutcome train_ranks(const Config& config, int ranks, int steps,
                               const std::function<void(TrainingRun&)>& before_step = {}) {
  RankOutcome outcome;
  outcome.initial.resize(static_cast<size_t>(ranks));
  outcome.tensors.resize(static_cast<size_t>(ranks));
  ThreadRanks(ranks).run([&](Communicator& communicator) {
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    const auto rank = static_cast<size_t>(communicator.rank());
    outcome.initial[rank] = tensors_of(run);
    for (int i = 0; i < steps; ++i) {
      if (before_step) before_step(run);
      const std::optional<StepReport> report = run.step();
      PARKA_REQUIRE(report && report->applied);  // Catch2's own are not for several threads
      if (rank != 0) continue;
      outcome.losses.push_back(report->loss);
      outcome.norms.push_back(report->grad_norm);
    }
    const double held_out = run.evaluate(run.data()).loss;
    if (rank == 0) outcome.held_out = held_out;
    outcome.tensors[rank] = tensors_of(run);
  });
  return outcome;
}

}  // namespace parka::test
