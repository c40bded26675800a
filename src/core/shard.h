#pragma once
#include <algorithm>
#include <cstdint>

#include "core/tensor.h"

namespace parka {

// How flat tensors are divided over the ranks of a group. Each rank has one piece of every tensor: as many elements
// on every rank, the last ones padded, and a multiple of kGroup, so that groups of an optimizer state are the same
// however many ranks there are. One rank has everything, and nothing is padded.
struct Shard {
  static constexpr int64_t kGroup = 128;  // kMomentGroup

  int64_t rank = 0;
  int64_t size = 1;

  struct Range {
    int64_t begin = 0, end = 0;
    int64_t count() const { return end - begin; }
    bool operator==(const Range&) const = default;
  };

  // Elements of a piece of a tensor of `numel` elements, padding included.
  int64_t piece(int64_t numel) const {
    return size == 1 ? numel : ceil_div(ceil_div(numel, kGroup), size) * kGroup;
  }
  // Of all pieces together.
  int64_t padded(int64_t numel) const { return size * piece(numel); }
  // The elements that exist of a rank's piece; none, on the last ranks, of a small tensor.
  Range range(int64_t numel, int64_t of_rank) const {
    return {std::min(numel, of_rank * piece(numel)), std::min(numel, (of_rank + 1) * piece(numel))};
  }
  Range own(int64_t numel) const { return range(numel, rank); }

  bool operator==(const Shard&) const = default;
};

// What ZeRO divides over the ranks of a run; each rank holds the rest whole.
struct Zero {
  int64_t stage = 0;  // 0: nothing; 1: masters and moments; 2: and gradients; 3: and weights
  Shard shard = {};   // of one rank at stage 0

  bool shards_states() const { return shard.size > 1 && stage >= 1; }
  bool shards_gradients() const { return shard.size > 1 && stage >= 2; }
  bool shards_weights() const { return shard.size > 1 && stage >= 3; }
  bool operator==(const Zero&) const = default;
};

inline Zero make_zero(int64_t stage, int64_t rank, int64_t size) {
  return {stage, stage == 0 ? Shard{} : Shard{rank, size}};
}

}  // namespace parka
