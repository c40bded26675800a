#include "kernels/cuda/launch.cuh"
#include "kernels/op/workspace.h"
#include "kernels/ops/moe/routing.h"

// Tokens' rows on their way to experts and back. Shapes: T tokens, E experts, S slots, R rows, d columns.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ inline int warp_of_thread() { return static_cast<int>(threadIdx.x / kWarpSize); }

// ---- sort_by_expert: counts of pieces of the slots, sums of these, then the place of each slot ----

struct SortTensors {
  const int32_t* experts_S;
  const float* weights_S;
  int32_t *offsets_E, *counts_E;  // offsets_E has one more
  int32_t *row_of_slot_S, *slot_of_row_R;
  float* row_weights_R;
  int32_t* before_EP;  // slots of each expert in each piece, then in the pieces before it
  int64_t S, R;
  int E, pieces, piece_slots, first_expert;

  // Among the E experts; others than 0 to E - 1 are of other ranks.
  __device__ int expert(int64_t s) const { return experts_S[s] - first_expert; }
  __device__ bool is_here(int expert) const { return static_cast<unsigned>(expert) < static_cast<unsigned>(E); }
};

// Makes all rows those of no slot as well.
__global__ void __launch_bounds__(kThreads) count_slots_kernel(SortTensors a) {
  __shared__ int counts[kMostExperts];
  wait_for_kernel_before();
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < a.E; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * a.piece_slots, end = min(first + a.piece_slots, a.S);
  for (int64_t s = first + thread; s < end; s += kThreads) {
    if (const int expert = a.expert(s); a.is_here(expert)) atomicAdd(&counts[expert], 1);
  }
  for (int64_t r = int64_t{blockIdx.x} * kThreads + thread; r < a.R; r += int64_t{a.pieces} * kThreads) {
    a.slot_of_row_R[r] = -1;
    a.row_weights_R[r] = 0.0f;
  }
  __syncthreads();
  for (int e = thread; e < a.E; e += kThreads) a.before_EP[int64_t{e} * a.pieces + blockIdx.x] = counts[e];
}

// The sum of the lanes' numbers up to this one's.
__device__ inline int sum_up_to_lane(int x) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kFullWarp, x, offset);
    if (lane_of_thread() >= offset) x += below;
  }
  return x;
}

constexpr int kScanThreads = 1024;

// One block; a warp has an expert at a time.
__global__ void __launch_bounds__(kScanThreads) scan_counts_kernel(SortTensors a) {
  __shared__ int totals[kMostExperts];
  wait_for_kernel_before();
  const int lane = lane_of_thread();
  constexpr int kParts = kSortMostPieces / kWarpSize;
  for (int e = warp_of_thread(); e < a.E; e += kScanThreads / kWarpSize) {
    int32_t* const before = a.before_EP + int64_t{e} * a.pieces + lane;
    int count[kParts], total = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) count[i] = lane + i * kWarpSize < a.pieces ? before[i * kWarpSize] : 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int sum = sum_up_to_lane(count[i]);
      if (lane + i * kWarpSize < a.pieces) before[i * kWarpSize] = total + sum - count[i];
      total += __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    }
    if (lane == 0) totals[e] = total;
  }
  __syncthreads();
  if (warp_of_thread() > 0) return;
  int end = 0;  // of the rows of the experts so far
  for (int first = 0; first < a.E; first += kWarpSize) {
    const int e = first + lane, count = e < a.E ? totals[e] : 0;
    constexpr int kRows = static_cast<int>(kExpertRows);
    const int rows = (count + kRows - 1) / kRows * kRows, sum = sum_up_to_lane(rows);
    if (e < a.E) {
      a.offsets_E[e] = end + sum - rows;
      a.counts_E[e] = count;
    }
    end += __shfl_sync(kFullWarp, sum, kWarpSize - 1);
  }
  if (lane == 0) a.offsets_E[a.E] = end;
}

