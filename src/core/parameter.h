#pragma once
#include <cstdint>
#include <string>

namespace parka {

// What a parameter is used as.
enum class ParameterRole : uint8_t {
  kEmbedding,      // [V, d], from which tokens' rows are looked up
  kTiedEmbedding,  // the same, and the head's weight as well
  kNorm,           // [1, d], the weight of a norm
  kLinear,         // [N, K], a weight of a block that a GEMM reads
  kHead,           // [V, d], from which logits are made
};

// What optimizer and checkpoint need to know of one parameter tensor; the model makes the table of them.
struct ParameterInfo {
  std::string name;  // "blocks.3.qkv", stable across versions: checkpoints use it
  int64_t rows = 0;  // 1 for vectors
  int64_t cols = 0;
  ParameterRole role = ParameterRole::kLinear;
  bool decayed = false;  // weight decay applies
  // Position of its first element in the flat parameter space: a multiple of 128, so that optimizer groups are
  // the same however the space is split over ranks.
  int64_t first_element = 0;
  // Parameters of one unit are used at one time, and so gathered and reduced together: 0 is the embedding, 1 + l
  // block l, the last the final norm and the head.
  int unit = 0;
  // Standard deviation of the normal distribution that it is drawn from; 0: it starts as ones.
  double initial_std = 0;

  int64_t numel() const { return rows * cols; }
};

}  // namespace parka
