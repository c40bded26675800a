#include "engine/huggingface/huggingface_families.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/config/config_table.h"

namespace parka {
namespace {

// `base` with `changes`: those of a key that is there replace it.
template <typename Keys, typename NameOf>
Keys merged(Keys base, const Keys& changes, NameOf name_of) {
  for (const auto& change : changes) {
    const auto same = [&](const auto& entry) { return name_of(entry) == name_of(change); };
    const auto found = std::ranges::find_if(base, same);
    if (found == base.end()) {
      base.push_back(change);
    } else {
      *found = change;
    }
  }
  return base;
}

// The keys that families have in common, and `own`.
std::vector<ModelKey> model_keys(const std::vector<ModelKey>& own) {
  const std::vector<ModelKey> common = {
      IntegerKey{"vocab_size", &ModelConfig::vocab_size},
      IntegerKey{"hidden_size", &ModelConfig::d_model},
      IntegerKey{"num_hidden_layers", &ModelConfig::num_layers},
      IntegerKey{"num_attention_heads", &ModelConfig::num_heads},
      IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads, 0},
      IntegerKey{"intermediate_size", &ModelConfig::d_ffn},
      IntegerKey{"head_dim", &ModelConfig::given_head_dim, 0},
      FlagKey{"tie_word_embeddings", &ModelConfig::tie_embeddings, false},
      RealKey{"initializer_range", &ModelConfig::init_std, 0.02},
  };
  return merged(common, own,
                [](const ModelKey& entry) { return std::visit([](const auto& key) { return key.key; }, entry); });
}

std::vector<FixedKey> fixed_keys(const std::vector<FixedKey>& own) {
  const std::vector<FixedKey> common = {
      {"attention_bias", {false}, Presence::kWritten},
      {"mlp_bias", {false}},
      {"hidden_act", {"silu", "swish"}, Presence::kWritten},
      {"attention_dropout", {0.0}, Presence::kWritten},
      {"clip_qkv", {nullptr}},
      {"is_causal", {true}},
      {"quantization_config", {nullptr}},
      {"partial_rotary_factor", {1.0}},
  };
  return merged(common, own, [](const FixedKey& entry) { return entry.key; });
}

const FixedKey kNoWindow = {"sliding_window", {nullptr}};

// `keys` without those that say nothing about the family's models.
std::vector<FixedKey> fixed_keys_without(const std::vector<std::string_view>& names, std::vector<FixedKey> keys) {
  std::erase_if(keys, [&](const FixedKey& entry) { return std::ranges::find(names, entry.key) != names.end(); });
  return keys;
}

// The matrices of a block in transformers' order, `in_attention` after those of attention, and `norms` at the end.
std::vector<TensorNames::InBlock> tensors_in_block(const std::vector<TensorNames::InBlock>& norms,
                                                   const std::vector<TensorNames::InBlock>& in_attention = {}) {
  constexpr int kOfAttention = 4;
  std::vector<TensorNames::InBlock> names = {
      {BlockTensor::kQuery, "self_attn.q_proj.weight"}, {BlockTensor::kKey, "self_attn.k_proj.weight"},
      {BlockTensor::kValue, "self_attn.v_proj.weight"}, {BlockTensor::kAttentionOut, "self_attn.o_proj.weight"},
      {BlockTensor::kGate, "mlp.gate_proj.weight"},     {BlockTensor::kUp, "mlp.up_proj.weight"},
      {BlockTensor::kDown, "mlp.down_proj.weight"},
  };
  names.insert(names.begin() + kOfAttention, in_attention.begin(), in_attention.end());
  names.insert(names.end(), norms.begin(), norms.end());
  return names;
}

// With the biases of queries, keys and values, each after its matrix.
std::vector<TensorNames::InBlock> with_biases(const std::vector<TensorNames::InBlock>& names) {
  std::vector<TensorNames::InBlock> all;
  for (const TensorNames::InBlock& one : names) {
    all.push_back(one);
    if (one.holds == BlockTensor::kQuery) all.push_back({BlockTensor::kQueryBias, "self_attn.q_proj.bias"});
    if (one.holds == BlockTensor::kKey) all.push_back({BlockTensor::kKeyBias, "self_attn.k_proj.bias"});
    if (one.holds == BlockTensor::kValue) all.push_back({BlockTensor::kValueBias, "self_attn.v_proj.bias"});
  }
  return all;
}

// Before each branch.
std::vector<TensorNames::InBlock> norms_in_front() {
  return {{BlockTensor::kAttentionNorm, "input_layernorm.weight"},
          {BlockTensor::kFfnNorm, "post_attention_layernorm.weight"}};
}

std::vector<TensorNames::InBlock> qk_norms() {
  return {{BlockTensor::kQueryNorm, "self_attn.q_norm.weight"}, {BlockTensor::kKeyNorm, "self_attn.k_norm.weight"}};
}

HuggingFaceFamily llama_family() {
  return {
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .fixed = {.norm = NormKind::kRmsNorm,
                .norm_placement = NormPlacement::kBefore,
                .qk_norm = QkNormKind::kNone,
                .qkv_bias = false,
                .init = InitKind::kNormal},
      .keys = model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6}}),
      .fixed_keys = fixed_keys({{"mlp_bias", {false}, Presence::kWritten}, kNoWindow}),
      .tensors = {.in_block = tensors_in_block(norms_in_front()), .final_norm = "model.norm.weight"},
  };
}

