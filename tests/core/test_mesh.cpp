#include <algorithm>
#include <set>

#include "core/mesh.h"
#include "tests/support/catch.h"

namespace parka {
namespace {

constexpr Peers kEach[] = {Peers::kAll,     Peers::kShard,  Peers::kReplicate,
                           Peers::kContext, Peers::kExpert, Peers::kExpertShard};

std::set<int> peers_of(const Mesh& mesh, Peers peers) {
  std::set<int> ranks;
  for (int place = 0; place < mesh.size(peers); ++place) ranks.insert(mesh.rank_at(peers, place));
  return ranks;
}

}  // namespace

TEST_CASE("peers agree on who they are, and each has its place among them", "[core]") {
  for (const int size : {1, 2, 6, 12, 16}) {
    for (int shard = 1; shard <= size; ++shard) {
      for (int context = 1; context <= size; ++context) {
        if (size % shard != 0 || size % context != 0) continue;
        for (int rank = 0; rank < size; ++rank) {
          const Mesh mesh(rank, size, shard, context);
          CHECK(mesh.size(Peers::kAll) == size);
          CHECK(mesh.size(Peers::kShard) * mesh.size(Peers::kReplicate) == size);
          for (const Peers peers : kEach) {
            const std::set<int> ranks = peers_of(mesh, peers);
            CHECK(static_cast<int>(ranks.size()) == mesh.size(peers));
            CHECK(mesh.rank_at(peers, mesh.place(peers)) == rank);
            for (const int other : ranks) CHECK(peers_of({other, size, shard, context}, peers) == ranks);
          }
          // A rank shares its pieces with those of other groups at its own place.
          for (const int other : peers_of(mesh, Peers::kReplicate)) CHECK(other % shard == rank % shard);
          CHECK(*peers_of(mesh, Peers::kContext).begin() == rank / context * context);
        }
      }
    }
  }
}

TEST_CASE("ranks that divide experts and those that have the same ones are a shard group", "[core]") {
  for (const int size : {1, 2, 6, 12, 16}) {
    for (int shard = 1; shard <= size; ++shard) {
      for (int expert = 1; expert <= shard; ++expert) {
        if (size % shard != 0 || shard % expert != 0) continue;
        for (int rank = 0; rank < size; ++rank) {
          const Mesh mesh(rank, size, shard, 1, expert);
          const std::set<int> shards = peers_of(mesh, Peers::kShard), same = peers_of(mesh, Peers::kExpertShard);
          CHECK(mesh.size(Peers::kExpert) * mesh.size(Peers::kExpertShard) == shard);
          CHECK(*peers_of(mesh, Peers::kExpert).begin() == rank / expert * expert);
          CHECK(std::includes(shards.begin(), shards.end(), same.begin(), same.end()));
          for (const Peers peers : {Peers::kExpertShard, Peers::kReplicate}) {
            for (const int other : peers_of(mesh, peers)) CHECK(other % expert == rank % expert);
          }
          for (const Peers peers : kEach) {
            for (const int other : peers_of(mesh, peers)) {
              CHECK(peers_of({other, size, shard, 1, expert}, peers) == peers_of(mesh, peers));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a node has as many of a group as fit", "[core]") {
  const Mesh mesh(0, 24, 12, 2);
  CHECK(mesh.size_on_node(Peers::kShard, 8) == 8);
  CHECK(mesh.size_on_node(Peers::kReplicate, 8) == 1);
  CHECK(mesh.size_on_node(Peers::kContext, 8) == 2);
  CHECK(Mesh(0, 16, 4, 1).size_on_node(Peers::kReplicate, 8) == 2);
}

TEST_CASE("ranks that cannot be divided so are refused", "[core]") {
  CHECK_THROWS_AS(Mesh(0, 6, 4, 1), Error);
  CHECK_THROWS_AS(Mesh(0, 6, 3, 4), Error);
  CHECK_THROWS_AS(Mesh(6, 6), Error);
  CHECK_THROWS_AS(Mesh(0, 6, 3, 1, 2), Error);
}

}  // namespace parka
