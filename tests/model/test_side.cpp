// Side networks (finetune.method = qst): logits and gradients against plain torch
// (tests/fixtures/make_side_fixture.py made the file), where they begin, and what they keep.
#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "model/side/side_network.h"
#include "tests/model/trained_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Variant {
  const char* name;
  Downsampling downsample;
  SideMix mix;
};
constexpr Variant kVariants[] = {{"linear.paper", Downsampling::kLinear, SideMix::kPaper},
                                 {"lora.additive", Downsampling::kLora, SideMix::kAdditive},
                                 {"adapter.paper", Downsampling::kAdapter, SideMix::kPaper},
                                 {"adapter.additive", Downsampling::kAdapter, SideMix::kAdditive},
                                 {"max_pool.additive", Downsampling::kMaxPool, SideMix::kAdditive},
                                 {"avg_pool.paper", Downsampling::kAveragePool, SideMix::kPaper}};

// As the script has them.
SideRules fixture_rules(const Variant& variant) {
  return {.reduction = 4, .downsample = variant.downsample, .rank = 3, .head_dim = 4, .mix = variant.mix};
}

struct SideModel : TrainedModel {
  SideModel(const ModelConfig& config, const PrecisionConfig& precision, const BatchShape& shape, Device& on,
            const SideRules& rules, int64_t logits_chunk = 1 << 20, BaseFormat base = BaseFormat::kCompute)
      : TrainedModel(config, precision, shape, on, {.base = base, .side = rules}, logits_chunk) {}

  void load(const Fixture& base, const Fixture* side) { TrainedModel::load(base, side, is_of_side); }
  double worst_error(const Fixture& side, const std::string& variant, double factor = 1) const {
    return TrainedModel::worst_error(side, "grad/" + variant + "/", factor);
  }
};

// Bytes of the plan's entries whose category and name are such.
int64_t planned_bytes(const MemoryPlan& plan, std::string_view category, std::string_view part) {
  int64_t bytes = 0;
  for (const MemoryPlan::Entry& entry : plan.entries()) {
    if (entry.category != category || entry.name.find(part) == std::string::npos) continue;
    int64_t numel = 1;
    for (const int64_t extent : entry.shape) numel *= extent;
    bytes += numel * size_of(entry.dtype);
  }
  return bytes;
}

}  // namespace

TEST_CASE("fp32 logits, loss and gradients of side networks equal torch's", "[model][side]") {
  const Fixture base = load_fixture("llama_gqa"), side = load_fixture("side");
  for (Device* device : devices()) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      for (const Variant& variant : kVariants) {
        CAPTURE(device->name(), name_of(recompute), variant.name);
        PrecisionConfig precision = precision_recipe(Recipe::kFp32);
        precision.recompute = recompute;
        SideModel m(base.config, precision, base.shape, *device, fixture_rules(variant), /*logits_chunk=*/7);
        m.load(base, &side);
        const std::string name = variant.name;
        CHECK(relative_error(m.logits(side), side.tensors.at("logits/" + name)) < 1e-5);
        CHECK(std::abs(m.backward(side) - side.tensors.at("loss/" + name)[0]) < 1e-5);
        CHECK(m.worst_error(side, name) < 1e-4);
        m.backward(side, Model::Accumulation::kContinue);
        CHECK(m.worst_error(side, name, 2) < 1e-4);
        int64_t num_gradients = 0, num_trained = 0;
        for (const auto& [key, unused] : side.tensors) num_gradients += key.starts_with("grad/" + name + "/");
        for (const ParameterInfo& p : m.model.parameters().all) num_trained += p.trainable;
        CHECK(num_gradients == num_trained);
      }
    }
  }
}