// A window is that of all layers.
HuggingFaceFamily mistral_family() {
  HuggingFaceFamily family = llama_family();
  family.model_type = "mistral";
  family.architecture = "MistralForCausalLM";
  family.keys = model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                            IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads, 8, false, 0},
                            IntegerKey{"sliding_window", &ModelConfig::sliding_window, 4096, false, 0}});
  family.fixed_keys = fixed_keys({{"attention_bias", {false}}});
  family.max_positions = 131072;
  return family;
}

// Qwen2 and Qwen2.5. transformers takes 32 where num_key_value_heads is absent; published models have it. They
// also have a sliding_window, which means nothing unless use_sliding_window is true.
HuggingFaceFamily qwen2_family() {
  HuggingFaceFamily family = llama_family();
  family.model_type = "qwen2";
  family.architecture = "Qwen2ForCausalLM";
  family.fixed.qkv_bias = true;
  family.keys =
      model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                  IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads},
                  IntegerKey{"head_dim", &ModelConfig::given_head_dim, 0, /*omitted_if_otherwise=*/true}});
  family.fixed_keys =
      fixed_keys_without({"attention_bias"}, fixed_keys({{"use_sliding_window", {false}, Presence::kWritten}}));
  family.max_positions = 32768;
  family.tensors.in_block = with_biases(family.tensors.in_block);
  return family;
}

// transformers takes 128 and 32 where head_dim and num_key_value_heads are absent; published models have both.
HuggingFaceFamily qwen3_family() {
  HuggingFaceFamily family = llama_family();
  family.model_type = "qwen3";
  family.architecture = "Qwen3ForCausalLM";
  family.fixed.qk_norm = QkNormKind::kPerHead;
  family.keys = model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                            IntegerKey{"head_dim", &ModelConfig::given_head_dim},
                            IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads}});
  family.fixed_keys = fixed_keys({{"use_sliding_window", {false}, Presence::kWritten}});
  family.max_positions = 32768;
  family.tensors.in_block = tensors_in_block(norms_in_front(), qk_norms());
  return family;
}

