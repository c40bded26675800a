#pragma once
#include <cstdint>
#include <string>

namespace parka {

// What optimizer and checkpoint need to know of one parameter tensor; the model makes the table of them.
struct ParameterInfo {
  std::string name;  // "blocks.3.qkv", stable across versions: checkpoints use it
  int64_t rows = 0;  // 1 for vectors
  int64_t cols = 0;
  bool decayed = false;  // weight decay applies
  // Position of its first element in the flat parameter space: a multiple of 128, so that optimizer groups are
  // the same however the space is split over ranks.
  int64_t first_element = 0;
  // Parameters of one unit are used at one time, and so gathered and reduced together: 0 is the embedding, 1 + l
  // block l, the last the final norm and the head.
  int unit = 0;
  bool in_block = false;

  int64_t numel() const { return rows * cols; }
};

}  // namespace parka
