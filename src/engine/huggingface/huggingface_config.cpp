#include "engine/huggingface/huggingface_config.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/config_reader.h"
#include "engine/huggingface/llava_config.h"

namespace parka {
namespace {

using Reader = ConfigReader;

const HuggingFaceFamily& family_of(const Reader& config, std::span<const HuggingFaceFamily> families) {
  const std::string type = config.text("model_type", "");
  const HuggingFaceFamily* family = find_family(type, families);
  if (family == nullptr) {
    config.fail("model_type \"{}\" is not supported; {}, {} ({}) are", printable(type), names_of(families),
                kLlavaModelType, kLlavaArchitecture);
  }
  const json* architectures = config.find("architectures");
  if (architectures == nullptr || *architectures == json{family->architecture}) return *family;
  config.fail("architectures {} is not supported; {} is", printable(architectures->dump()), family->architecture);
}

// Refuses a setting of the family's models in transformers that Parka does not have.
void check_fixed_key(const Reader& config, const FixedKey& fixed) {
  const json& usual = fixed.accepted.front();
  if (fixed.presence == Presence::kRequired && !config.has(fixed.key)) {
    config.fail("has no {}, and its default is not supported; {} is", fixed.key, usual.dump());
  }
  const json* value = config.find(fixed.key);
  if (value == nullptr || std::ranges::find(fixed.accepted, *value) != fixed.accepted.end()) {
    return;
  }
  config.fail("{} = {} is not supported; {} is", fixed.key, printable(value->dump()), usual.dump());
}

constexpr std::pair<RopeScalingKind, std::string_view> kRopeTypes[] = {{RopeScalingKind::kNone, "default"},
                                                                       {RopeScalingKind::kLinear, "linear"},
                                                                       {RopeScalingKind::kLlama3, "llama3"},
                                                                       {RopeScalingKind::kYarn, "yarn"}};

RopeScalingKind rope_type(const Reader& rope) {
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  for (const auto& [kind, name] : kRopeTypes) {
    if (name == type) return kind;
  }
  rope.fail("rope_type = \"{}\" is not supported; default, linear, llama3 and yarn are", printable(type));
}

// Absent: 0.1 ln factor + 1, unless two other keys say what it is.
double yarn_attention_factor(const Reader& rope, double factor) {
  if (rope.find("attention_factor") != nullptr) {
    const double given = rope.number("attention_factor");
    if (given <= 0) rope.fail("attention_factor = {} is not supported; more than 0 is", given);
    return given;
  }
  const double of_factor = rope.number("mscale", 0.0), of_all = rope.number("mscale_all_dim", 0.0);
  if (of_factor == 0 || of_all == 0 || factor <= 1) return 0;
  return (0.1 * of_factor * std::log(factor) + 1) / (0.1 * of_all * std::log(factor) + 1);
}

// All published models have it.
void require_usual(const Reader& rope, const char* key, double given, double usual) {
  if (given != usual) rope.fail("{} = {} is not supported; {} is", key, given, usual);
}

void read_rope_scaling(const Reader& rope, int64_t max_positions, RopeScalingConfig& scaling) {
  if (rope.number("partial_rotary_factor", 1.0) != 1) {
    rope.fail("partial_rotary_factor = {} is not supported; 1 is", rope.number("partial_rotary_factor"));
  }
  scaling.kind = rope_type(rope);
  if (scaling.kind == RopeScalingKind::kNone) return;
  scaling.factor = rope.number("factor");
  if (scaling.kind == RopeScalingKind::kLinear) return;
  if (scaling.kind == RopeScalingKind::kLlama3) {
    require_usual(rope, "low_freq_factor", rope.number("low_freq_factor"), scaling.low_frequency_factor);
    require_usual(rope, "high_freq_factor", rope.number("high_freq_factor"), scaling.high_frequency_factor);
    scaling.original_length = rope.integer("original_max_position_embeddings");
    return;
  }
  for (const auto& [key, usual] : {std::pair("beta_fast", scaling.beta_fast), {"beta_slow", scaling.beta_slow}}) {
    const double given = rope.number(key, 0.0);
    if (given != 0) require_usual(rope, key, given, usual);  // transformers takes 0 for an absent key here
  }
  if (!rope.flag("truncate", true)) rope.fail("truncate = false is not supported; true is");
  scaling.attention_factor = yarn_attention_factor(rope, scaling.factor);
  scaling.original_length = rope.integer("original_max_position_embeddings", max_positions);
}

constexpr std::string_view kWindowed = "sliding_attention", kFull = "full_attention";

// Before version 5 of transformers: rope_theta, and rope_scaling or null. Since then: rope_parameters with both.
void read_rope(const Reader& config, const std::string& where, const HuggingFaceModel& read, ModelConfig& model) {
  model.rope_theta = config.number("rope_theta", read.family->rope_theta);
  const json* scaling = config.find("rope_scaling");  // an empty one counts as absent
  const bool has_scaling = scaling != nullptr && *scaling != json::object();
  const char* key = has_scaling ? "rope_scaling" : "rope_parameters";
  const json* object = config.find(key);
  if (object == nullptr) return;
  if (!object->is_object()) config.fail("{}: expected an object, got {}", key, describe_json(*object));
  for (const std::string_view type : {kFull, kWindowed}) {
    if (object->contains(type))
      config.fail("{}: {} is not supported: all layers of this family are alike", key, type);
  }
  const Reader rope(*object, fmt::format("{}: {}", where, key));
  model.rope_theta = rope.number("rope_theta", model.rope_theta);
  read_rope_scaling(rope, read.max_positions, model.rope_scaling);
}

// For layers with a window: `local` has their rope_parameters or is null, `theta` is that of the whole config.
void read_local_rope(const Reader& config, const std::string& where, const json& local, double theta,
                     const HuggingFaceFamily& family, ModelConfig& model) {
  const std::string_view key = family.local_rope_theta_key;
  double local_theta = local.is_null() ? model.rope_theta : theta;
  if (!key.empty()) local_theta = config.number(key, family.local_rope_theta);
  if (!local.is_null()) {
    const Reader of_local(local, where);
    local_theta = of_local.number("rope_theta", local_theta);
    if (rope_type(of_local) != RopeScalingKind::kNone) {
      of_local.fail("rope_type = \"{}\" is not supported; default is", of_local.text("rope_type", ""));
    }
  }
  if (model.sliding_window == 0) return;  // no layer has one
  if (model.full_attention_every != 0) {
    if (local_theta != model.rope_theta) model.local_rope_theta = local_theta;
  } else {  // all layers have one
    model.rope_theta = local_theta;
    model.rope_scaling = {};
  }
}

// The same where layers are of two types. rope_parameters has what belongs to each; without it theta is that of
// both, unless the family has a key for the other, and rope_scaling is of full attention.
void read_rope_of_types(const Reader& config, const std::string& where, const HuggingFaceModel& read,
                        ModelConfig& model) {
  const HuggingFaceFamily& family = *read.family;
  const double theta = config.number("rope_theta", family.rope_theta);
  json full = json::object(), local;
  const auto take = [&](const json* from, const std::string& name, json& to) {
    if (from == nullptr) return;
    if (!from->is_object()) config.fail("{}: expected an object, got {}", name, describe_json(*from));
    to.update(*from);
  };
  if (const json* parameters = config.find("rope_parameters"); parameters != nullptr) {
    const bool of_types = parameters->contains(kFull) || parameters->contains(kWindowed);
    if (of_types) {
      const Reader each(*parameters, where);
      local = json::object();
      take(each.find(kFull), fmt::format("rope_parameters: {}", kFull), full);
      take(each.find(kWindowed), fmt::format("rope_parameters: {}", kWindowed), local);
    } else {  // which transformers takes for neither
      config.fail("rope_parameters: has neither {} nor {}", kFull, kWindowed);
    }
  }
  take(config.find("rope_scaling"), "rope_scaling", full);

  const Reader of_full(full, fmt::format("{}: {}", where, kFull));
  model.rope_theta = of_full.number("rope_theta", theta);
  read_rope_scaling(of_full, read.max_positions, model.rope_scaling);
  read_local_rope(config, fmt::format("{}: {}", where, kWindowed), local, theta, family, model);
}

std::vector<std::string> layer_types_of(const ModelConfig& model) {
  std::vector<std::string> types;
  for (int64_t l = 0; l < model.num_layers; ++l) types.emplace_back(model.is_windowed(l) ? kWindowed : kFull);
  return types;
}

// Sets full_attention_every, and no window where no layer has it.
void read_layer_types(const Reader& config, int64_t usual_every, ModelConfig& model) {
  const json* types = config.find("layer_types");
  const int64_t window = model.sliding_window;
  model.sliding_window = 1;  // any, while layers are compared
  const auto is_like = [&](int64_t every) {
    model.full_attention_every = every;
    return json(layer_types_of(model)) == *types;
  };
  if (types == nullptr) {
    model.full_attention_every = usual_every <= model.num_layers ? usual_every : 0;
  } else {
    int64_t every = 0;
    while (every <= model.num_layers && !is_like(every)) ++every;
    if (every > model.num_layers) {
      config.fail("layer_types is not supported; one {} in every so many, counted from the first, is", kFull);
    }
  }
  model.sliding_window = window;
  if (model.full_attention_every == 1) {
    model.full_attention_every = model.sliding_window = 0;
  } else if (window == 0) {
    config.fail("sliding_window is null, and layer_types has {}", kWindowed);
  }
}

json rope_scaling_of(const RopeScalingConfig& scaling) {
  if (scaling.kind == RopeScalingKind::kNone) return nullptr;
  const auto* type =
      std::ranges::find_if(kRopeTypes, [&](const auto& entry) { return entry.first == scaling.kind; });
  json written = {{"factor", scaling.factor}, {"rope_type", type->second}};
  if (scaling.kind == RopeScalingKind::kLinear) return written;
  written["original_max_position_embeddings"] = scaling.original_length;
  if (scaling.kind == RopeScalingKind::kLlama3) {
    written["high_freq_factor"] = scaling.high_frequency_factor;
    written["low_freq_factor"] = scaling.low_frequency_factor;
    return written;
  }
  written["beta_fast"] = scaling.beta_fast;
  written["beta_slow"] = scaling.beta_slow;
  if (scaling.attention_factor > 0) written["attention_factor"] = scaling.attention_factor;
  return written;
}

// Beside rope_theta and rope_scaling, from which version 5 of transformers takes no theta for layers with a window.
void write_layer_types(const HuggingFaceFamily& family, const ModelConfig& model, json& config) {
  json full = rope_scaling_of(model.rope_scaling);
  if (full.is_null()) full = {{"rope_type", "default"}};
  full["rope_theta"] = model.rope_theta;
  config["rope_parameters"] = {
      {kFull, full}, {kWindowed, {{"rope_theta", model.windowed_rope_theta()}, {"rope_type", "default"}}}};
  if (!family.local_rope_theta_key.empty()) config[family.local_rope_theta_key] = model.windowed_rope_theta();
  config["layer_types"] = layer_types_of(model);
}

// Fields where 0 stands for what follows from others are spelled out.
template <typename T>
void write_key(const ConfigKey<T>& key, const ModelConfig& model, json& config) {
  if (key.omitted_if_otherwise && key.field.in(model) == key.otherwise) return;
  ModelConfig spelled_out = model;
  spelled_out.num_kv_heads = model.kv_heads();
  spelled_out.given_head_dim = model.head_dim();
  spelled_out.query_pre_attn_scalar = model.pre_attn_scalar();
  if (key.of_null && key.field.in(spelled_out) == key.of_null) {
    config[key.key] = nullptr;
    return;
  }
  config[key.key] = key.field.in(spelled_out);
}

// What the keys of a family with experts do not give as they are.
void read_moe(const Reader& config, const HuggingFaceFamily& family, ModelConfig& model) {
  if (!family.dense_width_key.empty() && model.moe.dense_layers > 0) {
    model.moe.dense_width = config.integer(family.dense_width_key);
  }
  if (!family.shared_experts_key.empty()) {
    model.moe.shared_width = config.integer(family.shared_experts_key) * model.d_ffn;
  }
  constexpr int64_t kMostInAll = 1 << 17;  // each has tensors of its own
  if (model.moe.num_experts * model.num_layers > kMostInAll) {
    config.fail("num_hidden_layers = {} of {} experts are not supported; {} experts in all are", model.num_layers,
                model.moe.num_experts, kMostInAll);
  }
  if (family.max_window_layers == 0) return;
  const json* types = config.find("layer_types");
  const bool is_null = config.has("sliding_window") && config.find("sliding_window") == nullptr;
  const int64_t first = config.integer("max_window_layers", family.max_window_layers, 0);
  const bool has_window = types != nullptr ? std::ranges::find(*types, json(kWindowed)) != types->end()
                                           : !is_null && first < model.num_layers;
  if (has_window) {
    config.fail(
        "layer_types, or max_window_layers without it, gives layers a sliding_window, which is not supported");
  }
}

void write_moe(const HuggingFaceFamily& family, const ModelConfig& model, json& config) {
  if (!family.dense_width_key.empty() && model.moe.dense_layers > 0) {
    config[family.dense_width_key] = model.moe.dense_width;
  }
  if (!family.shared_experts_key.empty()) config[family.shared_experts_key] = model.moe.shared_width / model.d_ffn;
  if (family.max_window_layers > 0) config["sliding_window"] = nullptr;
}

const char* dtype_key(const json& config) { return config.contains("dtype") ? "dtype" : "torch_dtype"; }

}  // namespace

HuggingFaceModel parse_huggingface_config(const json& root, const std::string& where,
                                          std::span<const HuggingFaceFamily> families) {
  if (!root.is_object()) throw_bad_input("{}: expected an object, got {}", where, describe_json(root));
  const Reader config(root, where);
  if (config.text("model_type", "") == kLlavaModelType) return parse_llava_config(root, where, families);
  const HuggingFaceFamily& family = family_of(config, families);
  for (const FixedKey& fixed : family.fixed_keys) check_fixed_key(config, fixed);
  HuggingFaceModel result{.family = &family, .model = family.fixed};
  ModelConfig& model = result.model;
  for (const ModelKey& entry : family.keys) {
    std::visit([&](const auto& key) { config.read(key, model); }, entry);
  }
  read_moe(config, family, model);
  model.num_kv_heads = model.kv_heads();
  if (model.given_head_dim == model.d_model / model.num_heads) model.given_head_dim = 0;
  if (model.query_pre_attn_scalar == model.head_dim()) model.query_pre_attn_scalar = 0;
  result.max_positions = config.integer("max_position_embeddings", family.max_positions);
  if (family.full_attention_every > 0) {
    const std::string_view key = family.full_attention_every_key;
    const int64_t usual_every = family.full_attention_every;
    read_layer_types(config, key.empty() ? usual_every : config.integer(key, usual_every), model);
    read_rope_of_types(config, where, result, model);
  } else {
    read_rope(config, where, result, model);
  }
  // transformers prefers it to that of the scaling.
  if (model.rope_scaling.kind != RopeScalingKind::kNone &&
      config.find("original_max_position_embeddings") != nullptr) {
    config.fail("original_max_position_embeddings is supported in rope_parameters and rope_scaling only");
  }
  check_huggingface_model(model, where);
  return result;
}

bool leaves_local_theta_open(const HuggingFaceModel& read, const json& config) {
  const HuggingFaceFamily& family = *read.family;
  if (family.full_attention_every == 0 || !family.local_rope_theta_key.empty()) return false;
  if (read.model.sliding_window == 0 || read.model.windowed_rope_theta() == family.rope_theta) return false;
  const json::json_pointer theta(fmt::format("/rope_parameters/{}/rope_theta", kWindowed));
  return !config.contains(theta) || config.at(theta).is_null();
}

void check_huggingface_model(const ModelConfig& model, const std::string& where) {
  Config whole;
  whole.model = model;
  if (model.vision.exists()) whole.data.images_per_sequence = 1;
  try {
    validate(whole);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("{}: not a model that Parka supports: {}", where, error.what()));
  }
}

std::string make_huggingface_config(const HuggingFaceModel& described, DType dtype, const json* origin) {
  const ModelConfig& model = described.model;
  const HuggingFaceFamily& family = *described.family;
  if (model.vision.exists()) return make_llava_config(described, dtype, origin);
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
  write_moe(family, model, config);
  if (family.full_attention_every > 0) write_layer_types(family, model, config);
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
  ordered_json config = parse_ordered_json_if_valid(config_text);
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = huggingface_name_of(dtype);
  for (const char* part : {"text_config", "vision_config"}) {
    if (!config.contains(part) || !config.at(part).is_object()) continue;
    for (const char* key : {"dtype", "torch_dtype"}) {
      if (config.at(part).contains(key)) config[part][key] = huggingface_name_of(dtype);
    }
  }
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