// post_attention_layernorm is after attention here, not before the MLP. head_dim is as with OLMo v1.
HuggingFaceFamily olmo2_family() {
  HuggingFaceFamily family = llama_family();
  family.model_type = "olmo2";
  family.architecture = "Olmo2ForCausalLM";
  family.fixed.norm_placement = NormPlacement::kAfter;
  family.fixed.qk_norm = QkNormKind::kFull;
  family.keys =
      model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-5},
                  IntegerKey{"head_dim", &ModelConfig::given_head_dim, 0, /*omitted_if_otherwise=*/true}});
  family.fixed_keys = fixed_keys({kNoWindow});
  family.tensors.in_block = tensors_in_block({{BlockTensor::kAttentionPostNorm, "post_attention_layernorm.weight"},
                                              {BlockTensor::kFfnPostNorm, "post_feedforward_layernorm.weight"}},
                                             qk_norms());
  return family;
}

// OLMo 2 with windows, in three of four layers where there is no list of layer_types.
HuggingFaceFamily olmo3_family() {
  HuggingFaceFamily family = olmo2_family();
  family.model_type = "olmo3";
  family.architecture = "Olmo3ForCausalLM";
  family.keys.push_back(IntegerKey{"sliding_window", &ModelConfig::sliding_window, 4096, false, 0});
  family.fixed_keys = fixed_keys({});
  family.rope_theta = 500000.0;
  family.full_attention_every = 4;
  return family;
}

// The text models of Gemma 3. Its norms multiply by 1 + weight, and post_attention_layernorm is after attention.
HuggingFaceFamily gemma3_family() {
  return {
      .model_type = "gemma3_text",
      .architecture = "Gemma3ForCausalLM",
      .fixed = {.norm = NormKind::kRmsNorm,
                .norm_placement = NormPlacement::kBoth,
                .qk_norm = QkNormKind::kPerHead,
                .norm_unit_offset = true,
                .qkv_bias = false,
                .activation = GateActivation::kGeluTanh,
                .embedding_scale = EmbeddingScale::kSqrtDModel,
                .init = InitKind::kNormal},
      .keys = model_keys({RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                          IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads, 4},
                          IntegerKey{"head_dim", &ModelConfig::given_head_dim, 256},
                          IntegerKey{"query_pre_attn_scalar", &ModelConfig::query_pre_attn_scalar, 256},
                          IntegerKey{"sliding_window", &ModelConfig::sliding_window, 4096, false, 0},
                          FlagKey{"tie_word_embeddings", &ModelConfig::tie_embeddings, true}}),
      .fixed_keys = fixed_keys_without({"hidden_act"},
                                       fixed_keys({{"hidden_activation", {"gelu_pytorch_tanh"}, Presence::kWritten},
                                                   {"attn_logit_softcapping", {nullptr}, Presence::kWritten},
                                                   {"final_logit_softcapping", {nullptr}, Presence::kWritten},
                                                   {"use_bidirectional_attention", {false}, Presence::kWritten}})),
      .rope_theta = 1e6,
      .max_positions = 131072,
      .full_attention_every = 6,
      .full_attention_every_key = "sliding_window_pattern",
      .local_rope_theta_key = "rope_local_base_freq",
      .local_rope_theta = 10000.0,
      .tensors = {.in_block = tensors_in_block(
                      {
                          {BlockTensor::kAttentionNorm, "input_layernorm.weight"},
                          {BlockTensor::kAttentionPostNorm, "post_attention_layernorm.weight"},
                          {BlockTensor::kFfnNorm, "pre_feedforward_layernorm.weight"},
                          {BlockTensor::kFfnPostNorm, "post_feedforward_layernorm.weight"},
                      },
                      qk_norms()),
                  .final_norm = "model.norm.weight"},
  };
}

