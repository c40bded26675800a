#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/training/training_run.h"
#include "kernels/ops/quantize/quantize.h"
#include "tests/engine/zero_runs.h"
#include "tests/support/catch.h"
#include "tests/support/device_with_late_copies.h"
#include "tests/support/offload_plan.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs of several ranks against a run of one, on the same data.
namespace {

// Sets every byte of the memory that gradients have on this rank: with 0xff to NaN in any format.
void fill_gradients(const TrainingRun& run, int byte) {
  for (size_t i = 0; i < run.optimizer().parameters().size(); ++i) {
    const auto& [whole, own] = run.optimizer().gradient_pieces(i);
    for (const TensorView& t : {whole, own}) std::memset(t.data, byte, static_cast<size_t>(t.bytes()));
  }
}

// Counts the FP8 copies of weights that are not, to the bit, what quantizing the weights anew gives.
class CopyCheck {
 public:
  // To be called by all ranks.
  void check(TrainingRun& run, Device& device, Communicator& communicator) {
    {
      const std::lock_guard lock(mutex_);
      collect(run, device, whole_);
    }
    communicator.barrier();
    const ModelWeights& weights = run.model().weights();
    const ParameterTable& table = run.model().parameters();
    for (int64_t l = 0; l < table.num_blocks; ++l) {
      const int unit = table.block_unit(l);
      for (const auto pass : {ModelWeights::Pass::kForward, ModelWeights::Pass::kBackward}) {
        if (weights.is_gathered_on_use(unit)) gather(weights, device, communicator, unit, pass);
        for (const int index : table.unit(unit)) {
          const ParameterInfo& p = table.all[static_cast<size_t>(index)];
          if (p.role == ParameterRole::kLinear) compare(weights, device, index, p, pass);
        }
      }
    }
    communicator.barrier();
  }
  int64_t num_wrong() const { return num_wrong_; }

 private:
  static void gather(const ModelWeights& weights, Device& device, Communicator& communicator, int unit,
                     ModelWeights::Pass pass) {
    weights.before_gather(device, unit);
    for (const ModelWeights::Piece& piece : weights.pieces(unit, pass)) {
      if (piece.is_columns) {
        communicator.all_gather_columns(device, piece.own, piece.whole, Peers::kShard);
      } else {
        communicator.all_gather(device, piece.own, piece.whole, Peers::kShard);
      }
    }
    weights.gathered(device, unit);
  }
  void compare(const ModelWeights& weights, Device& device, int index, const ParameterInfo& p,
               ModelWeights::Pass pass) {
    std::vector<std::byte> codes(static_cast<size_t>(p.numel())), codes_t(codes.size());
    float scale = 0;
    const TensorView wanted_scale(&scale, DType::kF32, {1});
    const ScaledView wanted(TensorView(codes.data(), DType::kE4M3, {p.rows, p.cols}), wanted_scale,
                            Scaling::kTensor);
    const ScaledView wanted_t(TensorView(codes_t.data(), DType::kE4M3, {p.cols, p.rows}), wanted_scale,
                              Scaling::kTensor);
    const TensorView weight(whole_.at(p.name).data(), DType::kBF16, {p.rows, p.cols});
    quantize(device, {.x = weight, .out = wanted, .out_t = wanted_t});
    const auto differs = [&](const ScaledView& got, const std::vector<std::byte>& bytes) {
      return got.scale.as<float>()[0] != scale || std::memcmp(got.data.data, bytes.data(), bytes.size()) != 0;
    };
    if (pass == ModelWeights::Pass::kForward) {
      num_wrong_ += differs(weights.quantized(device, index), codes) ? 1 : 0;
    } else {
      num_wrong_ += differs(weights.transposed(device, index), codes_t) ? 1 : 0;
    }
  }

