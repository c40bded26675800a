#include <cmath>
#include <cstring>

#include "engine/checkpoint/checkpoint.h"
#include "engine/step/declared_run.h"
#include "tests/engine/zero_runs.h"
#include "tests/support/refusal.h"

using namespace parka;
using namespace parka::test;

// Runs whose ranks divide the experts of a mixture against a run of one rank, on the same data.
namespace {

struct Ranks {
  int ranks;
  int64_t divided_by, stage, shard_size;
};
constexpr Ranks kSplits[] = {{2, 2, 0, 0}, {2, 2, 1, 0}, {2, 2, 2, 0}, {2, 2, 3, 0}, {4, 2, 0, 0},
                             {4, 2, 1, 0}, {4, 2, 2, 0}, {4, 2, 3, 0}, {4, 2, 2, 2}, {4, 4, 0, 0},
                             {4, 4, 1, 0}, {4, 4, 3, 0}, {8, 4, 3, 4}, {8, 8, 1, 0}};

// Each term of the loss counts, also what a wrong factor of a single one would change.
Config mixture(const TemporaryFolder& folder, const std::string& recipe) {
  Config config = config_for(folder, recipe, 0);
  config.model.moe = {.num_experts = 8, .experts_per_token = 3, .normalize_weights = true};
  config.training.balance_loss = 0.05;
  config.training.router_z_loss = 0.01;
  config.optimizer.clip_norm = 0.5;
  config.optimizer.clip_warmup_steps = 0;
  return config;
}

// With a router that chooses by a bias, a shared expert, and a block without experts.
Config deepseek(const TemporaryFolder& folder, const std::string& recipe) {
  Config config = mixture(folder, recipe);
  config.model.moe = {.num_experts = 8,
                      .experts_per_token = 2,
                      .score = RouterScore::kSigmoid,
                      .normalize_weights = true,
                      .weight_scaling = 2.5,
                      .groups = 4,
                      .groups_kept = 2,
                      .correction_bias = true,
                      .shared_width = 32,
                      .dense_layers = 1,
                      .dense_width = 80};
  config.training.router_bias_rate = 0.01;
  return config;
}

Outcome train_split(Config config, const Ranks& r) {
  config.distributed = {.zero_stage = r.stage, .shard_size = r.shard_size, .expert_parallel = r.divided_by};
  validate(config);
  return train(config, r.ranks);
}

double largest_relative(const std::vector<double>& a, const std::vector<double>& b) {
  PARKA_REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return largest;
}

// The distance of two fp32 tensors, relative to their length.
double distance(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  PARKA_REQUIRE(a.size() == b.size());
  std::vector<float> x(a.size() / sizeof(float)), y(x.size());
  std::memcpy(x.data(), a.data(), a.size());
  std::memcpy(y.data(), b.data(), b.size());
  double difference = 0, length = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += std::pow(double{x[i]} - y[i], 2);
    length += std::pow(double{y[i]}, 2);
  }
  return length == 0 ? std::sqrt(difference) : std::sqrt(difference / length);
}

// Losses, norms, and what a gradient that is wrong by a factor would change: first moments are sums of gradients.
void check_near(const Outcome& got, const Outcome& one, double bound) {
  CHECK(largest_relative(got.losses, one.losses) < bound);
  CHECK(largest_relative(got.norms, one.norms) < 10 * bound);
  CHECK(std::abs(got.held_out - one.held_out) < bound * one.held_out);
  REQUIRE(got.tensors.size() == one.tensors.size());
  for (const auto& [name, bytes] : one.tensors) {
    CAPTURE(name);
    REQUIRE(got.tensors.at(name).size() == bytes.size());
    const bool is_sum = name.ends_with(".exp_avg") || name.ends_with(".momentum");
    if (is_sum && bound < 1e-5) CHECK(distance(got.tensors.at(name), bytes) < 100 * bound);
  }
}

}  // namespace

// fp32: sums in another order, some units of the last place of a loss of about 4; moments lose those of terms that
// cancel. FP8: scales of a rank's tokens, and of its experts' rows, after which a token may choose another expert.
TEST_CASE("ranks that divide experts train as one rank, at every stage", "[engine][moe][slow]") {
  for (const auto make : {mixture, deepseek}) {
    for (const auto& [recipe, bound] : {std::pair{"fp32", 2e-6}, {"bf16", 4e-3}, {"parka", 2e-2}}) {
      const TemporaryFolder folder;
      Config config = make(folder, recipe);
      config.optimizer.lr = 1e-3;
      const Outcome one = train(config, 1);
      for (const Ranks& r : kSplits) {
        if (r.stage == 3 && config.model.moe.dense_layers > 0) continue;
        CAPTURE(recipe, config.model.moe.dense_layers, r.ranks, r.divided_by, r.stage, r.shard_size);
        check_near(train_split(config, r), one, bound);
      }
    }
  }
}

