#include "kernels/cpu/embedding.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;
constexpr int64_t kTokenGrain = 8;  // small, because a few tokens have most of the rows

void check_ids(const char* op, const TensorView& ids, int64_t V) {
  const int32_t* id = ids.as<int32_t>();
  for (int64_t t = 0; t < ids.dim[0]; ++t) {
    if (id[t] < 0 || id[t] >= V) {
      throw_bad_input(
          "{}: row {} has token id {}, outside the vocabulary of {}: use data made with a tokenizer that fits", op,
          t, id[t], V);
    }
  }
}

// The positions in `order` where the rows of another token begin, and the end of it. Throws Error(kInternal) when
// `order` is not that of embedding_order.
std::vector<int64_t> run_bounds(const TensorView& ids, const TensorView& order) {
  const int32_t *id = ids.as<int32_t>(), *row = order.as<int32_t>();
  const int64_t T = ids.dim[0];
  std::vector<int64_t> bounds;
  for (int64_t n = 0; n < T; ++n) {
    PARKA_REQUIRE(row[n] >= 0 && row[n] < T);
    const bool another = n == 0 || id[row[n]] != id[row[n - 1]];
    PARKA_REQUIRE(n == 0 || (another ? id[row[n]] > id[row[n - 1]] : row[n] > row[n - 1]));
    if (another) bounds.push_back(n);
  }
  bounds.push_back(T);
  return bounds;
}

void add(const std::vector<float>& x, std::vector<float>& sum) {
  for (size_t c = 0; c < sum.size(); ++c) sum[c] += x[c];
}

}  // namespace

void embedding_forward(Device&, const EmbeddingForward& a) {
  check_ids("embedding_forward", a.ids, a.table.dim[0]);
  const int64_t row_bytes = a.table.dim[1] * size_of(a.table.dtype);
  const int32_t* ids = a.ids.as<int32_t>();
  const std::byte* table = static_cast<const std::byte*>(a.table.data);
  std::byte* out = static_cast<std::byte*>(a.out.data);
  parallel_for(a.ids.dim[0], kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(out + t * row_bytes, table + ids[t] * row_bytes, static_cast<size_t>(row_bytes));
    }
  });
}

void embedding_backward(Device&, const EmbeddingBackward& a) {
  const int64_t C = a.d_table.dim[1];
  check_ids("embedding_backward", a.ids, a.d_table.dim[0]);
  const std::vector<int64_t> bounds = run_bounds(a.ids, a.order);
  const int32_t *ids = a.ids.as<int32_t>(), *order = a.order.as<int32_t>();
  parallel_for(static_cast<int64_t>(bounds.size()) - 1, kTokenGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(C)), piece(sum), row(sum);
    for (int64_t run = begin; run < end; ++run) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t first = bounds[run]; first < bounds[run + 1]; first += kEmbeddingPiece) {
        std::fill(piece.begin(), piece.end(), 0.0f);
        for (int64_t n = first; n < std::min(first + kEmbeddingPiece, bounds[run + 1]); ++n) {
          decode_elements(a.d_out, order[n] * C, C, row.data());
          add(row, piece);
        }
        add(piece, sum);
      }
      const int64_t target = ids[order[bounds[run]]] * C;
      decode_elements(a.d_table, target, C, row.data());
      add(row, sum);
      encode_elements(sum.data(), target, C, a.d_table);
    }
  });
}

}  // namespace parka::cpu
