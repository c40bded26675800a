#include "engine/huggingface/huggingface_config.h"

#include <algorithm>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Typed reads of an object's keys. A key that is null counts as absent, as in transformers.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(std::string_view key) const { return object_.contains(key); }
  const json* find(std::string_view key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(std::string_view key, std::optional<int64_t> otherwise = {}) const {
    const json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) fail("has no {}", key);
    if (!value->is_number_integer() || *value < 1 || *value > kMaxDimension) {
      fail("{}: expected an integer from 1 to {}, got {}", key, kMaxDimension, describe_json(*value));
    }
    return value->get<int64_t>();
  }
  double number(std::string_view key, std::optional<double> otherwise = {}) const {
    const json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) fail("has no {}", key);
    if (!value->is_number()) fail("{}: expected a number, got {}", key, describe_json(*value));
    return value->get<double>();
  }
  bool flag(std::string_view key, std::optional<bool> otherwise = {}) const {
    const json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr) fail("has no {}", key);
    if (!value->is_boolean()) fail("{}: expected true or false, got {}", key, describe_json(*value));
    return value->get<bool>();
  }
  std::string text(std::string_view key, const std::string& otherwise) const {
    const json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) fail("{}: expected a string, got {}", key, describe_json(*value));
    return value->get<std::string>();
  }
  // Sets the key's field.
  void read(const IntegerKey& key, ModelConfig& model) const { model.*key.field = integer(key.key, key.otherwise); }
  void read(const RealKey& key, ModelConfig& model) const { model.*key.field = number(key.key, key.otherwise); }
  void read(const FlagKey& key, ModelConfig& model) const { model.*key.field = flag(key.key, key.otherwise); }

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_bad_input("{}: {}", where_, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  const json& object_;
  std::string where_;
};

const HuggingFaceFamily& family_of(const Reader& config, std::span<const HuggingFaceFamily> families) {
  const std::string type = config.text("model_type", "");
  const HuggingFaceFamily* family = find_family(type, families);
  if (family == nullptr) {
    config.fail("model_type \"{}\" is not supported; {} are", printable(type), names_of(families));
  }
  const json* architectures = config.find("architectures");
  if (architectures == nullptr || *architectures == json{family->architecture}) return *family;
  config.fail("architectures {} is not supported; {} is", printable(architectures->dump()), family->architecture);
}

// What the family's models in transformers can do and Parka cannot.
void check_fixed_key(const Reader& config, const FixedKey& fixed) {
  const json& usual = fixed.accepted.front();
  if (fixed.presence == Presence::kRequired && !config.has(fixed.key)) {
    config.fail("has no {}, and its default is not supported; {} is", fixed.key, usual.dump());
  }
  const json* value = config.find(fixed.key);
  if (value == nullptr || std::find(fixed.accepted.begin(), fixed.accepted.end(), *value) != fixed.accepted.end()) {
    return;
  }
  config.fail("{} = {} is not supported; {} is", fixed.key, printable(value->dump()), usual.dump());
}

// Before version 5 of transformers: rope_theta, and rope_scaling or null. Since then: rope_parameters with both.
void read_rope(const Reader& config, const std::string& where, double usual_theta, ModelConfig& model) {
  model.rope_theta = config.number("rope_theta", usual_theta);
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

// Fields where 0 stands for what follows from others are spelled out.
template <typename T>
void write_key(const ConfigKey<T>& key, const ModelConfig& model, json& config) {
  if (key.omitted_if_otherwise && model.*key.field == key.otherwise) return;
  ModelConfig spelled_out = model;
  spelled_out.num_kv_heads = model.kv_heads();
  spelled_out.given_head_dim = model.head_dim();
  config[key.key] = spelled_out.*key.field;
}

const char* dtype_key(const json& config) { return config.contains("dtype") ? "dtype" : "torch_dtype"; }

}  // namespace

HuggingFaceModel parse_huggingface_config(const json& root, const std::string& where,
                                          std::span<const HuggingFaceFamily> families) {
  if (!root.is_object()) throw_bad_input("{}: expected an object, got {}", where, describe_json(root));
  const Reader config(root, where);
  const HuggingFaceFamily& family = family_of(config, families);
  for (const FixedKey& fixed : family.fixed_keys) check_fixed_key(config, fixed);
  HuggingFaceModel result{.family = &family, .model = family.fixed};
  ModelConfig& model = result.model;
  for (const ModelKey& entry : family.keys) {
    std::visit([&](const auto& key) { config.read(key, model); }, entry);
  }
  model.num_kv_heads = model.kv_heads();
  if (model.given_head_dim == model.d_model / model.num_heads) model.given_head_dim = 0;
  read_rope(config, where, family.rope_theta, model);
  result.max_positions = config.integer("max_position_embeddings", family.max_positions);
  Config whole;
  whole.model = model;
  try {
    validate(whole);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: not a model that Parka supports: {}", where, error.what()));
  }
  return result;
}

std::string make_huggingface_config(const HuggingFaceModel& described, DType dtype, const json* origin) {
  const ModelConfig& model = described.model;
  const HuggingFaceFamily& family = *described.family;
  PARKA_REQUIRE(family_problems(family, model).empty());
  json config = {{"architectures", {family.architecture}},
                 {"max_position_embeddings", described.max_positions},
                 {"model_type", family.model_type},
                 {"rope_scaling", rope_scaling_of(model.rope_scaling)},
                 {"rope_theta", model.rope_theta},
                 {dtype_key(origin != nullptr ? *origin : json::object()), huggingface_name_of(dtype)},
                 {"use_cache", true}};
  for (const FixedKey& fixed : family.fixed_keys) {
    if (fixed.presence != Presence::kOptional) config[fixed.key] = fixed.accepted.front();
  }
  for (const ModelKey& entry : family.keys) {
    std::visit([&](const auto& key) { write_key(key, model, config); }, entry);
  }
  // Null where nothing is known: an absent key would mean the ids of the family's own tokenizer.
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
    default: throw_internal("transformers has no name for {}", name_of(dtype));
  }
}

}  // namespace parka
