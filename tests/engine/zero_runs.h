#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/config/config_io.h"
#include "engine/training/training_run.h"
#include "tests/engine/run_bytes.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/catch.h"
#include "tests/support/late_communicator.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

// Runs of several ranks, on the same data.
namespace parka::test {

inline constexpr int64_t kZeroSequence = 16;
inline constexpr int kZeroSteps = 4;

inline Config config_for(const TemporaryFolder& folder, const std::string& recipe, int64_t stage,
                         const char* norm = "rmsnorm", bool tied = false) {
  const std::string path = folder.path().string();
  write_tokens(path + "/train.npy", 100 * kZeroSequence);
  return parse_config({{"model",
                        {{"vocab_size", 80},
                         {"d_model", 48},
                         {"num_layers", 3},
                         {"num_heads", 3},
                         {"d_ffn", 80},
                         {"norm", norm},
                         {"tie_embeddings", tied}}},
                       {"precision", {{"recipe", recipe}}},
                       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
                       {"data", {{"train", {path + "/train.npy"}}, {"sequence_length", kZeroSequence}}},
                       {"training", {{"steps", 10}, {"global_batch_size", 8}, {"micro_batch_size", 1}}},
                       {"distributed", {{"zero_stage", stage}}},
                       {"checkpoint", {{"folder", path + "/run"}}}},
                      "test");
}

struct Outcome {
  std::vector<double> losses, norms;
  double held_out = 0;
  TensorBytes tensors;  // put together from the ranks' pieces
};

inline void check_same(const Outcome& one, const Outcome& other) {
  CHECK(one.losses == other.losses);
  CHECK(one.norms == other.norms);
  CHECK(one.held_out == other.held_out);
  CHECK((one.tensors == other.tensors));  // too many bytes to print
}

// `before_step` is called by each rank before each of its steps, counted from 0.
using BeforeStep = std::function<void(TrainingRun&, int step)>;

using MakeDevice = std::function<std::unique_ptr<Device>()>;

enum class Collectives { kAtOnce, kLate };

inline Outcome train(const Config& config, int ranks, const BeforeStep& before_step = {},
                     const MakeDevice& make_device = make_cpu_device,
                     Collectives collectives = Collectives::kAtOnce) {
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  std::mutex mutex;
  TensorBytes whole;
  ThreadRanks(ranks).run([&](Communicator& real) {
    LateCommunicator late(real);
    Communicator& communicator = collectives == Collectives::kLate ? late : real;
    const auto device = make_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    Outcome& outcome = outcomes[static_cast<size_t>(communicator.rank())];
    for (int i = 0; i < kZeroSteps; ++i) {
      if (before_step) before_step(run, i);
      const std::optional<StepReport> report = run.step();
      PARKA_REQUIRE(report && report->applied);  // Catch2's own are not for several threads
      outcome.losses.push_back(report->loss);
      outcome.norms.push_back(report->grad_norm);
    }
    outcome.held_out = run.evaluate(run.data()).loss;
    const std::lock_guard lock(mutex);
    collect(run, *device, whole);
  });
  for (const Outcome& outcome : outcomes) {
    check_same(outcome, outcomes[0]);  // all ranks report the same
  }
  outcomes[0].tensors = std::move(whole);
  return outcomes[0];
}

}  // namespace parka::test
