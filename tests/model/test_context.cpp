// Sequences that several ranks share, against the same sequences on one rank.
#include <vector>

#include "data/batch_loader.h"
#include "engine/step/parameter_exchange.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequences = 2, kLength = 48;

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 61;
  config.d_model = 64;
  config.num_layers = 2;
  config.num_heads = 8;
  config.num_kv_heads = 4;
  config.d_ffn = 96;
  config.norm = NormKind::kRmsNorm;
  return config;
}

// The batch of all ranks. Documents end at odd places, within slices and across them.
struct WholeBatch {
  std::vector<int32_t> tokens = random_tokens(kSequences * kLength, 61, 5);
  std::vector<int32_t> targets = next_token_targets(tokens, kLength);
  std::vector<int32_t> first_keys;

  explicit WholeBatch(bool separate) {
    if (!separate) return;
    for (int64_t t = 0; t < kSequences * kLength; ++t) {
      const int64_t position = t % kLength;
      first_keys.push_back(position < 7 ? 0 : position < 30 ? 7 : position < 31 ? 30 : 31);
    }
  }
};

struct Result {
  std::vector<float> losses, gradients;  // of all tokens; summed over ranks
};

Result run_one(const ModelConfig& config, const PrecisionConfig& precision, const WholeBatch& batch) {
  const BatchShape shape{kSequences, kLength, !batch.first_keys.empty()};
  SmallModel m(config, precision, shape, 20, cpu_device());
  m.initialize(config, 3);
  m.model.accumulate_gradients(*m.device,
                               {batch.tokens.data(), batch.targets.data(), shape,
                                batch.first_keys.empty() ? nullptr : batch.first_keys.data()},
                               {.grad_scale = 0.01f}, m.gradients, Model::Accumulation::kBegin);
  return {m.model.losses(*m.device), m.all_gradients()};
}

Result run_shared(const ModelConfig& config, const PrecisionConfig& precision, const WholeBatch& batch, int ranks,
                  bool evaluates = false) {
  const int64_t length = kLength / ranks;
  Result result{std::vector<float>(batch.tokens.size()), {}};
  std::vector<std::vector<float>> gradients(static_cast<size_t>(ranks));
  ThreadRanks(ranks).run([&](Communicator& communicator) {
    communicator.divide({communicator.rank(), ranks, 1, ranks});
    GroupExchange exchange(communicator, Peers::kContext, "exchanged sequences");
    BatchShape shape{kSequences, length, !batch.first_keys.empty()};
    shape.context_size = ranks;
    const auto device = make_cpu_device();
    SmallModel m(config, precision, shape, 20, *device);
    m.model.set_context(&exchange);
    m.initialize(config, 3);
    const std::vector<int32_t> tokens = slices_of(batch.tokens, kLength, communicator.rank(), ranks),
                               targets = slices_of(batch.targets, kLength, communicator.rank(), ranks);
    const Model::Batch own = {tokens.data(), targets.data(), shape,
                              batch.first_keys.empty() ? nullptr : batch.first_keys.data()};
    if (evaluates) {
      m.model.evaluate(*device, own);
    } else {
      m.model.accumulate_gradients(*device, own, {.grad_scale = 0.01f}, m.gradients, Model::Accumulation::kBegin);
    }
    const std::vector<float> losses = m.model.losses(*device);
    if (!evaluates) gradients[static_cast<size_t>(communicator.rank())] = m.all_gradients();
    for (int64_t t = 0; t < kSequences * length; ++t) {
      const int64_t position = communicator.rank() * length + t % length;
      result.losses[static_cast<size_t>(t / length * kLength + position)] = losses[static_cast<size_t>(t)];
    }
  });
  result.gradients = gradients[0];
  for (size_t rank = 1; rank < gradients.size(); ++rank) {
    for (size_t i = 0; i < gradients[rank].size(); ++i) result.gradients[i] += gradients[rank][i];
  }
  return result;
}

struct Case {
  const char* name;
  void (*change)(ModelConfig& model);
  bool separate = false;
};