TEST_CASE("gradients of side networks in bf16, with FP8 kept and beside FP8 layers stay near those in fp32",
          "[model][side]") {
  ModelConfig config;
  config.vocab_size = 80;
  config.d_model = 64;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.d_ffn = 96;
  config.norm = NormKind::kRmsNorm;
  Fixture random{config, {2, 32}, random_tokens(64, 80, 3), {}};
  for (const Variant& variant : kVariants) {
    SideRules rules = fixture_rules(variant);
    rules.rank = 8;  // with fewer some tokens' downsamples are nearly 0, and gradients through their norm large
    const ParameterTable table = make_parameter_table(config, false, {.side = rules});
    for (size_t i = 0; i < table.all.size(); ++i) {
      const std::string& name = table.all[i].name;
      std::vector<float>& values = random.tensors["weight/" + name] = initial_weight(config, table, i, 1);
      if (name == "side.mix") values = {0.75f};
      if (name != "side.up") continue;
      for (size_t k = 0; k < values.size(); ++k) values[k] = static_cast<float>(0.1 * philox_normal2(7, i, k)[0]);
    }
    // Gates and `mix` have one number, a sum of many of either sign: an error of all others, relative to them, can
    // be any of it.
    const auto gradients = [&](const PrecisionConfig& precision, Device& device) {
      SideModel m(config, precision, random.shape, device, rules);
      m.load(random, &random);
      m.backward(random);
      std::vector<float> all;
      for (size_t i = 0; i < table.all.size(); ++i) {
        if (!table.all[i].trainable || table.all[i].numel() == 1) continue;
        const std::vector<float> one = m.gradient(i);
        all.insert(all.end(), one.begin(), one.end());
      }
      return all;
    };
    const auto exact = gradients(precision_recipe(Recipe::kFp32), *devices().front());
    const auto error = [&](const PrecisionConfig& precision, Device& device) {
      return relative_error(gradients(precision, device), exact);
    };
    for (Device* device : devices()) {
      CAPTURE(device->name(), variant.name);
      // About twice what was seen. FP8 layers change what the side network reads, by some per cent.
      const double of_bf16 = error(precision_recipe(Recipe::kBf16), *device);
      CHECK(of_bf16 < 0.05);
      for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kParka}) {
        CAPTURE(name_of(recipe));
        const double of_fp8 = error(precision_recipe(recipe), *device);
        CHECK(of_fp8 < 0.4);
      }
      if (is_pool(variant.downsample)) continue;
      // E4M3 has relative errors up to 1/16, 0.026 on average, which sums over tokens make less.
      rules.keeps_fp8 = true;
      const double kept = error(precision_recipe(Recipe::kFp32), *device);
      CHECK((kept > 1e-3 && kept < 0.06));
      rules.keeps_fp8 = false;
    }
  }
}

TEST_CASE("an additive side network begins at the model, to the bit, and so does the paper's with a = 1",
          "[model][side]") {
  const Fixture base = load_fixture("llama_gqa");
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kFp32, Recipe::kBf16, Recipe::kFp8Linear}) {
      const PrecisionConfig precision = precision_recipe(recipe);
      SmallModel plain(base.config, precision, base.shape, 1 << 20, *device);
      for (size_t i = 0; i < plain.gradients.size(); ++i) {
        plain.set_weight(i, base.tensors.at("weight/" + plain.model.parameters().all[i].name));
      }
      plain.model.weights_changed(*device);
      const std::vector<int32_t> targets = next_token_targets(base.tokens, base.shape.sequence_length);
      const Model::Batch batch{base.tokens.data(), targets.data(), base.shape};
      const std::vector<float> want = plain.model.logits(*device, batch, 0, base.shape.num_tokens());
      plain.model.evaluate(*device, batch);
      const double loss = mean_loss(plain.model.losses(*device), targets);
      for (const Variant& variant : kVariants) {
        CAPTURE(device->name(), name_of(recipe), variant.name);
        SideModel m(base.config, precision, base.shape, *device, fixture_rules(variant));
        m.load(base, nullptr);
        CHECK((m.logits(base) == want));
        CHECK(m.backward(base) == loss);
        // The additive form learns from its first step; the paper's waits for `mix`.
        const ParameterTable& table = m.model.parameters();
        const auto norm = [&](const char* name) {
          double sum = 0;
          for (const float g : m.gradient(static_cast<size_t>(table.index_of(name)))) sum += std::abs(g);
          return sum;
        };
        CHECK((norm("side.up") > 0) == (variant.mix == SideMix::kAdditive));
        if (variant.mix == SideMix::kPaper) CHECK(norm("side.mix") > 0);
      }
    }
  }
}

TEST_CASE("of frozen layers a side network keeps what its weights read, in FP8 where that is asked for, or nothing",
          "[model][side]") {
  const Fixture base = load_fixture("llama_gqa");
  Device& device = *devices().front();
  const int64_t elements = base.shape.num_tokens() * base.config.d_model, num_kept = base.config.num_layers + 1;
  for (const Variant& variant : kVariants) {
    CAPTURE(variant.name);
    for (const bool fp8 : {false, true}) {
      if (fp8 && is_pool(variant.downsample)) continue;
      SideRules rules = fixture_rules(variant);
      rules.keeps_fp8 = fp8;
      const SideModel m(base.config, precision_recipe(Recipe::kBf16), base.shape, device, rules);
      const auto kept = [&](std::string_view part) {
        return planned_bytes(m.plan, kSavedActivationsCategory, part);
      };
      // Codes, and a bf16 scale for each 16 of them. Only side layers have names with "side.".
      const int64_t bytes_of_h = is_pool(variant.downsample) ? 0
                                 : fp8                       ? elements + elements / 16 * 2
                                                             : 2 * elements;
      CHECK(kept(".h") == num_kept * bytes_of_h);
      CHECK(kept("") == kept("side."));
      for (const ParameterInfo& p : m.model.parameters().all) {
        CHECK(p.trainable == is_of_side(p));
      }
    }
  }
}

