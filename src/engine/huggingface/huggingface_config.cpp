#include "engine/huggingface/huggingface_config.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr double kOlmoNormEps = 1e-5;  // transformers' OLMo has no other

struct Family {
  std::string_view model_type, architecture;
  NormKind norm;
};
constexpr Family kFamilies[] = {{"llama", "LlamaForCausalLM", NormKind::kRmsNorm},
                                {"olmo", "OlmoForCausalLM", NormKind::kLayerNorm}};

// Typed reads of an object's keys. A key that is null counts as absent, as in transformers.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(const char* key, std::optional<int64_t> otherwise = {}) const {
    const json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) fail("has no {}", key);
    if (!value->is_number_integer() || *value < 1 || *value > kMaxDimension) {
      fail("{}: expected an integer from 1 to {}, got {}", key, kMaxDimension, describe_json(*value));
    }
    return value->get<int64_t>();
  }
  double number(const char* key, std::optional<double> otherwise = {}) const {
    const json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) fail("has no {}", key);
    if (!value->is_number()) fail("{}: expected a number, got {}", key, describe_json(*value));
    return value->get<double>();
  }
  bool flag(const char* key, bool otherwise) const {
    const json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) fail("{}: expected true or false, got {}", key, describe_json(*value));
    return value->get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    const json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) fail("{}: expected a string, got {}", key, describe_json(*value));
    return value->get<std::string>();
  }

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_bad_input("{}: {}", where_, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  const json& object_;
  std::string where_;
};

const Family& family_of(const Reader& config) {
  const std::string type = config.text("model_type", "");
  for (const Family& family : kFamilies) {
    if (family.model_type != type) continue;
    const json* architectures = config.find("architectures");
    if (architectures == nullptr || *architectures == json{family.architecture}) return family;
    config.fail("architectures {} is not supported; {} is", printable(architectures->dump()), family.architecture);
  }
  config.fail("model_type \"{}\" is not supported; llama (LlamaForCausalLM) and olmo (OlmoForCausalLM) are",
              printable(type));
}

// What the two models of transformers can do and Parka cannot.
void refuse_unsupported(const Reader& config) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.flag(key, false)) config.fail("{} = true is not supported: Parka's linear layers have no bias", key);
  }
  const std::string activation = config.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish") {
    config.fail("hidden_act = \"{}\" is not supported; silu is", printable(activation));
  }
  if (config.number("attention_dropout", 0.0) != 0) {
    config.fail("attention_dropout = {} is not supported; 0 is", config.number("attention_dropout"));
  }
  for (const char* key : {"clip_qkv", "sliding_window", "quantization_config"}) {
    if (const json* value = config.find(key)) {
      config.fail("{} = {} is not supported; null is", key, printable(value->dump()));
    }
  }
  if (config.number("partial_rotary_factor", 1.0) != 1) {
    config.fail("partial_rotary_factor = {} is not supported; 1 is", config.number("partial_rotary_factor"));
  }
}

// Before version 5 of transformers: rope_theta, and rope_scaling or null. Since then: rope_parameters with both.
void read_rope(const Reader& config, const std::string& where, ModelConfig& model) {
  model.rope_theta = config.number("rope_theta", 10000.0);
  const char* key = config.find("rope_scaling") != nullptr ? "rope_scaling" : "rope_parameters";
  const json* object = config.find(key);
  if (object == nullptr) return;
  if (!object->is_object()) config.fail("{}: expected an object, got {}", key, describe_json(*object));
  const Reader rope(*object, fmt::format("{}: {}", where, key));
  model.rope_theta = rope.number("rope_theta", model.rope_theta);
  if (rope.number("partial_rotary_factor", 1.0) != 1) {
    rope.fail("partial_rotary_factor = {} is not supported; 1 is", rope.number("partial_rotary_factor"));
  }
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3") {
    rope.fail("rope_type = \"{}\" is not supported; default and llama3 are", printable(type));
  }
  RopeScalingConfig& scaling = model.rope_scaling;
  scaling.kind = RopeScalingKind::kLlama3;
  scaling.factor = rope.number("factor");
  scaling.low_frequency_factor = rope.number("low_freq_factor");
  scaling.high_frequency_factor = rope.number("high_freq_factor");
  scaling.original_length = rope.integer("original_max_position_embeddings");
}

