#include "kernels/ops/attention/attention.h"

#include <cstring>

#include "core/parallel.h"

namespace parka::cpu {
namespace {

// Calls copy(row of x, first byte in it, byte in parts, bytes) for query, key and value heads of each part's rows.
template <typename Copy>
void for_each_run(const TensorView& parts, int64_t num_heads, int64_t num_kv_heads, const Copy& copy) {
  const int64_t B = parts.dim[0], C = parts.dim[1], L = parts.dim[2], w = parts.dim[3],
                element = size_of(parts.dtype);
  const int64_t D = C * w / (num_heads + 2 * num_kv_heads);
  constexpr int64_t kRows = 16;
  parallel_for(B * C * L, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / (C * L), p = row / L % C, l = row % L;
      int64_t of_part = row * w, of_row = 0;  // elements
      for (const int64_t heads : {num_heads, num_kv_heads, num_kv_heads}) {
        const int64_t run = heads / C * D;
        copy(b * L + l, (of_row + p * run) * element, of_part * element, run * element);
        of_part += run;
        of_row += heads * D;
      }
    }
  });
}

}  // namespace

void split_heads(Device&, const SplitHeads& a) {
  const auto* const x = static_cast<const std::byte*>(a.x.data);
  auto* const parts = static_cast<std::byte*>(a.parts.data);
  const int64_t row_bytes = a.x.dim[1] * size_of(a.x.dtype);
  for_each_run(a.parts, a.num_heads, a.num_kv_heads, [&](int64_t row, int64_t from, int64_t to, int64_t bytes) {
    std::memcpy(parts + to, x + row * row_bytes + from, static_cast<size_t>(bytes));
  });
}

void merge_heads(Device&, const MergeHeads& a) {
  const auto* const parts = static_cast<const std::byte*>(a.parts.data);
  auto* const x = static_cast<std::byte*>(a.x.data);
  const int64_t row_bytes = a.x.dim[1] * size_of(a.x.dtype);
  for_each_run(a.parts, a.num_heads, a.num_kv_heads, [&](int64_t row, int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(x + row * row_bytes + to, parts + from, static_cast<size_t>(bytes));
  });
}

}  // namespace parka::cpu