TEST_CASE("side networks have the paper's number of parameters", "[model][side]") {
  ModelConfig llama;
  llama.vocab_size = 32000;
  llama.d_model = 4096;
  llama.num_layers = 32;
  llama.num_heads = 32;
  llama.d_ffn = 11008;
  llama.norm = NormKind::kRmsNorm;
  llama.tie_embeddings = false;
  const auto trained = [&](Downsampling downsample) {
    const ParameterTable table =
        make_parameter_table(llama, false, {.side = {.reduction = 16, .downsample = downsample, .rank = 16}});
    int64_t sum = 0;
    for (const ParameterInfo& p : table.all) sum += p.trainable ? p.numel() : 0;
    return sum;
  };
  // Per layer 4 s^2 + 3 s f / 16 + 2 s and a gate, s = 256; the last norm and `up`.
  const int64_t s = 256, f = 688, layers = 32 * (4 * s * s + 3 * s * f + 2 * s + 1), ends = s + s * 4096;
  CHECK(trained(Downsampling::kAveragePool) == layers + ends);
  CHECK(trained(Downsampling::kAdapter) == layers + ends + 33 * 16 * (4096 + s));
  CHECK(trained(Downsampling::kLinear) == layers + ends + 33 * 4096 * s);
  const ModelConfig side = side_stack(llama, {.reduction = 16});
  CHECK((side.num_heads == 4 && side.kv_heads() == 4 && side.head_dim() == 64));
  llama.d_model = 8192;
  llama.num_heads = 64;
  llama.num_kv_heads = 8;
  const ModelConfig wide = side_stack(llama, {.reduction = 16}),
                    given = side_stack(llama, {.reduction = 16, .head_dim = 8});
  CHECK((wide.num_heads == 8 && wide.kv_heads() == 1 && given.num_heads == 64 && given.kv_heads() == 8));
}

TEST_CASE("logits with a cache are those of whole sequences beside a side network", "[model][side][generation]") {
  const Fixture base = load_fixture("llama_gqa"), side = load_fixture("side");
  ModelConfig windowed = base.config;
  windowed.sliding_window = 5;
  windowed.full_attention_every = 2;
  windowed.local_rope_theta = 100;
  for (Device* device : devices()) {
    for (const ModelConfig& config : {base.config, windowed}) {
      for (const Variant& variant : kVariants) {
        CAPTURE(device->name(), variant.name, config.sliding_window);
        MemoryPlan plan;
        Model model(config, precision_recipe(Recipe::kFp32), false, {1, 32}, 3, Model::Use::kInference, {}, plan,
                    {.side = fixture_rules(variant)});
        model.declare_cache({3, 32}, plan);
        plan.finish();
        const Arena arena(*device, plan);
        model.bind(*device, arena);
        const std::vector<ParameterInfo>& parameters = model.parameters().all;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const Fixture& source = is_of_side(parameters[i]) ? side : base;
          upload_weight(*device, model.weights().own()[i], source.tensors.at("weight/" + parameters[i].name));
        }
        model.weights_changed(*device);
        const auto whole = [&](const std::vector<int32_t>& tokens) {
          const auto length = static_cast<int64_t>(tokens.size());
          const std::vector<int32_t> targets(tokens.size(), kIgnoreTarget);
          return model.logits(*device, {tokens.data(), targets.data(), {1, length}}, length - 1, 1);
        };
        std::vector<std::vector<int32_t>> sequences = {random_tokens(9, 67, 1), random_tokens(3, 67, 2)};
        const int32_t slots[] = {2, 0};
        for (size_t i = 0; i < 2; ++i) {
          CHECK((model.prefill(*device, slots[i], sequences[i]) == whole(sequences[i])));
        }
        for (int step = 0; step < 6; ++step) {
          std::vector<Model::CachedToken> next;
          for (size_t i = 0; i < 2; ++i) {
            const auto position = static_cast<int32_t>(sequences[i].size());
            sequences[i].push_back((31 * position + 7) % 67);
            next.push_back({slots[i], position, sequences[i].back()});
          }
          const std::vector<float> got = model.decode(*device, next);
          for (size_t i = 0; i < 2; ++i) {
            const std::vector<float> row(got.begin() + static_cast<int64_t>(i) * 67,
                                         got.begin() + static_cast<int64_t>(i + 1) * 67);
            CHECK(relative_error(row, whole(sequences[i])) < 1e-5);
          }
        }
      }
    }
  }
}
