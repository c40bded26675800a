// Frozen weights that are stored as codes (finetune.base): beside adapters they are what the decoded weights are.
#include <cmath>
#include <span>

#include "core/philox.h"
#include "model/coded_weights.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape = {2, 32};

// Widths that blocks of 64 elements do not divide.
ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 80;
  config.d_model = 48;
  config.num_layers = 2;
  config.num_heads = 3;
  config.num_kv_heads = 1;
  config.d_ffn = 80;
  config.norm = NormKind::kRmsNorm;
  return config;
}

// A dense block, and one with experts.
ModelConfig with_experts() {
  ModelConfig config = small_config();
  config.moe = {.num_experts = 4, .experts_per_token = 2, .shared_width = 48, .dense_layers = 1, .dense_width = 80};
  return config;
}

const LoraRules kRules = {4, 2, {"q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}};

// Of experts too, where they can have adapters.
LoraRules rules_of(const ModelConfig& config, const PrecisionConfig& precision) {
  LoraRules rules = kRules;
  if (config.moe.exists() && precision.gemm == GemmPrecision::kCompute) {
    rules.targets.insert(rules.targets.end(), {"experts.gate_proj", "experts.up_proj", "experts.down_proj"});
  }
  return rules;
}

struct AdaptedModel {
  AdaptedModel(const PrecisionConfig& precision_, BaseFormat base_, Device& on,
               const ModelConfig& config_ = small_config())
      : config(config_),
        precision(precision_),
        base(base_),
        device(on),
        model(config, precision, false, kShape, 1 << 20, Model::Use::kTraining, {}, plan,
              {.lora = rules_of(config, precision), .base = base}) {
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : model.parameters().all) {
      ids.push_back(p.trainable ? plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}) : TensorId{});
    }
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    model.bind(device, *arena);
    for (const TensorId id : ids) gradients.push_back(id.valid() ? (*arena)[id] : TensorView());
  }

  // Random weights, adapters that are not zero. `change` replaces those of blocks' linear layers.
  template <typename Change>
  void load(const Change& change) {
    const ParameterTable& table = model.parameters();
    for (size_t i = 0; i < table.all.size(); ++i) {
      const ParameterInfo& p = table.all[i];
      std::vector<float> values = initial_weight(config, table, i, 1);
      if (p.role == ParameterRole::kAdapterOut) {
        for (size_t k = 0; k < values.size(); ++k) {
          values[k] = static_cast<float>(0.05 * philox_normal2(7, i, k)[0]);
        }
      }
      if (p.is_of_block()) values = change(p, values);
      if (!p.is_coded()) {
        upload_weight(device, model.weights().own()[i], values);
        continue;
      }
      // In two parts.
      const std::span<const float> all(values);
      const size_t half = values.size() / 3;
      model.weights().stage_coded(device, static_cast<int>(i), all.first(half), 0);
      model.weights().stage_coded(device, static_cast<int>(i), all.subspan(half), static_cast<int64_t>(half));
      model.weights().encode(device, static_cast<int>(i));
    }
    model.weights_changed(device);
  }
  void load() {
    load([](const ParameterInfo&, const std::vector<float>& values) { return values; });
  }
  // With the values of those in another format in the place of blocks' linear weights.
  void load_decoded(BaseFormat format) {
    load([&](const ParameterInfo& p, const std::vector<float>& values) {
      return coded_values(p, format, precision, values);
    });
  }

  std::vector<float> logits() {
    return model.logits(device, {tokens.data(), targets.data(), kShape}, 0, kShape.num_tokens());
  }
  // Losses and all gradients.
  std::vector<float> backward() {
    model.accumulate_gradients(device, {tokens.data(), targets.data(), kShape}, {.grad_scale = 1.0f / 62},
                               gradients, Model::Accumulation::kBegin);
    std::vector<float> all = model.losses(device);
    for (const TensorView& gradient : gradients) {
      if (gradient.empty()) continue;
      std::vector<float> values(static_cast<size_t>(gradient.numel()));
      device.copy_to_host(values.data(), gradient.as<float>(), gradient.bytes());
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  std::vector<std::byte> code_bytes() const {
    std::vector<std::byte> all;
    const std::vector<ParameterInfo>& parameters = model.parameters().all;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].is_coded()) continue;
      for (const CodeTensor& codes : model.weights().code_tensors(static_cast<int>(i))) {
        const size_t begin = all.size();
        all.resize(begin + static_cast<size_t>(codes.view.bytes()));
        device.copy_to_host(all.data() + begin, codes.view.data, codes.view.bytes());
      }
    }
    return all;
  }

  ModelConfig config;
  PrecisionConfig precision;
  BaseFormat base;
  Device& device;
  MemoryPlan plan;
  Model model;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> gradients;
  std::vector<int32_t> tokens = random_tokens(kShape.num_tokens(), 80, 3),
                       targets = next_token_targets(tokens, kShape.sequence_length);
};

