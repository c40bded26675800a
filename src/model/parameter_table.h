#pragma once
#include <cstdint>
#include <vector>

#include "core/parameter.h"
#include "core/shard.h"
#include "model/model_config.h"

namespace parka {

// Indices into ParameterTable::all of one block's weights; -1 where the model has none.
struct BlockParameters {
  int attention_norm = -1;  // [d]                    rmsnorm only
  int qkv = -1;             // [(H + 2 Hkv) * D, d]   rows: queries, keys, values
  int attention_out = -1;   // [d, H * D]
  int ffn_norm = -1;        // [d]                    rmsnorm only
  int up_gate = -1;         // [2 f, d]               rows: up, gate
  int down = -1;            // [d, f]
};

// All parameter tensors in the order in which forward uses them. Linear weights are [out, in], as in PyTorch.
struct ParameterTable {
  std::vector<ParameterInfo> all;
  int embedding = -1;  // [V, d]
  std::vector<BlockParameters> blocks;
  int final_norm = -1;  // [d]    rmsnorm only
  int head = -1;        // [V, d]; the embedding's index when tied

  int num_units() const { return static_cast<int>(blocks.size()) + 2; }
  int block_unit(int64_t l) const { return static_cast<int>(l) + 1; }
  int head_unit() const { return num_units() - 1; }
  // Indices of a unit's parameters. A tied head's weight is in unit 0.
  std::vector<int> unit(int index) const;
  // Of those, the weights that a block's GEMMs read.
  std::vector<int> linear_weights(int unit) const;
  bool ties_head() const { return head == embedding; }

  int64_t num_parameters() const;
  // Without the input embedding (a tied table counts, as the head): what FLOPs per token are counted from.
  int64_t num_compute_parameters() const;
};

// Decayed are the linear weights, an untied head included; the embedding (and so a tied head) only on request.
// Throws Error(kBadInput) for more than 1e13 parameters: sums and products of their numbers stay far below 2^63.
ParameterTable make_parameter_table(const ModelConfig& config, bool decay_embeddings);

// The initial fp32 values of elements [range.begin, range.end) of parameter `index`: a pure function of (config,
// index, seed), whatever the number of ranks.
//   mitchell (OLMo): normal, cut at 3 standard deviations; std 1/sqrt(d) for embedding, QKV, up/gate and head,
//                    1/sqrt(2 d (l+1)) for attention_out and 1/sqrt(2 f (l+1)) for down of block l (from 0)
//   normal:          N(0, init_std)
// Norm weights are 1.
std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed, ElementRange range);
// All of them.
std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed);

}  // namespace parka