TEST_CASE("the same split gives the same bits, however late collectives are done", "[engine][moe][slow]") {
  const TemporaryFolder folder;
  for (const auto make : {mixture, deepseek}) {
    for (const Ranks& r : {Ranks{2, 2, 1, 0}, Ranks{4, 2, 2, 0}}) {
      Config config = make(folder, "parka");
      const Outcome plain = train_split(config, r);
      config.distributed = {.zero_stage = r.stage, .shard_size = r.shard_size, .expert_parallel = r.divided_by};
      check_same(train(config, r.ranks, {}, make_cpu_device, Collectives::kLate), plain);
    }
  }
}

TEST_CASE("divided experts go with what saves memory, with other optimizers and batches", "[engine][moe][slow]") {
  struct Case {
    const char* name;
    void (*change)(Config&);
    bool same_bits = false;  // as without the change
  };
  const Case cases[] = {
      {"recompute", [](Config& c) { c.precision.recompute = Recompute::kBlock; }, true},
      {"blocks in host memory", [](Config& c) { c.precision.offload_blocks = 1; }, true},
      {"states in host memory", [](Config& c) { c.optimizer.offload = true; }, true},
      {"kept products",
       [](Config& c) {
         c.precision.save_norm_output = true;
         c.precision.save_product = true;
       },
       true},
      {"FP8 copies that are not kept", [](Config& c) { c.precision.weight_copies = WeightCopies::kNone; }, true},
      {"muon", [](Config& c) { c.optimizer.kind = OptimizerKind::kMuon; }},
      {"two sequences in a micro-batch",
       [](Config& c) {
         c.training.micro_batch_size = 2;
         c.training.balance_loss = 0;  // of a micro-batch, whose sequences are others on other ranks
       }},
      {"a frozen router", [](Config& c) { c.optimizer.frozen = {"*.router"}; }},
      {"frozen experts", [](Config& c) { c.optimizer.frozen = {"*.experts.up_gate"}; }},
      {"a pooled balance loss", [](Config& c) { c.training.balance_form = BalanceForm::kPooled; }},
  };
  for (const char* recipe : {"fp32", "parka"}) {
    const double bound = std::string(recipe) == "fp32" ? 2e-6 : 2e-2;
    for (const auto& [name, change, same_bits] : cases) {
      const TemporaryFolder folder;
      Config config = mixture(folder, recipe);
      config.optimizer.lr = 1e-3;
      for (const Ranks& r : {Ranks{2, 2, 1, 0}, Ranks{4, 2, 2, 0}}) {
        CAPTURE(recipe, name, r.ranks, r.stage);
        Config changed = config;
        change(changed);
        const Outcome split = train_split(changed, r);
        if (same_bits) {
          check_same(split, train_split(config, r));
        } else {
          // Muon makes directions whose length forgets that of the gradient.
          const bool is_muon = changed.optimizer.kind == OptimizerKind::kMuon;
          check_near(split, train(changed, 1), is_muon && bound < 1e-5 ? 2e-4 : bound);
        }
      }
    }
  }
}

// The step that all ranks make of released gradients has the norm of the step before, on any split.
TEST_CASE("divided experts go with released gradients", "[engine][moe][slow]") {
  const TemporaryFolder folder;
  Config config = mixture(folder, "fp32");
  config.optimizer.release_gradients = true;
  config.training.global_batch_size = 4;
  config.training.micro_batch_size = 4;
  config.training.balance_loss = 0;  // of a micro-batch, whose size differs
  const Outcome one = train(config, 1);
  for (const Ranks& r : {Ranks{2, 2, 0, 0}, Ranks{2, 2, 1, 0}, Ranks{4, 2, 1, 0}, Ranks{4, 4, 2, 0}}) {
    CAPTURE(r.ranks, r.stage);
    config.training.micro_batch_size = 4 / r.ranks;
    check_near(train_split(config, r), one, 2e-6);
  }
}