// Calls f(slot, expert, mask of the lanes with the same expert) for 32 adjacent slots of a warp's part after the
// other. Slots past the end, and of experts that are not here, have expert -1.
template <typename F>
__device__ void for_each_slot(const SortTensors& a, const F& f) {
  const int part = a.piece_slots / kWarps;
  const int64_t first = int64_t{blockIdx.x} * a.piece_slots + warp_of_thread() * part + lane_of_thread();
  for (int64_t s = first; s - lane_of_thread() < min(first - lane_of_thread() + part, a.S); s += kWarpSize) {
    const int own = s < a.S ? a.expert(s) : -1, expert = a.is_here(own) ? own : -1;
    f(s, expert, __match_any_sync(kFullWarp, expert));
  }
}

// A block has a piece, and a warp adjacent slots of it.
__global__ void __launch_bounds__(kThreads) place_slots_kernel(SortTensors a) {
  __shared__ int rows[kWarps][kMostExperts];  // of each expert: of a warp's slots, then its next slot's
  wait_for_kernel_before();
  int* const own_rows = rows[warp_of_thread()];
  for (int e = lane_of_thread(); e < a.E; e += kWarpSize) own_rows[e] = 0;
  __syncwarp();
  const auto add_slots = [&](int expert, unsigned same) {  // by the first of the lanes
    if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == lane_of_thread()) own_rows[expert] += __popc(same);
    __syncwarp();
  };
  for_each_slot(a, [&](int64_t, int expert, unsigned same) { add_slots(expert, same); });
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < a.E; e += kThreads) {
    int next = a.offsets_E[e] + a.before_EP[int64_t{e} * a.pieces + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const int count = rows[w][e];
      rows[w][e] = next;
      next += count;
    }
  }
  __syncthreads();
  const unsigned lanes_below = (1u << lane_of_thread()) - 1;
  for_each_slot(a, [&](int64_t s, int expert, unsigned same) {
    if (expert >= 0) {
      const int row = own_rows[expert] + __popc(same & lanes_below);
      a.row_of_slot_S[s] = row;
      a.slot_of_row_R[row] = static_cast<int32_t>(s);
      a.row_weights_R[row] = a.weights_S[s];
    } else if (s < a.S) {
      a.row_of_slot_S[s] = -1;
    }
    __syncwarp();
    add_slots(expert, same);
  });
}

// ---- gather_tokens ----

// Divides slots by k: multiplies by 2^32 / k, rounded up, which is exact for slots below 2^32 / k.
struct TokenOfSlot {
  uint64_t factor;

  explicit TokenOfSlot(int64_t k)
      : factor(((uint64_t{1} << 32) + static_cast<uint64_t>(k) - 1) / static_cast<uint64_t>(k)) {}
  __device__ int operator()(int slot) const { return static_cast<int>(static_cast<uint64_t>(slot) * factor >> 32); }
};

constexpr int kRowUnits = 4;  // that a lane has under way at once

// A warp copies a row, in units of 16 bytes or of an element. The rows written pass by the cache, which is better
// filled with those that are read k times.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const int32_t* slot_of_row_R, const Unit* x, Unit* out, int64_t R, int64_t row_units,
                       TokenOfSlot token_of) {
  const int64_t r = int64_t{blockIdx.x} * kWarps + warp_of_thread();
  if (r >= R) return;
  const int slot = slot_of_row_R[r];
  const Unit* const source = x + (slot < 0 ? 0 : token_of(slot)) * row_units;
  Unit* const target = out + r * row_units;
  for (int64_t first = lane_of_thread(); first < row_units; first += kRowUnits * kWarpSize) {
    Unit units[kRowUnits] = {};
#pragma unroll
    for (int i = 0; i < kRowUnits; ++i) {
      if (slot >= 0 && first + i * kWarpSize < row_units) units[i] = source[first + i * kWarpSize];
    }
#pragma unroll
    for (int i = 0; i < kRowUnits; ++i) {
      if (first + i * kWarpSize < row_units) __stcs(target + first + i * kWarpSize, units[i]);
    }
  }
}

