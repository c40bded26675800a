#include <memory>
#include <string>

#include "tests/engine/zero_runs.h"
#include "tests/support/catch.h"
#include "tests/support/device_with_late_copies.h"

using namespace parka;
using namespace parka::test;

// Runs whose collectives are done as late as they may be, against runs whose collectives are done when they are
// queued. A GPU's are done at any time between.
namespace {

// Evaluates before the second step, too: weights that are gathered for it are there for the step.
void evaluate_once(TrainingRun& run, int step) {
  if (step == 1) run.evaluate(run.data());
}

// More blocks than there are buffers for gathered weights, or for gradients.
Config five_blocks(const TemporaryFolder& folder, const std::string& recipe, int64_t stage) {
  Config config = config_for(folder, recipe, stage);
  config.model.num_layers = 5;
  return config;
}

void check_late(const Config& config, int ranks) {
  validate(config);
  const Outcome at_once = train(config, ranks, evaluate_once);
  check_same(train(config, ranks, evaluate_once, make_cpu_device, Collectives::kLate), at_once);
}

}  // namespace

TEST_CASE("collectives that are late do not change a bit of any stage", "[engine][zero][late][slow]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "fp8_block", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      CAPTURE(recipe, stage);
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, stage, "rmsnorm", /*tied=*/stage == 1);
      config.model.num_layers = 5;  // more than there are buffers for gathered weights, or for gradients
      config.reliability.state_interval = 1;
      check_late(config, 2);
      if (stage > 0) config.distributed.shard_size = 2;  // two copies of the model
      check_late(config, 4);
    }
  }
}

TEST_CASE("weights that are gathered late do not change a bit of stage 3", "[engine][zero][late][slow]") {
  for (const WeightCopies copies : {WeightCopies::kRows, WeightCopies::kBoth, WeightCopies::kNone}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      CAPTURE(name_of(copies), name_of(recompute));
      const TemporaryFolder folder;
      Config config = five_blocks(folder, "parka", 3);
      config.precision.weight_copies = copies;
      config.precision.recompute = recompute;
      check_late(config, 2);
    }
  }
}

TEST_CASE("gradients that are reduced late are released with the same bits", "[engine][zero][late][release]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      CAPTURE(recipe, stage);
      const TemporaryFolder folder;
      Config config = five_blocks(folder, recipe, stage);
      config.training.micro_batch_size = 2;
      config.optimizer.release_gradients = true;
      if (stage > 0) config.distributed.shard_size = 2;
      check_late(config, 4);
    }
  }
}

TEST_CASE("late exchanges between ranks that share sequences do not change a bit",
          "[engine][zero][late][context]") {
  for (const int64_t stage : {0, 3}) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = config_for(folder, "coat", stage);
    config.model.num_heads = 4;
    config.model.given_head_dim = 16;
    config.training.micro_batch_size = 2;
    config.distributed.context_parallel = 2;
    check_late(config, 4);
  }
}

TEST_CASE("late collectives and late copies do not change a bit of weights in host memory",
          "[engine][zero][late][offload][slow]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      CAPTURE(recipe, stage);
      const TemporaryFolder folder;
      Config config = five_blocks(folder, recipe, stage);
      config.optimizer.offload = config.precision.offload_weights = true;
      config.precision.weight_copies = WeightCopies::kNone;
      const Outcome at_once = train(config, 2, evaluate_once);
      const MakeDevice late_copies = [] { return std::make_unique<DeviceWithLateCopies>(); };
      check_same(train(config, 2, evaluate_once, late_copies, Collectives::kLate), at_once);
    }
  }
}