TEST_CASE("ranks that divide experts also share sequences", "[engine][moe][context][slow]") {
  const TemporaryFolder folder;
  Config config = mixture(folder, "fp32");
  config.model.num_heads = 4;
  config.training.balance_loss = 0;  // of the tokens of a rank
  const Outcome one = train(config, 1);
  config.distributed = {.zero_stage = 1, .context_parallel = 2, .expert_parallel = 2};
  for (const int ranks : {2, 4}) check_near(train(config, ranks), one, 2e-6);
}

// Saved by two ranks, read by one and saved again, and so on: what a checkpoint holds depends on no split.
TEST_CASE("a checkpoint of divided experts is read by any split, to the bit", "[engine][moe][checkpoint][slow]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    Config config = mixture(folder, recipe);
    TensorBytes saved;
    int64_t step = 0;
    for (const Ranks& r : {Ranks{2, 2, 1, 0}, Ranks{1, 1, 0, 0}, Ranks{4, 4, 2, 0}, Ranks{4, 2, 0, 0},
                           Ranks{2, 2, 0, 0}, Ranks{4, 2, 3, 2}, Ranks{2, 1, 2, 0}, Ranks{4, 4, 0, 0}}) {
      CAPTURE(recipe, r.ranks, r.divided_by, r.stage, r.shard_size);
      config.distributed = {.zero_stage = r.stage, .shard_size = r.shard_size, .expert_parallel = r.divided_by};
      TensorBytes read, written;
      std::mutex mutex;
      const std::string newest = step == 0 ? "" : list_checkpoints(config.checkpoint.folder).front().path;
      ThreadRanks(r.ranks).run([&](Communicator& communicator) {
        const auto device = make_cpu_device();
        TrainingRun run(config, *device, communicator);
        if (newest.empty()) {
          run.initialize();
        } else {
          run.restore(load_checkpoint(newest));
        }
        {
          const std::lock_guard lock(mutex);
          collect(run, *device, read);
        }
        PARKA_REQUIRE(run.step()->applied);
        {
          const std::lock_guard lock(mutex);
          collect(run, *device, written);
        }
        save_checkpoint(config.checkpoint.folder, run.snapshot(),
                        {.group = {.rank = communicator.rank(), .size = communicator.size(), .id = "together"}});
      });
      if (step++ > 0) CHECK((read == saved));
      saved = std::move(written);
    }
  }
}

TEST_CASE("a run with divided experts allocates what was planned for it", "[engine][moe]") {
  const TemporaryFolder folder;
  for (const Ranks& r : {Ranks{2, 2, 1, 0}, Ranks{4, 2, 2, 0}, Ranks{2, 2, 0, 0}}) {
    Config config = mixture(folder, "parka");
    config.distributed = {.zero_stage = r.stage, .shard_size = r.shard_size, .expert_parallel = r.divided_by};
    ThreadRanks(r.ranks).run([&](Communicator& communicator) {
      const auto device = make_cpu_device();
      TrainingRun run(config, *device, communicator);
      const DeclaredRun planned(config, DeviceKind::kCpu, zero_of(config, communicator.rank(), r.ranks));
      PARKA_REQUIRE(run.plan().total_bytes() == planned.plan.total_bytes());
      int64_t bytes = 0;  // of experts: a share of them
      for (const ParameterInfo& p : run.optimizer().parameters()) {
        if (p.role == ParameterRole::kExperts) bytes += p.numel();
      }
      PARKA_REQUIRE(bytes * r.divided_by == 3 * 8 * 3 * 48 * 80);
    });
  }
}

TEST_CASE("numbers of ranks that cannot divide the experts are refused", "[engine][moe]") {
  const TemporaryFolder folder;
  Config config = mixture(folder, "fp32");
  const auto refused = [&](int64_t by, int64_t ranks, int64_t shard_size) {
    config.distributed = {.zero_stage = 1, .shard_size = shard_size, .expert_parallel = by};
    return refusal([&] {
      validate(config);
      zero_of(config, 0, ranks);
    });
  };
  CHECK(refused(3, 3, 0).find("distributed.expert_parallel") != std::string::npos);
  CHECK(refused(2, 3, 0).find("distributed.expert_parallel") != std::string::npos);
  CHECK(refused(4, 8, 2).find("distributed.shard_size") != std::string::npos);
  config.model.moe = {};
  config.training.balance_loss = config.training.router_z_loss = 0;
  CHECK(refused(2, 2, 0).find("distributed.expert_parallel") != std::string::npos);
}