// Bytes of four words, one below the other, as columns.
__device__ inline void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t first = __byte_perm(x[0], x[1], 0x5140), second = __byte_perm(x[0], x[1], 0x7362);
  const uint32_t third = __byte_perm(x[2], x[3], 0x5140), fourth = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(first, third, 0x5410);
  x[1] = __byte_perm(first, third, 0x7632);
  x[2] = __byte_perm(second, fourth, 0x5410);
  x[3] = __byte_perm(second, fourth, 0x7632);
}

constexpr int kColumnThreads = 1024;
constexpr int kRowsOfThread = 16;
constexpr int kColumnsOfBlock = 8;

// Where a token is in shared memory. Threads beside each other have rows 16 apart, and the rows of an expert that
// most tokens choose are tokens 16 apart: without the gaps they would all be in one bank.
__host__ __device__ constexpr int64_t place_of_token(int64_t t) { return t + t / kRowsOfThread; }

constexpr int64_t bytes_of_tokens(int64_t t) { return (place_of_token(t) + 1) * kColumnsOfBlock; }

// A block has eight columns of x, rows of x_t, and the tokens of a piece. They are put into shared memory token by
// token, so that one read gives all codes of a row. An expert's rows are in order of tokens, so nearly always a
// thread's rows are all of one piece, whose block writes them at once; the rest are written code by code. Rows of
// no slot are of the piece of the thread's first row. T is a multiple of 4, R of 16, and all tensors are aligned to
// 16 bytes.
__global__ void __launch_bounds__(kColumnThreads)
    gather_columns_kernel(const int32_t* slot_of_row_R, const uint8_t* x_dT, uint8_t* out_dR, int T, int64_t R,
                          int piece_tokens, TokenOfSlot token_of) {
  extern __shared__ uint2 tokens[];  // at their places, and zeros behind them
  constexpr int kWords = kColumnsOfBlock / 4;
  const int64_t first_column = int64_t{blockIdx.x} * kColumnsOfBlock;
  const int first_token = static_cast<int>(blockIdx.y) * piece_tokens, count = min(piece_tokens, T - first_token);
  const uint8_t* const x = x_dT + first_column * T + first_token;
  for (int t = 4 * static_cast<int>(threadIdx.x); t < count; t += 4 * kColumnThreads) {
    uint32_t codes[kWords][4];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int c = 0; c < 4; ++c) codes[w][c] = *reinterpret_cast<const uint32_t*>(x + int64_t{4 * w + c} * T + t);
      transpose_bytes(codes[w]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) tokens[place_of_token(t) + i] = make_uint2(codes[0][i], codes[1][i]);
  }
  const int zeros = static_cast<int>(place_of_token(count));
  if (threadIdx.x == 0) tokens[zeros] = {};
  __syncthreads();
  for (int64_t r = int64_t{threadIdx.x} * kRowsOfThread; r < R; r += int64_t{kColumnThreads} * kRowsOfThread) {
    int places[kRowsOfThread];
    unsigned own = 0;  // which of the rows are of this piece
#pragma unroll
    for (int n = 0; n < kRowsOfThread / 4; ++n) {
      const int4 slots = reinterpret_cast<const int4*>(slot_of_row_R + r)[n];
      const int of[4] = {slots.x, slots.y, slots.z, slots.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 4 * n + i, token = token_of(max(of[i], 0)) - first_token;
        const bool is_here = static_cast<unsigned>(token) < static_cast<unsigned>(count);
        const bool with_first = row == 0 ? first_token == 0 : (own & 1) != 0;
        if (of[i] < 0 ? with_first : is_here) own |= 1u << row;
        places[row] = of[i] >= 0 && is_here ? static_cast<int>(place_of_token(token)) : zeros;
      }
    }
    if (own == 0) continue;
    uint32_t columns[kColumnsOfBlock][kRowsOfThread / 4];
#pragma unroll
    for (int n = 0; n < kRowsOfThread / 4; ++n) {
      uint2 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = tokens[places[4 * n + i]];
      uint32_t first[4] = {rows[0].x, rows[1].x, rows[2].x, rows[3].x};
      uint32_t second[4] = {rows[0].y, rows[1].y, rows[2].y, rows[3].y};
      transpose_bytes(first);
      transpose_bytes(second);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        columns[c][n] = first[c];
        columns[4 + c][n] = second[c];
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnsOfBlock; ++c) {
      uint8_t* const out = out_dR + (first_column + c) * R + r;
      if (own == (1u << kRowsOfThread) - 1) {
        __stcs(reinterpret_cast<uint4*>(out),
               make_uint4(columns[c][0], columns[c][1], columns[c][2], columns[c][3]));
        continue;
      }
#pragma unroll
      for (int row = 0; row < kRowsOfThread; ++row) {
        if (own >> row & 1) out[row] = static_cast<uint8_t>(columns[c][row / 4] >> row % 4 * 8);
      }
    }
  }
}

