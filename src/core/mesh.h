#pragma once
#include <algorithm>
#include <array>

#include "core/error.h"

namespace parka {

// Which ranks take part in a collective: those that differ along some axes of the mesh, and agree along the others.
enum class Peers {
  kAll,
  kShard,        // ranks that divide states, gradients or weights (ZeRO)
  kReplicate,    // ranks that have the same pieces: one of each kShard group
  kContext,      // ranks that share each sequence
  kExpert,       // ranks that divide the experts of a mixture, each with whole ones
  kExpertShard,  // ranks of a kShard group that have the same experts
};
inline constexpr int kNumPeers = 6;
inline constexpr Peers kAllPeers[kNumPeers] = {Peers::kAll,     Peers::kShard,  Peers::kReplicate,
                                               Peers::kContext, Peers::kExpert, Peers::kExpertShard};

// The ranks of a run, ordered along axes. Ranks along an axis are `stride` apart, so that groups of consecutive
// ranks have stride 1. Axes may overlap: those that share a sequence may divide the states, too.
class Mesh {
 public:
  Mesh() : Mesh(0, 1) {}
  // All ranks divide what is divided, and none share a sequence.
  Mesh(int rank, int size) : Mesh(rank, size, size, 1) {}
  // `shard_size` and `context_size` divide `size`, and `expert_size` divides `shard_size`.
  Mesh(int rank, int size, int shard_size, int context_size, int expert_size = 1)
      : rank_(rank),
        axes_{{{1, size},
               {1, shard_size},
               {shard_size, size / shard_size},
               {1, context_size},
               {1, expert_size},
               {expert_size, shard_size / expert_size}}} {
    PARKA_REQUIRE(rank >= 0 && rank < size && size % shard_size == 0 && size % context_size == 0);
    PARKA_REQUIRE(shard_size % expert_size == 0);
  }

  int rank() const { return rank_; }
  int size(Peers peers) const { return axis(peers).size; }
  // This rank's place among its peers, 0 to size() - 1.
  int place(Peers peers) const { return rank_ / axis(peers).stride % axis(peers).size; }
  // The rank at a place among this rank's peers.
  int rank_at(Peers peers, int place) const { return rank_ + (place - this->place(peers)) * axis(peers).stride; }
  // True if the peers are neither this rank alone nor all ranks. kExpertShard counts where ranks divide experts.
  bool is_group(Peers peers) const {
    if (peers == Peers::kExpertShard && size(Peers::kExpert) == 1) return false;
    return size(peers) > 1 && size(peers) < size(Peers::kAll);
  }
  // How many of the peers are on one node, where each node has `per_node` consecutive ranks.
  int size_on_node(Peers peers, int per_node) const {
    return std::min(axis(peers).size, std::max(1, per_node / axis(peers).stride));
  }

  bool operator==(const Mesh&) const = default;

 private:
  struct Axis {
    int stride, size;
    bool operator==(const Axis&) const = default;
  };
  const Axis& axis(Peers peers) const { return axes_[static_cast<size_t>(peers)]; }

  int rank_;
  std::array<Axis, kNumPeers> axes_;
};

}  // namespace parka