  std::mutex mutex_;
  TensorBytes whole_;
  std::atomic<int64_t> num_wrong_ = 0;
};

// A step that finds an infinite weight on every rank, and must change nothing.
bool skips_a_step(TrainingRun& run) {
  const TensorView norm = run.model().weights().plain(run.model().parameters().final_norm);
  auto& first = norm.as<BFloat16>()[0];
  const BFloat16 kept = first;
  first = encode_bf16(INFINITY);
  const std::optional<StepReport> report = run.step();
  first = kept;
  return report && !report->applied;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : HUGE_VAL;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

}  // namespace

TEST_CASE("several ranks train as one does, at every ZeRO stage", "[engine][zero][slow]") {
  // fp32 gradients are summed in another order; with bf16 and FP8 a last bit may become a code. From codes that
  // a sample has scaled a sum may be 0 in one order and 1e-9 in another, which moves all of a group of expanded
  // states: these are compared without sampling.
  const struct {
    const char* recipe;
    double loss_bound, norm_bound;
    Storage head = Storage::kCompute;
    bool sampled_amax = false;
  } cases[] = {{"fp32", 2e-6, 2e-5},
               {"bf16", 2e-3, 2e-2},
               {"fp8_block", 4e-3, 4e-2},
               {"parka", 4e-3, 4e-2},
               {"fp8_block", 4e-3, 4e-2, Storage::kFp8},
               {"parka", 4e-3, 4e-2, Storage::kFp8},
               {"parka", 4e-3, 4e-2, Storage::kFp8, true}};
  for (const auto& c : cases) {
    const TemporaryFolder folder;
    // The smallest table of parameters there is has nothing behind the blocks.
    const bool tied = std::string(c.recipe) == "fp32";
    const char* const norm = tied ? "layernorm" : "rmsnorm";
    Config config = config_for(folder, c.recipe, 0, norm, tied);
    config.precision.head = c.head;
    config.precision.sampled_amax = c.sampled_amax;
    if (c.sampled_amax) config.optimizer.states = StateFormat::kBf16;
    const Outcome one = train(config, 1);
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (int ranks : {2, 4}) {
        CAPTURE(c.recipe, name_of(c.head), c.sampled_amax, stage, ranks);
        config.distributed.zero_stage = stage;
        const Outcome several = train(config, ranks);
        CHECK(largest_difference(several.losses, one.losses) < c.loss_bound);
        CHECK(largest_difference(several.norms, one.norms) < c.norm_bound);
        CHECK(std::abs(several.held_out - one.held_out) < c.loss_bound);
        REQUIRE(several.tensors.size() == one.tensors.size());
        for (const auto& [name, bytes] : one.tensors) {
          CAPTURE(name);
          CHECK(several.tensors.at(name).size() == bytes.size());
        }
      }
    }
  }
}

TEST_CASE("norms of queries and keys, norms behind branches, and biases train the same on one to four ranks",
          "[engine][zero][slow]") {
  const auto [recipe, bound] = GENERATE(table<const char*, double>({{"fp32", 2e-6}, {"parka", 6e-3}}));
  const auto [kind, placement] =
      GENERATE(table<QkNormKind, NormPlacement>({{QkNormKind::kPerHead, NormPlacement::kBoth},
                                                 {QkNormKind::kFull, NormPlacement::kAfter},
                                                 {QkNormKind::kNone, NormPlacement::kBefore}}));
  const TemporaryFolder folder;
  Config config = config_for(folder, recipe, 0);
  config.model.qk_norm = kind;
  config.model.norm_placement = placement;
  config.model.qkv_bias = kind == QkNormKind::kNone;
  config.training.global_batch_size = 12;
  const Outcome one = train(config, 1);
  for (int ranks : {2, 3, 4}) {
    for (int64_t stage = 1; stage <= 3; ++stage) {
      CAPTURE(recipe, name_of(kind), name_of(placement), ranks, stage);
      config.distributed.zero_stage = stage;
      const Outcome several = train(config, ranks);
      CHECK(largest_difference(several.losses, one.losses) < bound);
      CHECK(largest_difference(several.norms, one.norms) < 10 * bound);
      CHECK(several.tensors.size() == one.tensors.size());
    }
  }
}

TEST_CASE("groups of ranks with a copy each train as one rank does", "[engine][zero][slow]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    const bool exact = std::string(recipe) == "fp32";
    const double bound = exact ? 2e-6 : 4e-3;
    Config config = config_for(folder, recipe, 0);
    config.precision.sampled_amax = false;  // as above
    const Outcome one = train(config, 1);
    for (int64_t stage = 1; stage <= 3; ++stage) {
      for (int64_t shard_size : {1, 2}) {
        CAPTURE(recipe, stage, shard_size);
        config.distributed.zero_stage = stage;
        config.distributed.shard_size = shard_size;
        const Outcome several = train(config, 4);
        CHECK(largest_difference(several.losses, one.losses) < bound);
        CHECK(largest_difference(several.norms, one.norms) < 10 * bound);
        CHECK(std::abs(several.held_out - one.held_out) < bound);
        CHECK(several.tensors == train(config, 4).tensors);
      }
    }
  }
  const TemporaryFolder folder;
  Config config = config_for(folder, "fp32", 1);
  config.distributed.shard_size = 3;
  try {
    train(config, 4);
    FAIL("groups of 3 in 4 ranks");
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("shard_size = 3 does not divide the 4 ranks") != std::string::npos);
  }
}

