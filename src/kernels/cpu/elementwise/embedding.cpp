#include "kernels/ops/elementwise/embedding.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;
constexpr int64_t kTokenGrain = 8;  // small, because a few tokens have most of the rows

void check_id(const char* op, int64_t row, int32_t id, int64_t V) {
  if (id >= 0 && id < V) return;
  throw_bad_input(
      "{}: row {} has token id {}, outside the vocabulary of {}: use data made with a tokenizer that fits", op, row,
      id, V);
}

// The rows of one token, in order.
using Run = std::span<const TokenRow>;

// The runs of all tokens, without image slots. Throws Error(kInternal) for an `order` that no ids give.
std::vector<Run> runs_of(const EmbeddingBackward& a) {
  const Run rows(a.rows(), static_cast<size_t>(a.order.dim[0]));
  const auto is_slot = [](const TokenRow& row) { return row.id == kImageSlot; };
  const auto slots = std::find_if(rows.begin(), rows.end(), is_slot);
  PARKA_REQUIRE(std::all_of(slots, rows.end(), is_slot));
  const Run order(rows.begin(), slots);
  std::vector<Run> runs;
  std::vector<bool> seen(rows.size());
  for (size_t begin = 0; begin < order.size(); begin += runs.back().size()) {
    const TokenRow& first = order[begin];
    check_id("embedding_backward", first.row, first.id, a.d_table.dim[0]);
    PARKA_REQUIRE(runs.empty() || first.id > runs.back().front().id);
    PARKA_REQUIRE(first.count >= 1 && first.count <= static_cast<int64_t>(order.size() - begin));
    const Run run = order.subspan(begin, first.count);
    for (size_t n = 0; n < run.size(); ++n) {
      const TokenRow& row = run[n];
      PARKA_REQUIRE(row.id == first.id && row.rank == static_cast<int64_t>(n) && row.count == first.count);
      PARKA_REQUIRE(row.row >= 0 && row.row < a.order.dim[0] && !seen[row.row]);
      PARKA_REQUIRE(n == 0 || row.row > run[n - 1].row);
      seen[row.row] = true;
    }
    runs.push_back(run);
  }
  return runs;
}

void check_position(const char* op, int64_t n, int32_t position, int64_t T) {
  if (position < T) return;
  throw_bad_input("{}: feature {} has position {}, and there are {} rows: give it one of them, or a negative one",
                  op, n, position, T);
}

void add(const std::vector<float>& x, std::vector<float>& sum) {
  for (size_t c = 0; c < sum.size(); ++c) sum[c] += x[c];
}

}  // namespace

void embedding_forward(Device&, const EmbeddingForward& a) {
  const int64_t C = a.table.dim[1], row_bytes = C * size_of(a.table.dtype);
  const int32_t* ids = a.ids.as<int32_t>();
  for (int64_t t = 0; t < a.ids.dim[0]; ++t) {
    if (ids[t] != kImageSlot) check_id("embedding_forward", t, ids[t], a.table.dim[0]);
  }
  const std::byte* table = static_cast<const std::byte*>(a.table.data);
  std::byte* out = static_cast<std::byte*>(a.out.data);
  parallel_for(a.ids.dim[0], kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(a.scale == 1 ? 0 : C));
    for (int64_t t = begin; t < end; ++t) {
      if (ids[t] == kImageSlot) continue;
      if (a.scale == 1) {
        std::memcpy(out + t * row_bytes, table + ids[t] * row_bytes, static_cast<size_t>(row_bytes));
        continue;
      }
      decode_elements(a.table, ids[t] * C, C, row.data());
      for (float& x : row) x *= a.scale;
      encode_elements(row.data(), t * C, C, a.out);
    }
  });
}

void embedding_backward(Device&, const EmbeddingBackward& a) {
  const int64_t C = a.d_table.dim[1];
  const std::vector<Run> runs = runs_of(a);
  parallel_for(static_cast<int64_t>(runs.size()), kTokenGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(C)), piece(sum), row(sum);
    for (int64_t n = begin; n < end; ++n) {
      const Run run = runs[n];
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (size_t first = 0; first < run.size(); first += kEmbeddingPiece) {
        std::fill(piece.begin(), piece.end(), 0.0f);
        for (const TokenRow& of : run.subspan(first, std::min<size_t>(kEmbeddingPiece, run.size() - first))) {
          decode_elements(a.d_out, of.row * C, C, row.data());
          add(row, piece);
        }
        add(piece, sum);
      }
      for (float& x : sum) x *= a.scale;
      const int64_t target = run.front().id * C;
      decode_elements(a.d_table, target, C, row.data());
      add(row, sum);
      encode_elements(sum.data(), target, C, a.d_table);
    }
  });
}

void scatter_rows(Device&, const ScatterRows& a) {
  const int64_t row_bytes = a.x.dim[1] * size_of(a.x.dtype);
  const auto* positions = a.positions.as<int32_t>();
  std::vector<bool> taken(static_cast<size_t>(a.out.dim[0]));
  for (int64_t n = 0; n < a.x.dim[0]; ++n) {
    if (positions[n] < 0) continue;
    check_position("scatter_rows", n, positions[n], a.out.dim[0]);
    if (taken[positions[n]]) {
      throw_bad_input("scatter_rows: feature {} has position {}, as another has: give each its own", n,
                      positions[n]);
    }
    taken[positions[n]] = true;
  }
  const std::byte* x = static_cast<const std::byte*>(a.x.data);
  std::byte* out = static_cast<std::byte*>(a.out.data);
  parallel_for(a.x.dim[0], kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (positions[n] < 0) continue;
      std::memcpy(out + positions[n] * row_bytes, x + n * row_bytes, static_cast<size_t>(row_bytes));
    }
  });
}

void gather_rows(Device&, const GatherRows& a) {
  const int64_t row_bytes = a.x.dim[1] * size_of(a.x.dtype);
  const auto* positions = a.positions.as<int32_t>();
  for (int64_t n = 0; n < a.out.dim[0]; ++n) check_position("gather_rows", n, positions[n], a.x.dim[0]);
  const std::byte* x = static_cast<const std::byte*>(a.x.data);
  std::byte* out = static_cast<std::byte*>(a.out.data);
  parallel_for(a.out.dim[0], kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (positions[n] < 0) {
        std::memset(out + n * row_bytes, 0, static_cast<size_t>(row_bytes));
      } else {
        std::memcpy(out + n * row_bytes, x + positions[n] * row_bytes, static_cast<size_t>(row_bytes));
      }
    }
  });
}

}  // namespace parka::cpu
