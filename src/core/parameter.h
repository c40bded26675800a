#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/placement.h"

namespace parka {

// How a parameter is used.
enum class ParameterRole : uint8_t {
  kEmbedding,      // [V, d], the table of token embeddings
  kTiedEmbedding,  // the same, and the head's weight as well
  kNorm,           // [1, d], the weight of a norm
  kLinear,         // [N, K], the weight of a linear layer in a block
  kExperts,        // [E N, K], the same of each of E experts (ParameterInfo::num_stacked), one below the other
  kRouter,         // [E, d], the weight that gives tokens their experts: never FP8
  kRouterBias,     // [1, E], what decides their choice beside it: fp32, moved by no gradient
  kBias,           // [N, 1], its bias: a number for each row of the weight
  kHead,           // [V, d], the weight of the output head
  kTowerLinear,    // [N, K], the same in a block of a vision tower: FP8 with precision.tower alone
  kPlainLinear,    // [N, K], the weight of another linear layer outside of blocks: never FP8
  kAdapterIn,   // [rank, K], the first factor of what an adapter adds to rows of a linear layer's weight (LoRA's A)
  kAdapterOut,  // [rows, rank], the second one (LoRA's B)
  kGate,        // [1, 1], a learnt scalar that begins at 0
  kMix,         // [1, 1], one that begins at 1
};

// How frozen linear weights of blocks are stored (finetune.base): in the compute format; as the FP8 codes that
// GEMMs read; or in 4 bits, decoded before each product.
enum class BaseFormat : uint8_t { kCompute, kFp8, kNf4, kFp4 };
inline bool is_4bit(BaseFormat base) { return base == BaseFormat::kNf4 || base == BaseFormat::kFp4; }

// Describes one parameter tensor to optimizer and checkpoint. The model makes the table of all.
struct ParameterInfo {
  std::string name;  // "blocks.3.qkv", stable across versions: checkpoints use it
  int64_t rows = 0;  // 1 for the weights of norms
  int64_t cols = 0;
  ParameterRole role = ParameterRole::kLinear;
  bool decayed = false;  // weight decay applies
  // Position of its first element in the flat parameter space: a multiple of 128, so that optimizer groups are
  // the same however the space is split over ranks.
  int64_t first_element = 0;
  // Parameters of one unit are used at the same time, so they are gathered and reduced together. Unit 0 is the
  // embedding, 1 + l is block l, and the last one is the final norm and the head.
  int unit = 0;
  // Standard deviation of the normal distribution for its initial values; 0: initial_weight() says what they are.
  double initial_std = 0;
  Placement placement = {};
  // false: frozen. Nothing updates it, so it has no gradient, no master and no moments.
  bool trainable = true;
  double lr_factor = 1;  // its learning rate, relative to that of the run
  // Whether its products are FP8 where those of others are: those of the backward pass, and that of forward.
  bool quantized = true, quantized_forward = true;
  bool int8_forward = false;  // forward's is of INT8 codes instead (kernels/ops/gemm/int8.h)
  // Other than kCompute: its codes are all that is stored, whole on every rank.
  BaseFormat base = BaseFormat::kCompute;
  // The rows of each matrix where several are stored one below the other: of q, k and v. Empty: it is one.
  std::vector<int64_t> fused_rows = {};
  // Experts whose matrices are stored one below the other; each has FP8 scales of its own.
  int64_t num_stacked = 1;
  int64_t num_active = 1;  // those of them that a token goes through

