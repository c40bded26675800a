#pragma once
#include <algorithm>
#include <cstdint>

#include "core/element_box.h"
#include "core/memory/memory_plan.h"
#include "core/mesh.h"
#include "core/tensor.h"

namespace parka {

// How flat tensors are divided over the ranks of a group. Each rank has one piece of every tensor: as many elements
// on every rank, the last ones padded, and a multiple of kGroup, so that groups of an optimizer state are the same
// however many ranks there are. One rank has everything, and nothing is padded.
struct Shard {
  static constexpr int64_t kGroup = 128;  // kMomentGroup

  int64_t rank = 0;
  int64_t size = 1;

  // Elements of a piece of a tensor of `numel` elements, padding included.
  int64_t piece(int64_t numel) const {
    return size == 1 ? numel : ceil_div(ceil_div(numel, kGroup), size) * kGroup;
  }
  // The size of all pieces together.
  int64_t padded(int64_t numel) const { return size * piece(numel); }
  // The elements that exist of a rank's piece; none, on the last ranks, of a small tensor.
  ElementRange range(int64_t numel, int64_t of_rank) const {
    return {std::min(numel, of_rank * piece(numel)), std::min(numel, (of_rank + 1) * piece(numel))};
  }
  ElementRange own(int64_t numel) const { return range(numel, rank); }
  // This rank's part of a box, of a tensor of `numel` elements, that all ranks of the group have: flat where the
  // box is one run, whole rows of it otherwise.
  ElementBox own(const ElementBox& box, int64_t numel) const {
    if (box.is_one_run()) {
      const int64_t first = box.run(0).begin;
      const ElementRange part = own(box.numel());
      return ElementBox::flat({first + part.begin, first + part.end}, numel);
    }
    const int64_t rows = ceil_div(box.rows.size(), size), end = box.rows.end;
    const int64_t begin = std::min(end, box.rows.begin + rank * rows);
    return {{begin, std::min(end, begin + rows)}, box.columns, box.row_length};
  }

  bool operator==(const Shard&) const = default;
};

// The ranks of a run, and what ZeRO divides over those of a Peers::kShard group; each rank holds the rest whole.
struct Zero {
  int64_t stage = 0;  // 0: nothing; 1: masters and moments; 2: and gradients; 3: and weights
  Mesh mesh = {};

  Shard shard() const { return stage == 0 ? Shard{} : shard_among(Peers::kShard); }
  // This rank's among the ranks that have the same experts.
  Shard shard_of_experts() const { return stage == 0 ? Shard{} : shard_among(Peers::kExpertShard); }
  bool shards_states() const { return stage >= 1 && mesh.size(Peers::kShard) > 1; }
  bool shards_gradients() const { return stage >= 2 && mesh.size(Peers::kShard) > 1; }
  bool shards_weights() const { return stage >= 3 && mesh.size(Peers::kShard) > 1; }
  int64_t expert_places() const { return mesh.size(Peers::kExpert); }

 private:
  Shard shard_among(Peers peers) const { return {mesh.place(peers), mesh.size(peers)}; }
};

// Where a parameter lives: the memory of its weight, and the ranks over which each of its tensors is divided. They
// are those of Peers::kShard, and of experts that ranks divide Peers::kExpertShard.
struct Placement {
  MemoryPlace memory = MemoryPlace::kDevice;  // of the weight in the compute format; if host, of the states as well
  Shard weight = {};                          // in the compute format; a divided one is gathered before each use
  Shard gradient = {};                        // the sum over micro-batches
  Shard states = {};                          // masters and moments: a rank updates the elements that it has
  // By expert: a parameter is the part with the experts of this place, and all that is divided above is of it.
  int64_t expert_place = 0, expert_places = 1;

  bool is_by_expert() const { return expert_places > 1; }
  // Consecutive ranks that have different parts of the states; those after them have copies.
  int64_t num_parts() const { return states.size * expert_places; }
  Peers peers() const { return is_by_expert() ? Peers::kExpertShard : Peers::kShard; }
};

}  // namespace parka
