// Blocks whose kept activations wait for backward in host memory, against the same model with all on the device.
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/device_with_late_copies.h"
#include "tests/support/offload_plan.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kLayers = 5;
constexpr BatchShape kShape{2, 24}, kSmaller{1, 16};

ModelConfig small_config(NormKind norm, bool tied) {
  return {.vocab_size = 61,
          .d_model = 64,
          .num_layers = kLayers,
          .num_heads = 2,
          .num_kv_heads = 1,
          .given_head_dim = 64,
          .d_ffn = 48,
          .norm = norm,
          .tie_embeddings = tied};
}

BatchShape with_documents(BatchShape shape, bool documents) {
  shape.separate_documents = documents;
  return shape;
}

// Documents, if there are any, of seven tokens.
struct HostBatch {
  HostBatch(const BatchShape& shape_of_all, uint64_t seed)
      : shape(shape_of_all),
        tokens(random_tokens(shape.num_tokens(), 61, seed)),
        targets(next_token_targets(tokens, shape.sequence_length)) {
    for (int64_t t = 0; t < shape.num_tokens() && shape.separate_documents; ++t) {
      first_keys.push_back(static_cast<int32_t>(t % shape.sequence_length / 7 * 7));
    }
  }
  Model::Batch batch() const {
    return {tokens.data(), targets.data(), shape, first_keys.empty() ? nullptr : first_keys.data()};
  }

  BatchShape shape;
  std::vector<int32_t> tokens, targets, first_keys;
};

// Losses and gradients while micro-batches and evaluations of two shapes take turns. What is not read is not waited
// for either: work of the next may begin while there is still some of the last.
std::vector<std::vector<float>> results_of(SmallModel& m, bool documents) {
  const HostBatch first(with_documents(kShape, documents), 1), second(first.shape, 2),
      smaller(with_documents(kSmaller, documents), 3);
  std::vector<std::vector<float>> results;
  const auto train = [&](const HostBatch& host, Model::Accumulation accumulation) {
    m.model.accumulate_gradients(*m.device, host.batch(), {.grad_scale = 0.01f, .z_loss = 1e-4f}, m.gradients,
                                 accumulation);
  };
  const auto read = [&] {
    results.push_back(m.model.losses(*m.device));
    results.push_back(m.all_gradients());
  };
  // A GPU runs the work as it is, then records and replays it, then replays it.
  const int num_rounds = m.device->kind() == DeviceKind::kCpu ? 1 : 3;
  for (int i = 0; i < num_rounds; ++i) {
    train(first, Model::Accumulation::kBegin);
    m.model.evaluate(*m.device, smaller.batch());
    train(second, Model::Accumulation::kContinue);
    m.model.evaluate(*m.device, first.batch());
    read();
  }
  train(smaller, Model::Accumulation::kBegin);
  train(second, Model::Accumulation::kContinue);
  read();
  return results;
}

using parka::test::same_bits;
bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return same_bits(x, y); });
}

}  // namespace

TEST_CASE("blocks that wait in host memory give the same bits from less memory of the device",
          "[model][offload][slow]") {
  const auto [norm, placement, tied, documents, eval] =
      GENERATE(table<NormKind, NormPlacement, bool, bool, EvalNumerics>({
          {NormKind::kLayerNorm, NormPlacement::kBefore, true, false, EvalNumerics::kSame},
          {NormKind::kRmsNorm, NormPlacement::kBefore, false, true, EvalNumerics::kBf16},
          {NormKind::kRmsNorm, NormPlacement::kAfter, false, false, EvalNumerics::kBf16},
          {NormKind::kRmsNorm, NormPlacement::kBoth, true, false, EvalNumerics::kSame},
      }));
  ModelConfig config = small_config(norm, tied);
  config.norm_placement = placement;
  const BatchShape shape = with_documents(kShape, documents);
  DeviceWithLateCopies late;
  std::vector<Device*> all = devices();
  all.push_back(&late);
  for (const auto& [recipe, name] : EnumNames<Recipe>::kAll) {
    for (Device* device : all) {
      std::vector<std::vector<float>> wanted;
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        PrecisionConfig precision = precision_recipe(recipe);
        precision.recompute = recompute;
        if (precision.compute == DType::kBF16) precision.eval = eval;
        SmallModel plain(config, precision, shape, 1 << 20, *device);
        if (wanted.empty()) {  // recomputing is known to change nothing
          plain.initialize(config, 1);
          wanted = results_of(plain, documents);
        }
        for (const int64_t blocks : {1, 2, 3}) {
          CAPTURE(name_of(norm), name_of(placement), name, device->name(), name_of(recompute), blocks);
          precision.offload_blocks = blocks;
          SmallModel offloaded(config, precision, shape, 1 << 20, *device);
          offloaded.initialize(config, 1);
          CHECK(same_bits(results_of(offloaded, documents), wanted));
          check_offloaded(offloaded.plan, plain.plan, blocks);
        }
      }
    }
  }
}

TEST_CASE("a model that is not trained has nothing to offload", "[model][offload]") {
  const ModelConfig config = small_config(NormKind::kRmsNorm, true);
  const auto declared = [&](int64_t blocks) {
    PrecisionConfig precision = precision_recipe(Recipe::kParka);
    precision.offload_blocks = blocks;
    MemoryPlan plan;
    const Model model(config, precision, false, kShape, 1 << 20, Model::Use::kInference, {}, plan);
    return declared_bytes(plan);
  };
  CHECK(declared(kLayers - 2) == declared(0));
}