// For any T and d.
__global__ void __launch_bounds__(kThreads)
    gather_codes_kernel(const int32_t* slot_of_row_R, const uint8_t* x_dT, uint8_t* out_dR, int64_t T, int64_t R,
                        int64_t numel, TokenOfSlot token_of) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= numel) return;
  const int slot = slot_of_row_R[i % R];
  out_dR[i] = slot < 0 ? uint8_t{0} : x_dT[i / R * T + token_of(slot)];
}

void gather_rows_of(CudaDevice& device, const GatherTokens& a) {
  const int64_t R = a.out.dim[0], size = size_of(a.x.dtype), row_bytes = a.x.dim[1] * size;
  const auto gather = [&](auto unit) {
    using Unit = decltype(unit);
    launch(device, "gather_tokens", gather_rows_kernel<Unit>, {ceil_div(R, kWarps), kThreads},
           a.slot_of_row.as<int32_t>(), static_cast<const Unit*>(a.x.data), static_cast<Unit*>(a.out.data), R,
           row_bytes / static_cast<int64_t>(sizeof(Unit)), TokenOfSlot(a.slots_per_token));
  };
  if (row_bytes % 16 == 0 && are_aligned({a.x.data, a.out.data})) return gather(uint4{});
  size == 4 ? gather(uint32_t{}) : size == 2 ? gather(uint16_t{}) : gather(uint8_t{});
}