// OLMo v1. transformers' OlmoConfig has no head_dim, but its attention reads one where it is given.
HuggingFaceFamily olmo_family() {
  return {
      .model_type = "olmo",
      .architecture = "OlmoForCausalLM",
      .fixed = {.norm = NormKind::kLayerNorm,
                .norm_eps = 1e-5,
                .norm_placement = NormPlacement::kBefore,
                .qk_norm = QkNormKind::kNone,
                .qkv_bias = false,
                .init = InitKind::kNormal},
      .keys = model_keys({IntegerKey{"head_dim", &ModelConfig::given_head_dim, 0, /*omitted_if_otherwise=*/true}}),
      .fixed_keys = fixed_keys({kNoWindow}),
      .tensors = {.in_block = tensors_in_block({})},
  };
}

// `keys` without this one.
std::vector<ModelKey> without(std::string_view name, std::vector<ModelKey> keys) {
  std::erase_if(keys, [&](const ModelKey& entry) {
    return std::visit([](const auto& key) { return key.key; }, entry) == name;
  });
  return keys;
}

// The keys of families with experts. transformers takes sizes of a published model where those of experts are
// absent, which would say nothing about the weights at hand.
std::vector<ModelKey> moe_keys(const IntegerKey& num_experts, std::vector<ModelKey> own) {
  own.emplace_back(num_experts);
  own.emplace_back(IntegerKey{"num_experts_per_tok", &MoeConfig::experts_per_token});
  return model_keys(own);
}

// Llama's tensors, and those of a mixture of experts.
std::vector<TensorNames::InBlock> with_experts(std::vector<TensorNames::InBlock> of_experts,
                                               const std::vector<TensorNames::InBlock>& in_attention = {}) {
  for (const TensorNames::InBlock& norm : norms_in_front()) of_experts.push_back(norm);
  return tensors_in_block(of_experts, in_attention);
}

const TensorNames::InBlock kRouter = {BlockTensor::kRouter, "mlp.gate.weight"},
                           kExpertGate = {BlockTensor::kExpertGate, "mlp.experts.*.gate_proj.weight"},
                           kExpertUp = {BlockTensor::kExpertUp, "mlp.experts.*.up_proj.weight"},
                           kExpertDown = {BlockTensor::kExpertDown, "mlp.experts.*.down_proj.weight"};

// Queries and keys are normed as in OLMo 2, which leaves no choice of head_dim, and branches as in Llama.
HuggingFaceFamily olmoe_family() {
  HuggingFaceFamily family = llama_family();
  family.model_type = "olmoe";
  family.architecture = "OlmoeForCausalLM";
  family.fixed.qk_norm = QkNormKind::kFull;
  family.keys = without("head_dim", moe_keys({"num_experts", &MoeConfig::num_experts},
                                             {RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-5},
                                              FlagKey{"norm_topk_prob", &MoeConfig::normalize_weights, false}}));
  family.fixed_keys = fixed_keys({kNoWindow});
  family.max_positions = 4096;
  family.tensors.in_block = with_experts({kRouter, kExpertGate, kExpertUp, kExpertDown}, qk_norms());
  return family;
}

HuggingFaceFamily qwen3_moe_family() {
  HuggingFaceFamily family = qwen3_family();
  family.model_type = "qwen3_moe";
  family.architecture = "Qwen3MoeForCausalLM";
  family.keys =
      without("intermediate_size",
              moe_keys({.key = "num_experts", .field = &MoeConfig::num_experts, .alias = "num_local_experts"},
                       {RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                        IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads},
                        IntegerKey{"moe_intermediate_size", &ModelConfig::d_ffn},
                        FlagKey{"norm_topk_prob", &MoeConfig::normalize_weights, false}}));
  family.fixed_keys = fixed_keys({{"use_sliding_window", {false}, Presence::kWritten},
                                  {"decoder_sparse_step", {1}, Presence::kWritten},
                                  {"mlp_only_layers", {json::array()}, Presence::kWritten}});
  family.tensors.in_block = with_experts({kRouter, kExpertGate, kExpertUp, kExpertDown}, qk_norms());
  return family;
}

