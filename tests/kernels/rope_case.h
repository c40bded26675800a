#pragma once
#include <cstdint>
#include <string>

#include <fmt/format.h>

namespace parka::test {

// A projection to q, k and v and its rotation.
struct RopeCase {
  int64_t rows, positions, depth;  // T, S, K
  int64_t heads, kv_heads, head_dim;
  int64_t group = 32;
  bool fast = true, one_kernel = true;  // whether a Hopper GPU has one

  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
};

inline std::string describe(const RopeCase& c) {
  return fmt::format("{} x {} x {}, {} and {} heads of {}, groups of {}{}", c.rows, c.width(), c.depth, c.heads,
                     c.kv_heads, c.head_dim, c.group, c.fast ? "" : ", accurate");
}

}  // namespace parka::test