void gather_columns_of(CudaDevice& device, const GatherTokens& a) {
  const int64_t d = a.x_t.dim[0], T = a.x_t.dim[1], R = a.out_t.dim[1];
  const auto* const slots = a.slot_of_row.as<int32_t>();
  const auto* const x = static_cast<const uint8_t*>(a.x_t.data);
  auto* const out = static_cast<uint8_t*>(a.out_t.data);
  const TokenOfSlot token_of(a.slots_per_token);
  if (T % 4 != 0 || R % kRowsOfThread != 0 || d % kColumnsOfBlock != 0 || !are_aligned({slots, x, out})) {
    launch(device, "gather_tokens", gather_codes_kernel, {ceil_div(d * R, kThreads), kThreads}, slots, x, out, T, R,
           d * R, token_of);
    return;
  }
  const int64_t room = static_cast<int64_t>(device.properties().sharedMemPerBlockOptin);
  int64_t pieces = 1, piece = T;  // in tokens: more than some 27,000 do not fit into shared memory
  while (bytes_of_tokens(piece) > room) piece = 4 * ceil_div(T / 4, ++pieces);
  const int64_t bytes = bytes_of_tokens(piece);
  check(cudaFuncSetAttribute(gather_columns_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "gather_tokens");
  launch(device, "gather_tokens", gather_columns_kernel,
         {dim3(static_cast<unsigned>(d / kColumnsOfBlock), static_cast<unsigned>(pieces)), kColumnThreads, bytes},
         slots, x, out, static_cast<int>(T), R, static_cast<int>(piece), token_of);
}

// ---- combine_rows ----

constexpr int kCombineDepth = 8;  // rows that are loaded at once

// A block has a token, and a thread packs of kWidth columns.
template <int kWidth, typename X, typename Y>
__global__ void __launch_bounds__(kThreads) combine_rows_kernel(const X* rows_Rd, const int32_t* row_of_slot_Tk,
                                                                Y* out_Td, int64_t d, int k, bool accumulate) {
  const int32_t* const rows = row_of_slot_Tk + int64_t{blockIdx.x} * k;
  for (int64_t column = int64_t{threadIdx.x} * kWidth; column < d; column += kThreads * kWidth) {
    Y* const out = out_Td + blockIdx.x * d + column;
    const Stored<Y, kWidth> before = load_stored<kWidth>(out, accumulate);
    float sum[kWidth] = {};
    for (int first = 0; first < k; first += kCombineDepth) {
      Stored<X, kWidth> values[kCombineDepth];
#pragma unroll
      for (int j = 0; j < kCombineDepth; ++j) {
        const int row = first + j < k ? rows[first + j] : -1;
        values[j] = load_stored<kWidth>(rows_Rd + max(row, 0) * d + column, row >= 0);
      }
#pragma unroll
      for (int j = 0; j < kCombineDepth; ++j) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (first + j < k) sum[i] += values[j][i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (accumulate) sum[i] += before[i];
    }
    store(out, sum);
  }
}

}  // namespace

void sort_by_expert(Device& any_device, const SortByExpert& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t S = a.experts.numel();
  const SortTensors tensors = {
      .experts_S = a.experts.as<int32_t>(),
      .weights_S = a.weights.as<float>(),
      .offsets_E = a.offsets.as<int32_t>(),
      .counts_E = a.counts.as<int32_t>(),
      .row_of_slot_S = a.row_of_slot.as<int32_t>(),
      .slot_of_row_R = a.slot_of_row.as<int32_t>(),
      .row_weights_R = a.row_weights.as<float>(),
      .before_EP = static_cast<int32_t*>(device.workspace("sort_by_expert", workspace_of(a))),
      .S = S,
      .R = a.slot_of_row.dim[0],
      .E = static_cast<int>(a.counts.dim[0]),
      .pieces = static_cast<int>(sort_pieces(S)),
      .piece_slots = static_cast<int>(sort_piece_slots(S)),
      .first_expert = static_cast<int>(std::max<int64_t>(a.first_expert, 0)),
  };
  const Grid by_piece(tensors.pieces, kThreads);
  launch_early(device, "sort_by_expert", count_slots_kernel, by_piece, tensors);
  launch_early(device, "sort_by_expert", scan_counts_kernel, {1, kScanThreads}, tensors);
  launch_early(device, "sort_by_expert", place_slots_kernel, by_piece, tensors);
}

void gather_tokens(Device& any_device, const GatherTokens& a) {
  CudaDevice& device = as_cuda(any_device);
  PARKA_REQUIRE(a.slot_of_row.dim[0] <= (int64_t{1} << 32) / kMostChosen);
  if (!a.out.empty() && a.out.numel() > 0) gather_rows_of(device, a);
  if (!a.out_t.empty() && a.out_t.numel() > 0) gather_columns_of(device, a);
}

void combine_rows(Device& any_device, const CombineRows& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t d = a.rows.dim[1];
  with_plain_type(a.rows.dtype, [&](auto x) {
    with_plain_type(a.out.dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      constexpr int kWide = 16 / sizeof(X);
      const bool wide = d % kWide == 0 && are_aligned({a.rows.data, a.out.data});
      launch(device, "combine_rows", wide ? combine_rows_kernel<kWide, X, Y> : combine_rows_kernel<1, X, Y>,
             {a.out.dim[0], kThreads}, a.rows.as<X>(), a.row_of_slot.as<int32_t>(), a.out.as<Y>(), d,
             static_cast<int>(a.row_of_slot.dim[1]), a.accumulate);
    });
  });
}

}  // namespace parka::cuda