TEST_CASE("what is divided over ranks does not change a bit, once states are", "[engine][zero][slow]") {
  for (const char* recipe : {"bf16", "coat"}) {
    for (const bool tied : {false, true}) {
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, 1, "rmsnorm", tied);
      config.training.micro_batch_size = 4;  // one micro-batch for each rank: no order of sums to choose
      const Outcome states = train(config, 2);
      const auto has_same_tensors = [&](const Outcome& other) { return other.tensors == states.tensors; };
      CHECK(has_same_tensors(train(config, 2)));
      for (int64_t stage = 2; stage <= 3; ++stage) {
        CAPTURE(recipe, tied, stage);
        config.distributed.zero_stage = stage;
        const Outcome sharded = train(config, 2);
        CHECK(sharded.losses == states.losses);
        CHECK(sharded.norms == states.norms);
        CHECK(has_same_tensors(sharded));
      }
      // Without divided states the squares of the gradients are summed in another order.
      config.distributed.zero_stage = 0;
      CHECK(largest_difference(train(config, 2).losses, states.losses) < 1e-3);
    }
  }
}

constexpr WeightCopies kKeptCopies[] = {WeightCopies::kRows, WeightCopies::kBoth, WeightCopies::kNone};

TEST_CASE("which copies of FP8 weights are kept does not change a bit of stage 3", "[engine][zero][slow]") {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
    const TemporaryFolder folder;
    Config config = config_for(folder, "parka", 3);
    config.model.num_layers = 4;
    config.precision.recompute = recompute;
    if (recompute == Recompute::kNone) config.precision.head = Storage::kFp8;
    std::vector<Outcome> outcomes;
    for (const WeightCopies copies : kKeptCopies) {
      config.precision.weight_copies = copies;
      // Four micro-batches a step on each rank, and evaluations between steps.
      outcomes.push_back(train(config, 2, [](TrainingRun& run, int step) {
        if (step % 2 == 1) run.evaluate(run.data());
      }));
      CAPTURE(name_of(recompute), name_of(copies));
      check_same(outcomes.back(), outcomes[0]);
    }
  }
}

TEST_CASE("which copies `auto` keeps: both, but of divided weights rows", "[engine][zero]") {
  const TemporaryFolder folder;
  const auto plan_of = [&](int64_t stage, int64_t ranks, WeightCopies copies) {
    Config config = config_for(folder, "coat", stage);
    REQUIRE(config.precision.weight_copies == WeightCopies::kAuto);
    config.precision.weight_copies = copies;
    return DeclaredRun(config, DeviceKind::kCpu, zero_of(config, 0, ranks)).plan.total_bytes();
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const int64_t ranks : {1, 2}) {
      CAPTURE(stage, ranks);
      const bool divided = stage == 3 && ranks == 2;
      const int64_t both = plan_of(stage, ranks, WeightCopies::kBoth),
                    rows = plan_of(stage, ranks, WeightCopies::kRows);
      CHECK(both > rows);
      CHECK(plan_of(stage, ranks, WeightCopies::kAuto) == (divided ? rows : both));
    }
  }
}

TEST_CASE("transposed codes are gathered where forward is not run again and pieces are whole rows",
          "[engine][zero]") {
  const TemporaryFolder folder;
  const auto gathers = [&](const Config& config, int64_t ranks) {
    const Zero zero = zero_of(config, 0, ranks);
    const ParameterTable table = make_parameter_table(config.model, config.optimizer.decay_embeddings).placed(zero);
    return gathers_transposed(table, Formats(config.precision),
                              kept_copies(config.precision, zero, BaseFormat::kCompute),
                              training_use(config.precision));
  };
  Config config = config_for(folder, "parka", 3);
  CHECK_FALSE(gathers(config, 2));
  config.precision.weight_copies = WeightCopies::kBoth;
  CHECK(gathers(config, 2));
  CHECK_FALSE(gathers(config, 1));
  CHECK_FALSE(gathers(config, 5));  // 48 rows
  CHECK_FALSE(gathers(config, 4));  // 80 x 48 weights are 30 groups
  for (const auto& [recipe, stage] : {std::pair("parka", 2), {"fp8_block", 3}, {"bf16", 3}}) {
    Config other = config_for(folder, recipe, stage);
    other.precision.weight_copies = WeightCopies::kBoth;
    CHECK_FALSE(gathers(other, 2));
  }
  config.precision.recompute = Recompute::kBlock;
  CHECK_FALSE(gathers(config, 2));
  config.precision.recompute = Recompute::kNone;
  config.precision.weight_copies = WeightCopies::kRows;
  CHECK_FALSE(gathers(config, 2));
}