HuggingFaceFamily mixtral_family() {
  HuggingFaceFamily family = mistral_family();
  family.model_type = "mixtral";
  family.architecture = "MixtralForCausalLM";
  family.fixed.moe.normalize_weights = true;
  family.keys = moe_keys({"num_local_experts", &MoeConfig::num_experts},
                         {RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-5},
                          IntegerKey{"num_key_value_heads", &ModelConfig::num_kv_heads, 8, false, 0},
                          IntegerKey{"sliding_window", &ModelConfig::sliding_window, 0, false, 0}});
  family.fixed_keys = fixed_keys({{"attention_bias", {false}}, {"router_jitter_noise", {0.0}}});
  family.rope_theta = 1e6;
  family.tensors.in_block = with_experts({{BlockTensor::kRouter, "block_sparse_moe.gate.weight"},
                                          {BlockTensor::kExpertGate, "block_sparse_moe.experts.*.w1.weight"},
                                          {BlockTensor::kExpertDown, "block_sparse_moe.experts.*.w2.weight"},
                                          {BlockTensor::kExpertUp, "block_sparse_moe.experts.*.w3.weight"}});
  return family;
}

// dots.llm1: DeepSeek-V3's router and shared experts, and Qwen3's attention.
HuggingFaceFamily dots1_family() {
  HuggingFaceFamily family = qwen3_family();
  family.model_type = "dots1";
  family.architecture = "Dots1ForCausalLM";
  family.fixed.moe.score = RouterScore::kSigmoid;
  family.fixed.moe.correction_bias = true;
  family.keys = without(
      "intermediate_size",
      moe_keys({"n_routed_experts", &MoeConfig::num_experts},
               {RealKey{"rms_norm_eps", &ModelConfig::norm_eps, 1e-6},
                IntegerKey{"moe_intermediate_size", &ModelConfig::d_ffn},
                IntegerKey{.key = "first_k_dense_replace",
                           .field = &MoeConfig::dense_layers,
                           .otherwise = 0,
                           .may_be_zero = true},
                IntegerKey{"n_group", &MoeConfig::groups, 1}, IntegerKey{"topk_group", &MoeConfig::groups_kept, 1},
                RealKey{"routed_scaling_factor", &MoeConfig::weight_scaling, 1.0},
                FlagKey{"norm_topk_prob", &MoeConfig::normalize_weights, false}}));
  family.fixed_keys = fixed_keys({});
  family.max_positions = 2048;
  family.dense_width_key = "intermediate_size";
  family.shared_experts_key = "n_shared_experts";
  family.max_window_layers = 62;
  family.tensors.in_block = with_experts({kExpertGate,
                                          kExpertUp,
                                          kExpertDown,
                                          kRouter,
                                          {BlockTensor::kRouterBias, "mlp.gate.e_score_correction_bias"},
                                          {BlockTensor::kSharedGate, "mlp.shared_experts.gate_proj.weight"},
                                          {BlockTensor::kSharedUp, "mlp.shared_experts.up_proj.weight"},
                                          {BlockTensor::kSharedDown, "mlp.shared_experts.down_proj.weight"}},
                                         qk_norms());
  return family;
}

bool has_experts(const HuggingFaceFamily& family) {
  return std::ranges::find(family.tensors.in_block, BlockTensor::kRouter, &TensorNames::InBlock::holds) !=
         family.tensors.in_block.end();
}

// The model that is read back where the family's config.json is written for `model`.
ModelConfig read_back(const HuggingFaceFamily& family, const ModelConfig& model) {
  ModelConfig written = family.fixed;
  for (const ModelKey& entry : family.keys) {
    std::visit([&](const auto& key) { key.field.in(written) = key.field.in(model); }, entry);
  }
  if (has_experts(family)) written.moe.num_experts = std::max<int64_t>(1, model.moe.num_experts);
  if (!family.dense_width_key.empty()) written.moe.dense_width = model.moe.dense_width;
  if (!family.shared_experts_key.empty()) {  // at least one
    written.moe.shared_width = std::max<int64_t>(1, model.moe.shared_width / model.d_ffn) * model.d_ffn;
  }
  written.rope_theta = model.rope_theta;
  written.rope_scaling = model.rope_scaling;
  if (family.full_attention_every > 0) {
    written.full_attention_every = model.full_attention_every;
    written.local_rope_theta = model.local_rope_theta;
  }
  written.init = model.init;  // the weights are there
  written.init_std = model.init_std;
  return written;
}

