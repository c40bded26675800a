#include <cmath>

#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

// Loss and gradients of whole models on a GPU against the CPU; without a GPU there is nothing to compare.
namespace {

constexpr BatchShape kShape{3, 200};  // no multiple of any tile

ModelConfig config_of(NormKind norm, int64_t heads, int64_t kv_heads) {
  ModelConfig config;
  config.vocab_size = 1000;
  config.d_model = 512;
  config.num_layers = 3;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.d_ffn = 1368;
  config.norm = norm;
  config.tie_embeddings = norm == NormKind::kLayerNorm;
  return config;
}

struct Result {
  std::vector<float> losses;
  std::vector<std::vector<float>> gradients;
};

Result run(const ModelConfig& config, Recipe recipe, Device& device) {
  SmallModel m(config, precision_recipe(recipe), kShape, /*logits_chunk=*/256, device);
  m.initialize(config, 11);
  std::vector<int32_t> tokens(static_cast<size_t>(kShape.num_tokens())), targets(tokens);
  for (size_t t = 0; t < tokens.size(); ++t) {
    tokens[t] = static_cast<int32_t>(philox4x32(5, 1, t)[0] % 1000);
    targets[t] = t % 7 == 0 ? kIgnoreTarget : static_cast<int32_t>(philox4x32(5, 2, t)[0] % 1000);
  }
  Result result;
  // A GPU runs the work as it is, then records and replays it, then replays it.
  for (int i = 0; i < 3; ++i) {
    m.zero_gradients();
    m.model.accumulate_gradients(device, {tokens.data(), targets.data(), kShape},
                                 {.grad_scale = 0.01f, .z_loss = 1e-4f}, m.gradients);
    Result again{m.model.losses(device), {}};
    for (size_t p = 0; p < m.gradients.size(); ++p) again.gradients.push_back(m.gradient(p));
    if (i > 0) CHECK((again.losses == result.losses && again.gradients == result.gradients));
    result = std::move(again);
  }
  return result;
}

double distance(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("a GPU's loss and gradients of a whole model are those of the CPU", "[model][devices]") {
  if (gpu() == nullptr) return;
  const auto [norm, heads, kv_heads] = GENERATE(table<NormKind, int64_t, int64_t>({
      {NormKind::kLayerNorm, 4, 0},  // head dim 128
      {NormKind::kRmsNorm, 8, 2},    // 64, grouped
      {NormKind::kRmsNorm, 16, 0},   // 32: not one that tensor cores are used for
  }));
  const ModelConfig config = config_of(norm, heads, kv_heads);
  const Result exact = run(config, Recipe::kFp32, cpu_device());
  const Result fp32 = run(config, Recipe::kFp32, *gpu());
  const Result cpu_bf16 = run(config, Recipe::kBf16, cpu_device()), gpu_bf16 = run(config, Recipe::kBf16, *gpu());
  CAPTURE(name_of(norm), heads, kv_heads);
  CHECK(distance(fp32.losses, exact.losses) < 1e-6);
  CHECK(distance(gpu_bf16.losses, exact.losses) < 2e-3);
  for (size_t p = 0; p < exact.gradients.size(); ++p) {
    CAPTURE(p);
    CHECK(distance(fp32.gradients[p], exact.gradients[p]) < 1e-5);
    // No further from the exact gradient than the CPU's bf16 is, give or take.
    const double of_cpu = distance(cpu_bf16.gradients[p], exact.gradients[p]);
    CHECK(distance(gpu_bf16.gradients[p], exact.gradients[p]) < 1.5 * of_cpu + 1e-3);
  }
}