TEST_CASE("kept activations that wait in host memory do not change a bit of any stage",
          "[engine][zero][offload][slow]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, stage);
      config.model.num_layers = 5;
      config.precision.recompute = stage % 2 == 0 ? Recompute::kNone : Recompute::kBlock;
      const auto plan_of = [](const Config& c) { return DeclaredRun(c, DeviceKind::kCpu, zero_of(c, 0, 2)).plan; };
      Config with = config;
      with.precision.offload_blocks = 3;
      CAPTURE(recipe, stage);
      check_offloaded(plan_of(with), plan_of(config), 3);
      const Outcome plain = train(config, 2);
      // Evaluates before the second step, too.
      const Outcome offloaded = train(with, 2, [](TrainingRun& run, int step) {
        if (step == 1) run.evaluate(run.data());
      });
      check_same(offloaded, plain);
    }
  }
}

TEST_CASE("masters and moments in host memory do not change a bit of any stage", "[engine][zero][offload][slow]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (const int ranks : {1, 2, 4}) {
      for (int64_t stage = 0; stage <= (ranks == 1 ? 0 : 3); ++stage) {
        CAPTURE(recipe, ranks, stage);
        const TemporaryFolder folder;
        Config config = config_for(folder, recipe, stage);
        config.reliability.state_interval = 1;
        const Outcome plain = train(config, ranks);
        config.optimizer.offload = true;
        const Outcome offloaded = train(config, ranks);
        check_same(offloaded, plain);
      }
    }
  }
}

TEST_CASE("linear weights in host memory do not change a bit of any stage", "[engine][zero][offload][slow]") {
  struct Case {
    const char* recipe;
    std::vector<WeightCopies> kept;  // none of them changes a bit of what they are compared with
  };
  struct Ranks {
    int64_t stage;
    int count;
  };
  for (const Case& c : {Case{"fp32", {WeightCopies::kAuto}}, Case{"bf16", {WeightCopies::kAuto}},
                        Case{"fp8_block", {WeightCopies::kAuto, WeightCopies::kNone}},
                        Case{"parka", {WeightCopies::kBoth, WeightCopies::kRows, WeightCopies::kNone}}}) {
    for (const Ranks& ranks : {Ranks{0, 1}, Ranks{0, 2}, Ranks{1, 4}, Ranks{2, 2}, Ranks{3, 2}, Ranks{3, 4}}) {
      const TemporaryFolder folder;
      Config config = config_for(folder, c.recipe, ranks.stage);
      config.model.num_layers = 5;  // some blocks share a buffer
      config.precision.recompute = ranks.stage == 2 ? Recompute::kBlock : Recompute::kNone;
      config.optimizer.offload = true;
      const Outcome plain = train(config, ranks.count);
      for (const WeightCopies copies : c.kept) {
        CAPTURE(c.recipe, name_of(copies), ranks.stage, ranks.count);
        Config with = config;
        with.precision.weight_copies = copies;
        with.precision.offload_weights = true;
        with.reliability.state_interval = 1;
        // Evaluates before the second step, too.
        const BeforeStep evaluate = [](TrainingRun& run, int step) {
          if (step == 1) run.evaluate(run.data());
        };
        const Outcome offloaded =
            train(with, ranks.count, evaluate, [] { return std::make_unique<DeviceWithLateCopies>(); });
        check_same(offloaded, plain);
      }
    }
  }
}