const Case kCases[] = {
    {"plain", [](ModelConfig&) {}},
    {"documents", [](ModelConfig&) {}, true},
    {"a window", [](ModelConfig& m) { m.sliding_window = 10; }},
    {"a window in documents", [](ModelConfig& m) { m.sliding_window = 10; }, true},
    {"norms of heads", [](ModelConfig& m) { m.qk_norm = QkNormKind::kPerHead; }},
    {"norms over heads, and documents", [](ModelConfig& m) { m.qk_norm = QkNormKind::kFull; }, true},
    {"as many key heads", [](ModelConfig& m) { m.num_kv_heads = 0; }},
    {"biases", [](ModelConfig& m) { m.qkv_bias = true; }},
};

}  // namespace

// In fp32 only sums over tokens change their order: by a few units of the last place of fp32, 6e-8, in each of the
// layers that they go through. A token whose keys, angles or place are wrong changes a gradient by more than a
// percent.
TEST_CASE("ranks that share sequences have the losses and the gradients of one rank", "[model][context]") {
  for (const Case& c : kCases) {
    ModelConfig config = small_config();
    c.change(config);
    const WholeBatch batch(c.separate);
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      PrecisionConfig precision = precision_recipe(Recipe::kFp32);
      precision.recompute = recompute;
      const Result one = run_one(config, precision, batch);
      for (const int ranks : {2, 4}) {
        CAPTURE(c.name, name_of(recompute), ranks);
        const Result shared = run_shared(config, precision, batch, ranks);
        CHECK(relative_error(shared.losses, one.losses) < 1e-6);
        CHECK(relative_error(shared.gradients, one.gradients) < 2e-6);
        CHECK((run_shared(config, precision, batch, ranks).gradients == shared.gradients));
      }
    }
  }
}

// A slice's tensors have FP8 scales of their own, as those of a micro-batch have, so bits differ. What must not is
// how far the numbers are from those in fp32: a recipe's error may not grow by more than half when ranks share
// sequences.
TEST_CASE("ranks that share sequences train with every recipe", "[model][context]") {
  const Recipe recipe =
      GENERATE(Recipe::kBf16, Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka);
  for (const Case& c : kCases) {
    ModelConfig config = small_config();
    c.change(config);
    const WholeBatch batch(c.separate);
    PrecisionConfig precision = precision_recipe(recipe);
    const Result exact = run_one(config, precision_recipe(Recipe::kFp32), batch),
                 one = run_one(config, precision, batch);
    for (const int ranks : {2, 4}) {
      CAPTURE(name_of(recipe), c.name, ranks);
      precision.recompute = Recompute::kNone;
      const Result shared = run_shared(config, precision, batch, ranks);
      CHECK(relative_error(shared.losses, exact.losses) < 1.5 * relative_error(one.losses, exact.losses));
      CHECK(relative_error(shared.gradients, exact.gradients) <
            1.5 * relative_error(one.gradients, exact.gradients));
      precision.recompute = Recompute::kBlock;
      CHECK((run_shared(config, precision, batch, ranks).gradients == shared.gradients));
    }
  }
}

TEST_CASE("an evaluation of shared sequences has the losses of one rank", "[model][context]") {
  const ModelConfig config = small_config();
  for (const bool separate : {false, true}) {
    const WholeBatch batch(separate);
    const PrecisionConfig precision = precision_recipe(Recipe::kFp32);
    const Result one = run_one(config, precision, batch);
    CHECK(relative_error(run_shared(config, precision, batch, 2, /*evaluates=*/true).losses, one.losses) < 1e-6);
  }
}

TEST_CASE("a batch of other slices than the model's, or without the ranks, is refused", "[model][context]") {
  const ModelConfig config = small_config();
  const WholeBatch batch(false);
  BatchShape shape{kSequences, kLength / 2};
  shape.context_size = 2;
  const PrecisionConfig precision = precision_recipe(Recipe::kFp32);
  SmallModel m(config, precision, shape, 20, cpu_device());
  m.initialize(config, 3);
  CHECK_THROWS_AS(m.model.evaluate(*m.device, {batch.tokens.data(), batch.targets.data(), shape}), Error);
  shape.context_size = 1;
  CHECK_THROWS_AS(m.model.evaluate(*m.device, {batch.tokens.data(), batch.targets.data(), shape}), Error);
}