int64_t bytes_of(const MemoryPlan& plan, const std::string& category) {
  for (const MemoryPlan::CategoryTotal& total : plan.summary()) {
    if (total.category == category) return total.bytes;
  }
  return 0;
}

}  // namespace

TEST_CASE("a base in 4 bits is the model of its decoded weights, to the bit", "[model][coded]") {
  const auto check = [](Device& device, const ModelConfig& config, Recipe recipe, BaseFormat base,
                        Recompute recompute) {
    CAPTURE(device.name(), config.moe.exists(), name_of(recipe), static_cast<int>(base), name_of(recompute));
    PrecisionConfig precision = precision_recipe(recipe);
    precision.recompute = recompute;
    AdaptedModel coded(precision, base, device, config), plain(precision, BaseFormat::kCompute, device, config),
        exact(precision, BaseFormat::kCompute, device, config);
    coded.load();
    plain.load_decoded(base);
    exact.load();
    const std::vector<std::byte> before = coded.code_bytes();
    CHECK(coded.logits() == plain.logits());
    CHECK(coded.logits() != exact.logits());
    CHECK(coded.backward() == plain.backward());
    CHECK(coded.backward() == plain.backward());  // replayed, where a device records
    CHECK((coded.code_bytes() == before));
  };
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kFp32, Recipe::kBf16, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
      for (const BaseFormat base : {BaseFormat::kNf4, BaseFormat::kFp4}) {
        for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
          check(*device, small_config(), recipe, base, recompute);
          if (recipe != Recipe::kFp8Block) check(*device, with_experts(), recipe, base, recompute);
        }
      }
    }
  }
}

TEST_CASE("a base in FP8 is what FP8 GEMMs read of any base", "[model][coded]") {
  const auto check = [](Device& device, const ModelConfig& config, Recipe recipe, WeightCopies copies,
                        EvalNumerics eval) {
    CAPTURE(device.name(), config.moe.exists(), name_of(recipe), name_of(copies), name_of(eval));
    PrecisionConfig precision = precision_recipe(recipe);
    precision.weight_copies = copies;
    precision.eval = eval;
    AdaptedModel coded(precision, BaseFormat::kFp8, device, config),
        plain(precision, BaseFormat::kCompute, device, config);
    coded.load();
    plain.load();
    CHECK(coded.backward() == plain.backward());
    const std::vector<std::byte> before = coded.code_bytes();
    if (eval == EvalNumerics::kBf16) plain.load_decoded(BaseFormat::kFp8);
    CHECK(coded.logits() == plain.logits());
    CHECK((coded.code_bytes() == before));
  };
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
      for (const WeightCopies copies : {WeightCopies::kAuto, WeightCopies::kBoth, WeightCopies::kRows}) {
        for (const EvalNumerics eval : {EvalNumerics::kSame, EvalNumerics::kBf16}) {
          if (recipe != Recipe::kFp8Block) check(*device, with_experts(), recipe, copies, eval);
          if (recipe == Recipe::kFp8Block && copies == WeightCopies::kRows) continue;  // refused
          check(*device, small_config(), recipe, copies, eval);
        }
      }
    }
  }
}