  int64_t numel() const { return rows * cols; }
  int64_t active_numel() const { return numel() / num_stacked * num_active; }
  // With the experts of all ranks, where they are divided: what a checkpoint has under the name.
  int64_t whole_rows() const { return rows * placement.expert_places; }
  int64_t whole_numel() const { return whole_rows() * cols; }
  // The elements of that which this rank updates: all, or its piece.
  ElementRange own_elements() const {
    const ElementRange own = placement.states.own(numel());
    const int64_t first = placement.expert_place * numel();
    return {first + own.begin, first + own.end};
  }
  bool is_coded() const { return base != BaseFormat::kCompute; }
  // True for the weight of a linear layer in a block, of the decoder or of a tower, or of all experts of one.
  bool is_of_block() const {
    return role == ParameterRole::kLinear || role == ParameterRole::kExperts || role == ParameterRole::kTowerLinear;
  }
};

inline bool is_adapter(const ParameterInfo& p) {
  return p.role == ParameterRole::kAdapterIn || p.role == ParameterRole::kAdapterOut;
}

// Adapters beside the linear layers of blocks (LoRA): a frozen weight's rows W become W + scale * B A.
struct LoraRules {
  int64_t rank = 0;  // 0: no adapters
  double scale = 1;
  std::vector<std::string> targets = {};  // layers by transformers' names: "q_proj"
  double dropout = 0;                     // probability with which each element of an adapter's input counts as 0
  uint64_t seed = 0;                      // of dropout
};

// How a side layer makes s numbers of the d that a frozen layer hands on.
enum class Downsampling : uint8_t {
  kLinear,       // W h
  kLora,         // B A h, with A of `rank` rows
  kAdapter,      // B silu(A h)
  kMaxPool,      // the largest of each group of `reduction` numbers
  kAveragePool,  // their mean
};
inline bool is_pool(Downsampling kind) {
  return kind == Downsampling::kMaxPool || kind == Downsampling::kAveragePool;
}
inline bool has_two_factors(Downsampling kind) {
  return kind == Downsampling::kLora || kind == Downsampling::kAdapter;
}

// The way to join the side network's output u, of width d, and the frozen model's n.
enum class SideMix : uint8_t {
  kAdditive,  // n + u, where the weight that makes u begins at 0
  kPaper,     // a n + (1 - a) u, where the scalar a is learnt and begins at 1
};

// A network beside the model (Quantized Side Tuning, arXiv 2401.07159): for each of its blocks one of width d / r,
// which reads what the block hands on. It is trained, and the model is not.
struct SideRules {
  int64_t reduction = 0;  // r; 0: no side network
  Downsampling downsample = Downsampling::kAdapter;
  int64_t rank = 16;     // of kLora and kAdapter
  int64_t head_dim = 0;  // of its attention; 0: 64, or its width where that is less
  SideMix mix = SideMix::kAdditive;
  bool keeps_fp8 = false;  // what is kept of frozen layers is kept in FP8 groups, else in the compute format

  bool exists() const { return reduction > 0; }
  bool operator==(const SideRules&) const = default;
};
// With what the names of its parameters and buffers begin.
inline constexpr const char* kSide = "side.";

inline bool is_of_side(const ParameterInfo& p) { return p.name.starts_with(kSide); }
// True if it is no weight of a model by itself, but of an adapter or a side network beside it.
inline bool is_added(const ParameterInfo& p) { return is_adapter(p) || is_of_side(p); }

// Rules of training for parameters, by their names. Patterns are those of a shell: *, ? and [...]; * includes dots.
struct ParameterRules {
  std::vector<std::string> frozen = {};  // patterns of parameters that are frozen
  std::vector<std::string> lr_patterns =
      {};                                  // of parameters with a learning rate of their own; the last match counts
  std::vector<double> lr_factors = {};     // as many: ParameterInfo::lr_factor
  LoraRules lora = {};                     // with adapters all other parameters are frozen
  BaseFormat base = BaseFormat::kCompute;  // of linear weights of blocks that are frozen
  SideRules side = {};                     // with a side network all other parameters are frozen
  std::vector<std::string> unquantized = {};  // patterns of weights of products that no recipe makes FP8
  bool int8_forward = false;  // FP8 products of forward alone are INT8 instead, where weights have such
};

}  // namespace parka
