#include <cmath>
#include <mutex>

#include "engine/config/config_io.h"
#include "engine/planning/memory_advice.h"
#include "engine/training/training_run.h"
#include "tests/engine/run_bytes.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs whose ranks share sequences against a run of one rank, on the same data.
namespace {

constexpr int64_t kSequence = 64;
constexpr int kSteps = 4;

Config config_for(const TemporaryFolder& folder, const std::string& recipe) {
  const std::string path = folder.path().string();
  write_tokens(path + "/train.npy", 40 * kSequence);
  return parse_config({{"model",
                        {{"vocab_size", 80},
                         {"d_model", 64},
                         {"num_layers", 3},
                         {"num_heads", 8},
                         {"num_kv_heads", 4},
                         {"head_dim", 16},
                         {"d_ffn", 80},
                         {"norm", "rmsnorm"}}},
                       {"precision", {{"recipe", recipe}}},
                       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
                       {"data", {{"train", {path + "/train.npy"}}, {"sequence_length", kSequence}}},
                       {"training", {{"steps", 10}, {"global_batch_size", 8}, {"micro_batch_size", 1}}},
                       {"checkpoint", {{"folder", path + "/run"}}}},
                      "test");
}

struct Outcome {
  std::vector<double> losses, norms;
  double held_out = 0;
  int64_t targets = 0, held_out_targets = 0, planned_bytes = 0;
  TensorBytes tensors;  // put together from the ranks' pieces

  bool operator==(const Outcome&) const = default;
};

Outcome train(Config config, int ranks, int64_t context_parallel) {
  config.distributed.context_parallel = context_parallel;
  validate(config);
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  std::mutex mutex;
  Outcome whole;
  ThreadRanks(ranks).run([&](Communicator& communicator) {
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    Outcome& outcome = outcomes[static_cast<size_t>(communicator.rank())];
    for (int i = 0; i < kSteps; ++i) {
      const std::optional<StepReport> report = run.step();
      PARKA_REQUIRE(report && report->applied);  // Catch2's own are not for several threads
      outcome.losses.push_back(report->loss);
      outcome.norms.push_back(report->grad_norm);
      outcome.targets += report->num_targets;
    }
    const EvaluationResult held_out = run.evaluate(run.data());
    outcome.held_out = held_out.loss;
    outcome.held_out_targets = held_out.num_targets;
    outcome.planned_bytes = run.plan().total_bytes();
    const std::lock_guard lock(mutex);
    collect(run, *device, whole.tensors);
  });
  for (const Outcome& outcome : outcomes) CHECK((outcome == outcomes[0]));  // all ranks report the same
  whole.losses = outcomes[0].losses;
  whole.norms = outcomes[0].norms;
  whole.held_out = outcomes[0].held_out;
  whole.targets = outcomes[0].targets;
  whole.held_out_targets = outcomes[0].held_out_targets;
  whole.planned_bytes = outcomes[0].planned_bytes;
  return whole;
}

double largest_relative(const std::vector<double>& a, const std::vector<double>& b) {
  PARKA_REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return largest;
}

void check_near(const Outcome& got, const Outcome& one, double bound) {
  CHECK(largest_relative(got.losses, one.losses) < bound);
  CHECK(largest_relative(got.norms, one.norms) < 10 * bound);
  CHECK(std::abs(got.held_out - one.held_out) < bound * one.held_out);
  CHECK(got.targets == one.targets);
  CHECK(got.held_out_targets == one.held_out_targets);
}

struct Ranks {
  int ranks;
  int64_t shared_by, stage, shard_size;
};

}  // namespace

// fp32: sums in another order, a few units of the last place of what is about 4. FP8: scales of slices instead of
// sequences, as those of tests/engine/test_zero.cpp.
TEST_CASE("ranks that share sequences train as one rank, at every stage, and the same again",
          "[engine][context][slow]") {
  for (const auto& [recipe, bound] : {std::pair{"fp32", 1e-6}, {"bf16", 4e-3}, {"parka", 1e-2}}) {
    const TemporaryFolder folder;
    Config config = config_for(folder, recipe);
    const Outcome one = train(config, 1, 1);
    for (const Ranks& r : {Ranks{2, 2, 0, 0}, Ranks{2, 2, 1, 0}, Ranks{2, 2, 3, 0}, Ranks{4, 2, 0, 0},
                           Ranks{4, 2, 2, 0}, Ranks{4, 2, 3, 2}, Ranks{4, 4, 1, 2}, Ranks{4, 4, 3, 0}}) {
      CAPTURE(recipe, r.ranks, r.shared_by, r.stage, r.shard_size);
      config.distributed.zero_stage = r.stage;
      config.distributed.shard_size = r.shard_size;
      const Outcome shared = train(config, r.ranks, r.shared_by);
      check_near(shared, one, bound);
      if (r.shared_by == r.ranks) CHECK((train(config, r.ranks, r.shared_by) == shared));
    }
  }
}