TEST_CASE("each matrix of an expert has the codes that it has alone", "[model][coded]") {
  const ParameterTable table = make_parameter_table(with_experts(), false);
  for (const char* name : {"blocks.1.experts.up_gate", "blocks.1.experts.down"}) {
    const auto i = static_cast<size_t>(table.index_of(name));
    const ParameterInfo& p = table.all[i];
    const std::vector<float> values = initial_weight(with_experts(), table, i, 5);
    const auto check = [&](BaseFormat base, Recipe recipe, int64_t rows) {
      CAPTURE(name, static_cast<int>(base));
      ParameterInfo one = p;
      one.rows = rows;
      one.role = ParameterRole::kLinear;
      one.num_stacked = 1;
      const PrecisionConfig precision = precision_recipe(recipe);
      const std::vector<float> decoded = coded_values(p, base, precision, values);
      std::vector<float> alone;
      for (int64_t first = 0; first < p.numel(); first += one.numel()) {
        const std::vector<float> of_one =
            coded_values(one, base, precision,
                         std::span(values).subspan(static_cast<size_t>(first), static_cast<size_t>(one.numel())));
        alone.insert(alone.end(), of_one.begin(), of_one.end());
      }
      CHECK(decoded == alone);
    };
    check(BaseFormat::kNf4, Recipe::kBf16, p.fused_rows.front());
    check(BaseFormat::kFp4, Recipe::kFp32, p.fused_rows.front());
    check(BaseFormat::kFp8, Recipe::kParka, p.rows / p.num_stacked);
  }
}

TEST_CASE("codes are all that is stored of a coded base", "[model][coded]") {
  Device& device = *devices().front();
  const PrecisionConfig bf16 = precision_recipe(Recipe::kBf16), parka = precision_recipe(Recipe::kParka);
  const auto aligned = [](int64_t bytes) {
    return ceil_div(bytes, MemoryPlan::kAlignment) * MemoryPlan::kAlignment;
  };
  for (const ModelConfig& config : {small_config(), with_experts()}) {
    CAPTURE(config.moe.exists());
    const AdaptedModel plain(bf16, BaseFormat::kCompute, device, config),
        nf4(bf16, BaseFormat::kNf4, device, config), fp8(parka, BaseFormat::kFp8, device, config),
        copies(parka, BaseFormat::kCompute, device, config);
    int64_t linear = 0, codes = 0;
    for (const ParameterInfo& p : nf4.model.parameters().all) {
      CHECK(p.is_coded() == p.is_of_block());
      if (!p.is_coded()) continue;
      const auto matrices = static_cast<int64_t>(p.role == ParameterRole::kExperts ? p.fused_rows.size() : 1);
      const int64_t blocks = ceil_div(p.numel(), int64_t{64});
      linear += aligned(2 * p.numel());
      codes += aligned(ceil_div(p.numel(), int64_t{2})) + aligned(blocks) +
               aligned(4 * matrices * ceil_div(blocks / matrices, int64_t{256})) + aligned(4 * matrices);
    }
    CHECK(bytes_of(nf4.plan, "coded weights") == codes + aligned(4 * 256));
    CHECK(bytes_of(nf4.plan, "weights") == bytes_of(plain.plan, "weights") - linear);
    CHECK(bytes_of(fp8.plan, "weights") == bytes_of(copies.plan, "weights") - linear);
    CHECK(bytes_of(fp8.plan, "coded weights") == 0);
    CHECK(bytes_of(fp8.plan, "fp8 weights") < bytes_of(copies.plan, "fp8 weights"));  // no transposed ones
  }
}

TEST_CASE("values of a coded weight are near those it was made of", "[model][coded]") {
  const ParameterTable table = make_parameter_table(small_config(), false);
  const auto i = static_cast<size_t>(table.index_of("blocks.1.up_gate"));
  const std::vector<float> values = initial_weight(small_config(), table, i, 5);
  // Of normal numbers in blocks of 64, bitsandbytes' formats lose about 0.09 and 0.12 of their norm.
  for (const auto& [base, recipe, low, high] : {std::tuple(BaseFormat::kNf4, Recipe::kFp32, 0.06, 0.12),
                                                {BaseFormat::kFp4, Recipe::kFp32, 0.08, 0.16},
                                                {BaseFormat::kNf4, Recipe::kBf16, 0.06, 0.12},
                                                {BaseFormat::kFp8, Recipe::kParka, 0.01, 0.04},
                                                {BaseFormat::kFp8, Recipe::kFp8Block, 0.01, 0.04}}) {
    CAPTURE(static_cast<int>(base), name_of(recipe));
    const std::vector<float> decoded = coded_values(table.all[i], base, precision_recipe(recipe), values);
    const double error = relative_error(decoded, values);
    CHECK(error > low);
    CHECK(error < high);
  }
}
