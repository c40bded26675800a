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

// Rows grouped by token id, in order within each: those of id v are rows[first[v]] .. rows[first[v + 1] - 1].
struct RowsById {
  std::vector<int64_t> first, rows;

  RowsById(const TensorView& ids, int64_t V)
      : first(static_cast<size_t>(V + 1)), rows(static_cast<size_t>(ids.dim[0])) {
    const int32_t* id = ids.as<int32_t>();
    for (int64_t t = 0; t < ids.dim[0]; ++t) ++first[id[t] + 1];
    for (int64_t v = 0; v < V; ++v) first[v + 1] += first[v];
    std::vector<int64_t> next = first;
    for (int64_t t = 0; t < ids.dim[0]; ++t) rows[next[id[t]]++] = t;
  }
};

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
  const int64_t V = a.d_table.dim[0], C = a.d_table.dim[1];
  check_ids("embedding_backward", a.ids, V);
  const RowsById by_id(a.ids, V);
  parallel_for(V, kTokenGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(C)), row(static_cast<size_t>(C));
    for (int64_t v = begin; v < end; ++v) {
      if (by_id.first[v] == by_id.first[v + 1]) continue;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t n = by_id.first[v]; n < by_id.first[v + 1]; ++n) {
        decode_elements(a.d_out, by_id.rows[n] * C, C, row.data());
        add(row, sum);
      }
      decode_elements(a.d_table, v * C, C, row.data());
      add(row, sum);
      encode_elements(sum.data(), v * C, C, a.d_table);
    }
  });
}

}  // namespace parka::cpu
