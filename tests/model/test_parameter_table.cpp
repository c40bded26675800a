#include "model/parameter_table.h"

#include <cmath>

#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

ModelConfig olmo(int64_t d, int64_t heads, int64_t layers, int64_t f, bool tied) {
  ModelConfig config;
  config.d_model = d;
  config.num_heads = heads;
  config.num_layers = layers;
  config.d_ffn = f;
  config.tie_embeddings = tied;
  return config;
}

struct Moments {
  double mean = 0, std = 0, largest = 0;
};
Moments moments(const std::vector<float>& values) {
  Moments m;
  for (float v : values) {
    m.mean += v;
    m.largest = std::max(m.largest, std::abs(double{v}));
  }
  m.mean /= static_cast<double>(values.size());
  for (float v : values) m.std += (v - m.mean) * (v - m.mean);
  m.std = std::sqrt(m.std / static_cast<double>(values.size()));
  return m;
}

}  // namespace

TEST_CASE("parameter counts are those of the published models", "[model]") {
  CHECK(make_parameter_table(olmo(2048, 16, 16, 8192, true), false).num_parameters() == 1'176'764'416);
  CHECK(make_parameter_table(olmo(4096, 32, 32, 11008, false), false).num_parameters() == 6'888'095'744);
  ModelConfig llama = olmo(4096, 32, 32, 11008, false);
  llama.vocab_size = 32000;
  llama.norm = NormKind::kRmsNorm;
  CHECK(make_parameter_table(llama, false).num_parameters() == 6'738'415'616);
}

TEST_CASE("tensors lie on multiples of the optimizer group, and only linear weights decay", "[model]") {
  ModelConfig config = olmo(48, 4, 2, 40, false);
  config.vocab_size = 61;
  config.norm = NormKind::kRmsNorm;
  const ParameterTable table = make_parameter_table(config, false);
  int64_t end = 0;
  for (const ParameterInfo& p : table.all) {
    CHECK(p.first_element % 128 == 0);
    CHECK(p.first_element >= end);
    end = p.first_element + p.numel();
    const bool is_linear = p.name.find("norm") == std::string::npos && p.name != "embedding";
    CHECK(p.decayed == is_linear);
  }
  CHECK(make_parameter_table(config, true).all.front().decayed);
}

TEST_CASE("mitchell initialization has OLMo's deviations, cut at three of them", "[model][slow]") {
  const ModelConfig config = olmo(256, 4, 3, 512, true);
  const ParameterTable table = make_parameter_table(config, false);
  const double cut_std = 0.98658;  // of a standard normal cut at 3
  for (size_t i = 0; i < table.all.size(); ++i) {
    const std::string& name = table.all[i].name;
    CAPTURE(name);
    double want = 1 / std::sqrt(256.0);
    for (int l = 0; l < 3; ++l) {
      if (name == "blocks." + std::to_string(l) + ".attention_out") want = 1 / std::sqrt(2 * 256.0 * (l + 1));
      if (name == "blocks." + std::to_string(l) + ".down") want = 1 / std::sqrt(2 * 512.0 * (l + 1));
    }
    const Moments m = moments(initial_weight(config, table, i, 42));
    CHECK(std::abs(m.std - cut_std * want) < 0.02 * want);
    CHECK(std::abs(m.mean) < 0.02 * want);
    CHECK(m.largest <= 3 * want * (1 + 1e-6));
    CHECK(m.largest > 2.9 * want);
  }
}

TEST_CASE("every initial value is the first draw of its own that is not cut off", "[model]") {
  const ModelConfig config = olmo(128, 4, 1, 256, false);
  const ParameterTable table = make_parameter_table(config, false);
  const auto qkv = static_cast<size_t>(table.index_of("blocks.0.qkv"));
  const int64_t numel = table.all[qkv].numel();
  const auto draw = [&](uint64_t seed, int64_t element) {
    for (uint64_t attempt = 0;; ++attempt) {
      const double value = philox_normal2(seed, qkv | attempt << 32, static_cast<uint64_t>(element))[0];
      if (std::abs(value) <= 3.0) return static_cast<float>(1.0 / std::sqrt(128.0) * value);
    }
  };
  for (const ElementRange range : {ElementRange{0, numel}, {1, 2}, {77, 77 + 129}, {16383, numel - 1}}) {
    const std::vector<float> values = initial_weight(config, table, qkv, 5, range);
    REQUIRE(static_cast<int64_t>(values.size()) == range.size());
    int wrong = 0;
    for (int64_t i = 0; i < range.size(); ++i) wrong += values[static_cast<size_t>(i)] != draw(5, range.begin + i);
    CHECK(wrong == 0);
  }
}

TEST_CASE("normal initialization, norm weights, seeds", "[model][slow]") {
  ModelConfig config = olmo(128, 4, 1, 256, false);
  config.init = InitKind::kNormal;
  config.init_std = 0.02;
  config.norm = NormKind::kRmsNorm;
  const ParameterTable table = make_parameter_table(config, false);
  const auto qkv = static_cast<size_t>(table.index_of("blocks.0.qkv"));
  CHECK(std::abs(moments(initial_weight(config, table, qkv, 1)).std - 0.02) < 0.0005);
  CHECK(initial_weight(config, table, static_cast<size_t>(table.final_norm), 1) == std::vector<float>(128, 1.0f));
  CHECK(initial_weight(config, table, qkv, 1) == initial_weight(config, table, qkv, 1));
  CHECK(initial_weight(config, table, qkv, 1) != initial_weight(config, table, qkv, 2));
  CHECK(initial_weight(config, table, static_cast<size_t>(table.embedding), 1) !=
        initial_weight(config, table, static_cast<size_t>(table.head), 1));
}