// With the fields filled in that 0 stands for, but for one that follows from another of them.
Config config_with(const ModelConfig& model) {
  Config config;
  config.model = model;
  config.model.num_kv_heads = model.kv_heads();
  config.model.given_head_dim = model.head_dim();
  if (model.pre_attn_scalar() == model.head_dim()) config.model.query_pre_attn_scalar = 0;
  return config;
}

}  // namespace

std::span<const HuggingFaceFamily> huggingface_families() {
  static const std::vector<HuggingFaceFamily> families = {
      llama_family(),  mistral_family(), qwen2_family(), qwen3_family(),     olmo2_family(),   olmo3_family(),
      gemma3_family(), olmo_family(),    olmoe_family(), qwen3_moe_family(), mixtral_family(), dots1_family()};
  return families;
}

std::string names_of(std::span<const HuggingFaceFamily> families) {
  std::vector<std::string> names;
  for (const HuggingFaceFamily& family : families) {
    names.push_back(fmt::format("{} ({})", family.model_type, family.architecture));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

const HuggingFaceFamily* find_family(std::string_view model_type, std::span<const HuggingFaceFamily> families) {
  const auto found = std::ranges::find_if(
      families, [&](const HuggingFaceFamily& family) { return family.model_type == model_type; });
  return found == families.end() ? nullptr : &*found;
}

std::vector<std::string> family_problems(const HuggingFaceFamily& family, const ModelConfig& model) {
  Config of_family = config_with(read_back(family, model)), wanted = config_with(model);
  const ConfigTable table_of_family = make_config_table(of_family), table = make_config_table(wanted);
  std::vector<std::string> problems;
  for (size_t i = 0; i < table.fields.size(); ++i) {
    const auto has = get_field(table_of_family.fields[i]), needs = get_field(table.fields[i]);
    if (has == needs) continue;
    problems.push_back(fmt::format("{} = {}, not {}", table.fields[i].path, has.dump(), needs.dump()));
  }
  return problems;
}

bool has_family(const ModelConfig& model) {
  return std::ranges::any_of(huggingface_families(), [&](const HuggingFaceFamily& family) {
    return family_problems(family, model).empty();
  });
}

const HuggingFaceFamily& choose_family(const ModelConfig& model, std::string_view wanted,
                                       const HuggingFaceFamily* origin, const std::string& where,
                                       std::span<const HuggingFaceFamily> families) {
  if (!wanted.empty()) {
    const HuggingFaceFamily* family = find_family(wanted, families);
    if (family == nullptr) throw_bad_input("--family {} is not known; {} are", wanted, names_of(families));
    const std::vector<std::string> problems = family_problems(*family, model);
    if (problems.empty()) return *family;
    throw_bad_input("{}: --family {} has {}; name another family, or leave out --family", where, wanted,
                    fmt::join(problems, ", and "));
  }
  if (origin != nullptr && family_problems(*origin, model).empty()) return *origin;
  std::vector<std::string> reasons;
  for (const HuggingFaceFamily& family : families) {
    const std::vector<std::string> problems = family_problems(family, model);
    if (problems.empty()) return family;
    if (has_experts(family) != model.moe.exists()) continue;
    reasons.push_back(fmt::format("{} has {}", family.model_type, fmt::join(problems, ", and ")));
  }
  throw_bad_input(
      "{}: no supported Hugging Face family can express this model: {}; train one with the values of a family",
      where, fmt::join(reasons, "; "));
}

}  // namespace parka