TEST_CASE("shared sequences go with documents, windows, norms of heads, and what saves memory",
          "[engine][context][slow]") {
  struct Case {
    const char* name;
    void (*change)(Config&);
  };
  const Case cases[] = {
      {"documents",
       [](Config& c) {
         c.data.documents = DocumentMode::kSeparate;
         c.data.document_end = 7;
       }},
      {"a window and norms of heads",
       [](Config& c) {
         c.model.sliding_window = 20;
         c.model.qk_norm = QkNormKind::kPerHead;
       }},
      {"two sequences in a micro-batch", [](Config& c) { c.training.micro_batch_size = 2; }},
      {"recompute", [](Config& c) { c.precision.recompute = Recompute::kBlock; }},
      {"blocks in host memory", [](Config& c) { c.precision.offload_blocks = 1; }},
      {"states in host memory", [](Config& c) { c.optimizer.offload = true; }},
      {"released gradients",
       [](Config& c) {
         c.optimizer.release_gradients = true;
         c.optimizer.clip_norm = 0;
         c.training.global_batch_size = 2;
         c.training.micro_batch_size = 2;
       }},
      {"checks in each step", [](Config& c) { c.reliability.replay_interval = c.reliability.state_interval = 1; }},
  };
  for (const Case& c : cases) {
    const TemporaryFolder folder;
    Config config = config_for(folder, "fp32");
    c.change(config);
    const Outcome one = train(config, 1, 1);
    for (const int64_t stage : {0, 2}) {
      CAPTURE(c.name, stage);
      config.distributed.zero_stage = stage;
      check_near(train(config, 2, 2), one, 1e-6);
    }
  }
}

TEST_CASE("what saves memory changes no bit of shared sequences", "[engine][context]") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "parka");
  config.distributed.zero_stage = 1;
  Outcome plain = train(config, 2, 2);
  plain.planned_bytes = 0;
  const auto same_without_plan = [&](const Config& changed) {
    Outcome other = train(changed, 2, 2);
    other.planned_bytes = 0;
    return other == plain;
  };
  Config recomputed = config, offloaded = config;
  recomputed.precision.recompute = Recompute::kBlock;
  offloaded.precision.offload_blocks = 1;
  CHECK(same_without_plan(recomputed));
  CHECK(same_without_plan(offloaded));
}

TEST_CASE("the plan of shared sequences has half of what is kept, and is what a rank allocates",
          "[engine][context]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"bf16", "parka"}) {
    Config config = config_for(folder, recipe);
    const auto kept = [&] {
      const DeclaredRun run(config, DeviceKind::kCpu, zero_of(config, 0, 2));
      for (const MemoryPlan::CategoryTotal& total : run.plan.summary()) {
        if (total.category == "saved activations") return total.bytes;
      }
      return int64_t{0};
    };
    const int64_t of_whole = kept();
    const int64_t on_a_gpu = planned_bytes(config, 2);
    config.distributed.context_parallel = 2;
    CAPTURE(recipe);
    CHECK(of_whole > 0);
    const DeclaredRun declared(config, DeviceKind::kCpu, zero_of(config, 0, 2));
    // Each tensor begins at a multiple of 256 bytes.
    const auto rounding = static_cast<int64_t>(256 * declared.plan.entries().size());
    CHECK(kept() * 2 >= of_whole);
    CHECK(kept() * 2 <= of_whole + 2 * rounding);
    CHECK(kept() * 10 < of_whole * 6);
    CHECK(planned_bytes(config, 2) < on_a_gpu);
    CHECK(train(config, 2, 2).planned_bytes == declared.plan.total_bytes());
  }
}

TEST_CASE("numbers of ranks that cannot share sequences are refused", "[engine][context]") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "fp32");
  config.distributed.context_parallel = 4;
  CHECK(refusal([&] {
          zero_of(config, 0, 1);
        }).find("context_parallel = 4 does not divide the 1 rank of the run") != std::string::npos);
  CHECK(refusal([&] { planned_bytes(config, 6); }).find("does not divide the 6 ranks") != std::string::npos);
  zero_of(config, 0, 8);
  config.optimizer.release_gradients = true;
  CHECK(refusal([&] { zero_of(config, 0, 8); }).find("groups of ranks that share sequences = 8 / 2") !=
        std::string::npos);
  config.training.micro_batch_size = 4;
  zero_of(config, 0, 8);
}
