#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/parameter.h"
#include "core/placement.h"
#include "model/model_config.h"

namespace parka {

// A stack of blocks has a name, with which the names of its parameters and buffers begin. The decoder's is empty.
inline constexpr std::string_view kDecoder{};
// The beginning of the names of block l's parameters: "blocks.3."
std::string block_prefix(std::string_view stack, int64_t l);

// An adapter of a linear layer: two parameters, by their indices.
struct LoraAdapter {
  std::string layer;  // name of the layer's weight
  int64_t first_row = 0,
          rows = 0;  // of that weight; of the first expert's, where A and B of all are stacked as it is
  int in = -1, out = -1;
};

// All parameter tensors in the order in which forward uses them. Linear weights are [out, in], as in PyTorch.
struct ParameterTable {
  explicit ParameterTable(std::vector<ParameterInfo> parameters);

  std::vector<ParameterInfo> all;
  int64_t num_blocks = 0;  // of the decoder
  int embedding = -1;      // [V, d]; in unit 0 with tower and projector
  int final_norm = -1;     // [d]    rmsnorm only
  int head = -1;           // [V, d]; the embedding's index when tied
  std::vector<LoraAdapter> adapters;
  LoraRules lora;
  SideRules side;
  // The lowest unit with a parameter that is trained, at which backward ends.
  int first_trained_unit = 0;

  // The index of the parameter of this name; -1 if the model has none.
  int index_of(const std::string& name) const;
  int num_units() const { return static_cast<int>(num_blocks) + 2; }
  int block_unit(int64_t l) const { return static_cast<int>(l) + 1; }
  int head_unit() const { return num_units() - 1; }
  // The lowest unit through whose own layers gradients go: those of a side network go through none but its own.
  int first_backward_unit() const { return side.exists() ? head_unit() : first_trained_unit; }
  // Indices of a unit's parameters. A tied head's weight is in unit 0.
  std::vector<int> unit(int index) const;
  // The trained ones among them, and those of all units.
  std::vector<int> trained(int unit) const;
  std::vector<int> trained() const;
  bool ties_head() const { return head == embedding; }
  // The same table for a rank that has what `zero` says; `linear_weights` is the memory of those of blocks.
  ParameterTable placed(const Zero& zero, MemoryPlace linear_weights = MemoryPlace::kDevice) &&;
  // True if a parameter is trained whose name begins like this.
  bool trains_any(std::string_view prefix) const;
  // By the parameter's index; false for -1, where the model has none.
  bool is_trainable(int index) const { return index >= 0 && all[static_cast<size_t>(index)].trainable; }

  int64_t num_parameters() const;
  int64_t num_active_parameters() const;  // those that a token uses: its experts alone
  // Those without the input embedding (a tied table counts, as the head): what FLOPs per token are counted from.
  int64_t num_compute_parameters() const;

 private:
  std::unordered_map<std::string, int> by_name_;
};

// True if the name of a product's weight matches one of the patterns of precision.unquantized. A tied head is
// "head".
bool is_unquantized(const std::vector<std::string>& patterns, const ParameterInfo& parameter);
// True if the product in forward may have another format than those of backward: of a decoder's linear layers.
bool has_own_forward(const ParameterInfo& parameter);
// The same of its product in forward: "blocks.0.down.forward".
bool is_forward_unquantized(const std::vector<std::string>& patterns, const ParameterInfo& parameter);

// Layers name their parameters here, in the order in which forward uses them.
class ParameterList {
 public:
  ParameterList(const ModelConfig& model, const LoraRules& lora) : model_(model), lora_(lora) {}

  // Throws Error(kBadInput) where there are more than 1e13 elements by then.
  void add(std::string name, int64_t rows, int64_t cols, ParameterRole role, bool decayed, double initial_std);
  // Says of which matrices a weight consists, which was added last if they are several, and adds the adapters of
  // those that are targets. `prefix` is that of the names of the block's parameters, `layer` and `cols` are those
  // of the weight. With `moe` it is that of the experts of a block, each of these parts.
  struct Part {
    const char* target;  // transformers' name
    int64_t rows;        // after those of the parts before
  };
  void add_matrices(const std::string& prefix, const std::string& layer, int64_t cols,
                    std::initializer_list<Part> parts, const MoeConfig& moe = {});
  // Parameters that are added from here on belong to the next unit.
  void begin_unit() { ++unit_; }
  // For a weight whose `fan_in` inputs are summed into the residual stream after `depth` branches; 0: elsewhere.
  double initial_std(int64_t fan_in, double depth) const;

  std::vector<ParameterInfo> take() { return std::move(all_); }
  std::vector<LoraAdapter> take_adapters() { return std::move(adapters_); }

 private:
  // Says that the weight which was added last is of experts, if there are any, each with matrices of these rows.
  void stack(const MoeConfig& moe, const std::vector<int64_t>& rows);

  const ModelConfig& model_;
  const LoraRules& lora_;
  std::vector<ParameterInfo> all_;
  std::vector<LoraAdapter> adapters_;
  int64_t next_element_ = 0;
  int unit_ = 0;
};

// Decayed are the linear weights, an untied head included; the embedding (and so a tied head) only on request.
// Throws Error(kBadInput) for more than 1e13 parameters: sums and products of their numbers stay far below 2^63.
// Likewise for a pattern of `rules` that no parameter's name matches, and for rules that leave nothing to train.
ParameterTable make_parameter_table(const ModelConfig& config, bool decay_embeddings,
                                    const ParameterRules& rules = {});

// The initial fp32 values of elements [range.begin, range.end) of parameter `index`: a pure function of (config,
// index, seed), whatever the number of ranks.
//   mitchell (OLMo): normal, cut at 3 standard deviations; std 1/sqrt(d) for embedding, QKV, up/gate and head,
//                    1/sqrt(2 d (l+1)) for attention_out and 1/sqrt(2 f (l+1)) for down of block l (from 0)
//   normal:          N(0, init_std)
// Norm weights are 1, or 0 with norm_unit_offset; biases 0. The A of adapters is uniform within +-1/sqrt(K), and B
// is 0. Weights of a side network are normal, with the standard deviation of that uniform distribution.
std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed, ElementRange range);
// All of them.
std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed);

}  // namespace parka
