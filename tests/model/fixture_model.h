#pragma once
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "engine/files/safetensors.h"
#include "model/micro_batch.h"
#include "model/model_config.h"

// The models in tests/fixtures that transformers computed.
namespace parka::test {

struct Fixture {
  ModelConfig config;
  BatchShape shape;
  std::vector<int32_t> tokens;
  std::map<std::string, std::vector<float>> tensors;
  double balance_weight =
      0;  // of the loss that the gradients "balanced/" have beside that of "grad/"; 0: there are none
};

template <typename Metadata>
void read_rope_scaling(const Metadata& meta, RopeScaling& scaling) {
  const auto read = [&](const std::string& key, double& value) {
    if (meta.contains("rope_scaling." + key)) value = std::stod(meta.at("rope_scaling." + key));
  };
  scaling.kind = RopeScalingKind::kLlama3;
  if (meta.contains("rope_scaling.type")) {
    scaling.kind = meta.at("rope_scaling.type") == "yarn" ? RopeScalingKind::kYarn : RopeScalingKind::kLinear;
  }
  read("factor", scaling.factor);
  read("low_freq_factor", scaling.low_frequency_factor);
  read("high_freq_factor", scaling.high_frequency_factor);
  read("beta_fast", scaling.beta_fast);
  read("beta_slow", scaling.beta_slow);
  read("attention_factor", scaling.attention_factor);
  if (meta.contains("rope_scaling.truncate")) scaling.truncate = meta.at("rope_scaling.truncate") == "True";
  if (meta.contains("rope_scaling.original_max_position_embeddings")) {
    scaling.original_length = std::stoll(meta.at("rope_scaling.original_max_position_embeddings"));
  }
}

template <NamedEnum E>
E value_named(std::string_view name) {
  for (const EnumName<E>& entry : EnumNames<E>::kAll) {
    if (entry.name == name) return entry.value;
  }
  throw_internal("{} is no value of its enum", name);
}

template <typename Metadata>
void read_moe(const Metadata& meta, MoeConfig& moe) {
  const auto read = [&](const std::string& key, auto& value) {
    if (!meta.contains("moe." + key)) return;
    value = static_cast<std::remove_reference_t<decltype(value)>>(std::stod(meta.at("moe." + key)));
  };
  read("num_experts", moe.num_experts);
  read("experts_per_token", moe.experts_per_token);
  read("weight_scaling", moe.weight_scaling);
  read("groups", moe.groups);
  read("groups_kept", moe.groups_kept);
  read("shared_width", moe.shared_width);
  read("dense_layers", moe.dense_layers);
  read("dense_width", moe.dense_width);
  moe.normalize_weights = meta.contains("moe.normalize_weights");
  moe.correction_bias = meta.contains("moe.correction_bias");
  if (meta.contains("moe.score")) moe.score = value_named<RouterScore>(meta.at("moe.score"));
}

inline Fixture load_fixture(const std::string& name) {
  const InputFile file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/" + name + ".safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  const auto& meta = header.metadata;
  Fixture fixture;
  ModelConfig& c = fixture.config;
  c.vocab_size = std::stoll(meta.at("vocab_size"));
  c.d_model = std::stoll(meta.at("d_model"));
  c.num_layers = std::stoll(meta.at("num_layers"));
  c.num_heads = std::stoll(meta.at("num_heads"));
  c.num_kv_heads = std::stoll(meta.at("num_kv_heads"));
  c.d_ffn = std::stoll(meta.at("d_ffn"));
  c.norm = meta.at("norm") == "layernorm" ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  c.norm_eps = std::stod(meta.at("norm_eps"));
  c.rope_theta = std::stod(meta.at("rope_theta"));
  c.tie_embeddings = meta.at("tie_embeddings") == "true";
  if (meta.contains("norm_placement")) c.norm_placement = value_named<NormPlacement>(meta.at("norm_placement"));
  if (meta.contains("qk_norm")) c.qk_norm = value_named<QkNormKind>(meta.at("qk_norm"));
  c.qkv_bias = meta.contains("qkv_bias");
  c.norm_unit_offset = meta.contains("norm_unit_offset");
  if (meta.contains("activation")) c.activation = value_named<GateActivation>(meta.at("activation"));
  if (meta.contains("embedding_scale")) c.embedding_scale = value_named<EmbeddingScale>(meta.at("embedding_scale"));
  if (meta.contains("query_pre_attn_scalar"))
    c.query_pre_attn_scalar = std::stoll(meta.at("query_pre_attn_scalar"));
  if (meta.contains("head_dim")) c.given_head_dim = std::stoll(meta.at("head_dim"));
  if (meta.contains("rope_scaling.factor")) read_rope_scaling(meta, c.rope_scaling);
  if (meta.contains("sliding_window")) c.sliding_window = std::stoll(meta.at("sliding_window"));
  if (meta.contains("full_attention_every")) c.full_attention_every = std::stoll(meta.at("full_attention_every"));
  if (meta.contains("local_rope_theta")) c.local_rope_theta = std::stod(meta.at("local_rope_theta"));
  read_moe(meta, c.moe);
  if (meta.contains("balance_weight")) fixture.balance_weight = std::stod(meta.at("balance_weight"));
  fixture.shape = {std::stoll(meta.at("batch")), std::stoll(meta.at("seq"))};
  for (const SafetensorsEntry& entry : header.tensors) {
    std::vector<std::byte> bytes(static_cast<size_t>(entry.num_bytes));
    file.read(entry.offset, bytes);
    if (entry.name == "tokens") {
      fixture.tokens.resize(bytes.size() / 4);
      std::memcpy(fixture.tokens.data(), bytes.data(), bytes.size());
    } else {
      std::vector<float>& values = fixture.tensors[entry.name];
      values.resize(bytes.size() / 4);
      std::memcpy(values.data(), bytes.data(), bytes.size());
    }
  }
  return fixture;
}

inline const char* const kFixtures[] = {"olmo_tied",      "olmo_untied",       "llama_mha",        "llama_gqa",
                                        "llama_mqa_tied", "llama3_wide_heads", "mistral_window",   "llama_linear",
                                        "llama_yarn",     "qwen3_windows",     "qwen3_wide_heads", "olmo2_gqa",
                                        "qwen2_gqa",      "olmo3_windows",     "gemma3_windows",   "gemma3_untied"};

// With experts.
inline const char* const kMoeFixtures[] = {"olmoe_softmax", "qwen3_moe_gqa", "mixtral_gqa", "dots1_groups"};

inline std::vector<std::string> all_fixtures() {
  std::vector<std::string> names(std::begin(kFixtures), std::end(kFixtures));
  names.insert(names.end(), std::begin(kMoeFixtures), std::end(kMoeFixtures));
  return names;
}

}  // namespace parka::test