ordered_json rope_scaling_of(const RopeScalingConfig& scaling) {
  if (scaling.kind == RopeScalingKind::kNone) return nullptr;
  return {{"factor", scaling.factor},
          {"high_freq_factor", scaling.high_frequency_factor},
          {"low_freq_factor", scaling.low_frequency_factor},
          {"original_max_position_embeddings", scaling.original_length},
          {"rope_type", "llama3"}};
}

const char* dtype_key(const json& config) { return config.contains("dtype") ? "dtype" : "torch_dtype"; }

}  // namespace

HuggingFaceModel parse_huggingface_config(const json& root, const std::string& where) {
  if (!root.is_object()) throw_bad_input("{}: expected an object, got {}", where, describe_json(root));
  const Reader config(root, where);
  const Family& family = family_of(config);
  refuse_unsupported(config);
  HuggingFaceModel result;
  ModelConfig& model = result.model;
  model.vocab_size = config.integer("vocab_size");
  model.d_model = config.integer("hidden_size");
  model.num_layers = config.integer("num_hidden_layers");
  model.num_heads = config.integer("num_attention_heads");
  model.num_kv_heads = config.integer("num_key_value_heads", model.num_heads);
  model.d_ffn = config.integer("intermediate_size");
  const int64_t usual_head_dim = model.d_model / model.num_heads;
  const int64_t head_dim = config.integer("head_dim", usual_head_dim);
  model.given_head_dim = head_dim == usual_head_dim ? 0 : head_dim;
  model.norm = family.norm;
  model.norm_eps = family.norm == NormKind::kRmsNorm ? config.number("rms_norm_eps", 1e-6) : kOlmoNormEps;
  model.tie_embeddings = config.flag("tie_word_embeddings", false);
  model.init = InitKind::kNormal;
  model.init_std = config.number("initializer_range", 0.02);
  read_rope(config, where, model);
  result.max_positions = config.integer("max_position_embeddings", 2048);
  Config whole;
  whole.model = model;
  try {
    validate(whole);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: as a model of Parka: {}", where, error.what()));
  }
  return result;
}

std::string make_huggingface_config(const HuggingFaceModel& described, DType dtype, const json* origin) {
  const ModelConfig& model = described.model;
  const auto* family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                    [&](const Family& f) { return f.norm == model.norm; });
  const bool is_llama = model.norm == NormKind::kRmsNorm;
  if (!is_llama && model.norm_eps != kOlmoNormEps) {
    throw_bad_input("model.norm_eps = {} cannot be exported: transformers' OLMo has {} and no setting for it",
                    model.norm_eps, kOlmoNormEps);
  }
  json config = {{"architectures", {family->architecture}},
                 {"attention_bias", false},
                 {"attention_dropout", 0.0},
                 {"hidden_act", "silu"},
                 {"hidden_size", model.d_model},
                 {"initializer_range", model.init_std},
                 {"intermediate_size", model.d_ffn},
                 {"max_position_embeddings", described.max_positions},
                 {"model_type", family->model_type},
                 {"num_attention_heads", model.num_heads},
                 {"num_hidden_layers", model.num_layers},
                 {"num_key_value_heads", model.kv_heads()},
                 {"rope_scaling", rope_scaling_of(model.rope_scaling)},
                 {"rope_theta", model.rope_theta},
                 {"tie_word_embeddings", model.tie_embeddings},
                 {dtype_key(origin != nullptr ? *origin : json::object()), huggingface_name_of(dtype)},
                 {"use_cache", true},
                 {"vocab_size", model.vocab_size}};
  if (is_llama) {
    config["mlp_bias"] = false;
    config["rms_norm_eps"] = model.norm_eps;
  }
  if (is_llama || model.given_head_dim != 0) config["head_dim"] = model.head_dim();
  // Null where nothing is known: an absent key would mean the ids of Llama's or OLMo's own tokenizer.
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    config[key] = origin != nullptr && origin->contains(key) ? origin->at(key) : json();
  }
  return config.dump(2) + "\n";
}

std::optional<std::string> huggingface_dtype(const json& config) {
  const auto found = config.find(dtype_key(config));
  if (found == config.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

std::string with_huggingface_dtype(const std::string& config_text, DType dtype) {
  ordered_json config = ordered_json::parse(config_text);
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = huggingface_name_of(dtype);
  return config.dump(2) + "\n";
}

std::string huggingface_name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    default: throw_internal("transformers' models are not in {}", name_of(dtype));
  }
}

}  // namespace parka