TEST_CASE("what gradients held before a step changes nothing", "[engine][zero][slow]") {
  struct Case {
    const char* recipe;
    bool tied;
    int64_t micro_batch, logits_chunk;
  };
  // Of 8 sequences a step: one micro-batch and several for each rank; the head in one piece and in several.
  const Case cases[] = {
      {"fp32", false, 1, 4096}, {"fp32", true, 1, 6}, {"parka", true, 2, 10}, {"parka", false, 2, 6}};
  // Of these only every second: at each division both recipes, and tied and untied embeddings.
  size_t number = 0;
  for (const Case& c : cases) {
    for (const auto& [stage, ranks] :
         {std::pair<int64_t, int>{0, 1}, {0, 2}, {1, 4}, {2, 4}, {2, 2}, {3, 4}, {3, 2}}) {
      if (number++ % 2 == 1) continue;
      CAPTURE(c.recipe, c.tied, c.micro_batch, c.logits_chunk, stage, ranks);
      const TemporaryFolder folder;
      Config config = config_for(folder, c.recipe, stage, "rmsnorm", c.tied);
      config.training.micro_batch_size = c.micro_batch;
      config.training.logits_chunk_tokens = c.logits_chunk;
      const Outcome plain = train(config, ranks);
      const Outcome poisoned = train(config, ranks, [](TrainingRun& run, int) { fill_gradients(run, 0xff); });
      CHECK(poisoned.losses == plain.losses);
      CHECK(poisoned.norms == plain.norms);
      CHECK((poisoned.tensors == plain.tensors));
    }
  }
}

TEST_CASE("gradients of a skipped step do not reach the next", "[engine][zero][slow]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const bool tied : {false, true}) {
      CAPTURE(stage, tied);
      const TemporaryFolder folder;
      Config config = config_for(folder, "parka", stage, "rmsnorm", tied);
      config.training.non_finite = NonFinitePolicy::kSkip;
      const auto after_skipped_step = [&](bool cleared) {
        return train(config, 2, [cleared](TrainingRun& run, int step) {
          if (step != 1) return;
          PARKA_REQUIRE(skips_a_step(run));  // Catch2's own are not for several threads
          if (cleared) fill_gradients(run, 0);
        });
      };
      const Outcome left = after_skipped_step(false), cleared = after_skipped_step(true);
      CHECK(left.losses == cleared.losses);
      CHECK((left.tensors == cleared.tensors));
    }
  }
}

TEST_CASE("FP8 copies are of the weights as they are, whatever has changed these", "[engine][zero][slow]") {
  struct Ranks {
    int count;
    int64_t shard_size;
  };
  for (const WeightCopies copies : kKeptCopies) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (const Ranks& ranks : {Ranks{1, 0}, Ranks{2, 0}, Ranks{4, 2}}) {
        CAPTURE(name_of(copies), stage, ranks.count);
        const TemporaryFolder folder;
        Config config = config_for(folder, "parka", stage);
        config.precision.weight_copies = copies;
        config.distributed.shard_size = stage == 0 ? 0 : ranks.shard_size;
        config.training.non_finite = NonFinitePolicy::kSkip;
        CopyCheck copy_check;
        std::atomic<int> num_unexpected = 0;
        using Check = std::function<void(bool as_expected)>;
        const auto on_ranks = [&](const std::function<void(TrainingRun&, Communicator&, const Check&)>& body) {
          ThreadRanks(ranks.count).run([&](Communicator& communicator) {
            const auto device = make_cpu_device();
            TrainingRun run(config, *device, communicator);
            for (int block = 1; block <= 3; ++block) {
              const bool gathers_transposed = ranks.count > 1 && stage == 3 && copies == WeightCopies::kBoth;
              num_unexpected += run.model().weights().has_pieces_for_backward(block) != gathers_transposed;
            }
            body(run, communicator, [&](bool as_expected) {
              num_unexpected += as_expected ? 0 : 1;
              copy_check.check(run, *device, communicator);
            });
          });
        };
        on_ranks([&](TrainingRun& run, Communicator& communicator, const Check& check) {
          run.initialize();
          check(true);
          for (int i = 0; i < 2; ++i) check(run.step()->applied);
          check(skips_a_step(run));
          check(run.step()->applied);
          save_checkpoint(config.checkpoint.folder, run.snapshot(),
                          {.group = {communicator.rank(), communicator.size(), "saved"}});
        });
        on_ranks([&](TrainingRun& run, Communicator&, const Check& check) {
          run.restore(load_checkpoint(list_checkpoints(config.checkpoint.folder).front().path));
          check(run.completed_steps() == 4);
          check(run.step()->applied);
        });
        CHECK(num_unexpected == 0);
        CHECK(copy_check.num_wrong() == 0);
      }
    }
  }
}
