#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/files/json.h"
#include "model/model_config.h"

// The families of models that Parka reads and writes in Hugging Face format. A family is one entry in the table of
// huggingface_families(); import and export use nothing else about it.
namespace parka {

// A field of a model, or of its mixture of experts.
template <typename T>
struct ModelField {
  ModelField(T ModelConfig::*field) : own(field) {}       // NOLINT(google-explicit-constructor)
  ModelField(T MoeConfig::*field) : of_experts(field) {}  // NOLINT(google-explicit-constructor)

  template <typename Model>
  auto& in(Model& model) const {
    return own != nullptr ? model.*own : model.moe.*of_experts;
  }
  bool operator==(const ModelField&) const = default;

  T ModelConfig::*own = nullptr;
  T MoeConfig::*of_experts = nullptr;
};

// A key of config.json that gives a field of the model.
template <typename T>
struct ConfigKey {
  std::string_view key;
  ModelField<T> field;
  std::optional<T> otherwise = {};    // what transformers takes where the key is absent or null; nullopt: refused
  bool omitted_if_otherwise = false;  // whether an export leaves the key out where the field has that value
  std::optional<T> of_null = {};      // what null stands for and is written for, where that is not `otherwise`
  std::string_view alias = {};        // of version 5 of transformers: read where `key` is absent
  bool may_be_zero = false;
};
using IntegerKey = ConfigKey<int64_t>;  // 1 to kMaxDimension; `otherwise` may be 0 where the field may
using RealKey = ConfigKey<double>;
using FlagKey = ConfigKey<bool>;
using ModelKey = std::variant<IntegerKey, RealKey, FlagKey>;

enum class Presence : uint8_t {
  kOptional,  // an import may lack the key, an export leaves it out
  kWritten,   // an import may lack it, an export has it
  kRequired,  // an import must have it, since an absent key stands for another value; an export has it
};

// A key of config.json that must have one of a few values, because Parka has nothing for the others.
struct FixedKey {
  std::string_view key;
  std::vector<json> accepted;  // the first is what an export writes, and what null stands for
  Presence presence = Presence::kOptional;
};

// The content of a tensor in a block: a Parka parameter, or rows of one, because Parka keeps queries, keys and
// values, and up and gate, as one matrix each.
enum class BlockTensor : uint8_t {
  kQuery,
  kKey,
  kValue,
  kAttentionOut,
  kQueryBias,
  kKeyBias,
  kValueBias,
  kQueryNorm,
  kKeyNorm,
  kGate,
  kUp,
  kDown,
  kAttentionNorm,
  kFfnNorm,
  kAttentionPostNorm,
  kFfnPostNorm,
  kRouter,
  kRouterBias,
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kSharedGate,
  kSharedUp,
  kSharedDown,
};

struct TensorNames {
  struct InBlock {
    BlockTensor holds;
    std::string_view name;  // after the block's prefix: "self_attn.q_proj.weight"; * is the number of an expert
  };
  std::string_view embedding = "model.embed_tokens.weight";
  std::string_view blocks = "model.layers.";  // the prefix of block N is this, N and a dot
  std::vector<InBlock> in_block;              // in transformers' order; a block has those of its parameters
  std::string_view final_norm = {};           // empty: its models have no weights there
  std::string_view head = "lm_head.weight";   // absent where it is tied
};

struct HuggingFaceFamily {
  std::string_view model_type;    // "llama"
  std::string_view architecture;  // "LlamaForCausalLM"
  // The fields that no key of config.json gives have these values in all models of the family.
  ModelConfig fixed;
  std::vector<ModelKey> keys;
  std::vector<FixedKey> fixed_keys;
  // The value of transformers if config.json has no such key.
  double rope_theta = 10000.0;
  int64_t max_positions = 2048;
  // For families with a list of `layer_types` and with angles of each type: without the list one layer in so many
  // has full attention, and angles of layers with a window are not scaled. 0: all layers are alike.
  int64_t full_attention_every = 0;
  // For these families the key of another such number, and the key of theta in layers with a window, with the value
  // of transformers if it is absent. Empty: there are none, and theta is that of all layers.
  std::string_view full_attention_every_key = {};
  std::string_view local_rope_theta_key = {};
  double local_rope_theta = 0;
  // For families with experts: the keys of the feed-forward's width in blocks without them, and of the number of
  // shared experts. Empty: there are none.
  std::string_view dense_width_key = {}, shared_experts_key = {};
  // For families with a window in blocks from max_window_layers on, which no block may be here: the value of
  // transformers if there is no such key. 0: it means nothing.
  int64_t max_window_layers = 0;
  TensorNames tensors;
};

// All families. If several can express a model, an export chooses the first.
std::span<const HuggingFaceFamily> huggingface_families();
// "llama (LlamaForCausalLM), olmo (OlmoForCausalLM)".
std::string names_of(std::span<const HuggingFaceFamily> families);
// The family of this model_type; null where there is none.
const HuggingFaceFamily* find_family(std::string_view model_type, std::span<const HuggingFaceFamily> families);

// The fields of `model` that a config.json of the family cannot express, as "model.norm_eps = 1e-05, not 1e-06",
// with the family's value first. Empty if the family can express the model. Its initialisation does not count.
std::vector<std::string> family_problems(const HuggingFaceFamily& family, const ModelConfig& model);

// True if a family can express `model`, so that it can be exported.
bool has_family(const ModelConfig& model);

// The family to export `model` as: that of the model_type `wanted`, unless it is empty; else `origin`, which the
// model comes from, if it can express the model; else the first of `families` that can. Throws Error(kBadInput)
// whose message begins with `where` and says what does not fit.
const HuggingFaceFamily& choose_family(const ModelConfig& model, std::string_view wanted,
                                       const HuggingFaceFamily* origin, const std::string& where,
                                       std::span<const HuggingFaceFamily> families = huggingface_families());

}  // namespace parka
