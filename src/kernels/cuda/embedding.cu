#include "kernels/cuda/embedding.h"

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"

// Shapes: T tokens, V rows of the table, C columns.
namespace parka::cuda {
namespace {

constexpr int kForwardThreads = 128;
constexpr int kForwardUnits = 4;  // that a thread has under way at once

// Copies rows of `row_units` units, 16 bytes or the 2 that every row is a multiple of.
template <typename Unit>
__global__ void __launch_bounds__(kForwardThreads)
    embedding_forward_kernel(const int32_t* ids_T, const Unit* table_VC, Unit* out_TC, int64_t row_units) {
  const Unit* const source = table_VC + ids_T[blockIdx.x] * row_units;
  Unit* const target = out_TC + int64_t{blockIdx.x} * row_units;
  for (int64_t first = threadIdx.x; first < row_units; first += kForwardUnits * kForwardThreads) {
    Unit units[kForwardUnits] = {};
#pragma unroll
    for (int n = 0; n < kForwardUnits; ++n) {
      const int64_t at = first + n * kForwardThreads;
      if (at < row_units) units[n] = source[at];
    }
#pragma unroll
    for (int n = 0; n < kForwardUnits; ++n) {
      const int64_t at = first + n * kForwardThreads;
      if (at < row_units) target[at] = units[n];
    }
  }
}

// embedding_backward goes through the rows of d_out in the caller's order, in which the rows of one token are a
// run. Some runs have thousands of rows and most have one or two, so there are two kinds of work, both of one
// kernel. A run of at least kLong rows is summed by many blocks of few columns each, whose warps take its pieces in
// turn; as it takes longest it is started first. All other runs are summed by warps that each go through the rows
// of a window of the order with wide loads, many rows under way whatever runs they belong to.
constexpr int kBackwardThreads = 256, kBackwardWarps = kBackwardThreads / kWarpSize;
// Blocks that a multiprocessor is to have room for; loads of 2 bytes take more registers than others.
constexpr int backward_blocks(size_t load_bytes) { return load_bytes < 4 ? 1 : 2; }
constexpr int kWindow = kWarpSize;
constexpr int kPiece = kEmbeddingPiece;
constexpr int kLong = kPiece;  // shorter runs are one piece
static_assert(kLong == 2 * kWindow);
constexpr int kSegmentWindows = 128;  // in which a block looks for the beginnings of long runs

// The rows in the caller's order. -1 stands for the row and the id of a position outside it.
struct OrderedRows {
  const int32_t* ids_T;
  const int32_t* order_T;
  int count;

  __device__ int row(int position) const { return position >= 0 && position < count ? order_T[position] : -1; }
  __device__ int id_of_row(int row) const { return row >= 0 ? ids_T[row] : -1; }
  __device__ int id(int position) const { return id_of_row(row(position)); }
};

// The bits below the lowest one of x; all of them when x is 0.
__device__ inline unsigned bits_below_lowest(unsigned x) { return ~x & (x - 1); }

// What the warps of a block tell each other of the pieces of a run that they have summed: twice, so that one round
// can be read while the next is written.
template <int kWidth>
struct PieceSums {
  float sum[2][kBackwardWarps][kWidth][kWarpSize];
  int rows[2][kBackwardWarps];
};

// Sums the piece of a run that begins at a position: kWidth columns per lane, which are beyond the row unless
// `in_row`. Returns how many rows it has, none if the run has ended.
template <int kWidth, typename G>
__device__ int sum_piece(const OrderedRows& rows, int position, int id, const G* d_out_TC, int cols, bool in_row,
                         float (&sum)[kWidth]) {
  constexpr int kParts = kPiece / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int row_of_lane[kParts], count[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) row_of_lane[part] = rows.row(position + part * kWarpSize + lane);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    count[part] = __popc(__ballot_sync(kFullWarp, rows.id_of_row(row_of_lane[part]) == id));
  }
  Stored<G, kWidth> values[kPiece];
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
    const int row = __shfl_sync(kFullWarp, row_of_lane[n / kWarpSize], n % kWarpSize);
    values[n] = load_stored<kWidth>(d_out_TC + int64_t{row} * cols, n % kWarpSize < count[n / kWarpSize] && in_row);
  }
#pragma unroll
  for (int n = 0; n < kPiece; ++n) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += values[n][i];  // the zeros beyond the run's end change no sum
  }
  int total = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) total += count[part];
  return total;
}

// Sums one long run, a round of kBackwardWarps pieces after the other.
template <int kWidth, typename G, typename D>
__device__ void add_long_run(const OrderedRows& rows, int begin, int id, const G* d_out_TC, D* d_table_VC, int cols,
                             int column, PieceSums<kWidth>& shared, int& round) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool in_row = column < cols;
  float total[kWidth] = {};
  for (int first = begin;; first += kBackwardWarps * kPiece) {
    const int buffer = round++ % 2;
    float sum[kWidth] = {};
    const int count = sum_piece(rows, first + warp * kPiece, id, d_out_TC + column, cols, in_row, sum);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) shared.sum[buffer][warp][i][lane] = sum[i];
    if (lane == 0) shared.rows[buffer][warp] = count;
    __syncthreads();
    for (int piece = 0; piece < kBackwardWarps && shared.rows[buffer][piece] > 0; ++piece) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] += shared.sum[buffer][piece][i][lane];
    }
    if (shared.rows[buffer][kBackwardWarps - 1] < kPiece) break;
  }
  if (warp != 0 || !in_row) return;
  D* const target = d_table_VC + int64_t{id} * cols + column;
  float before[kWidth];
  load(target, before);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) total[i] += before[i];
  store(target, total);
}

// What a block knows of its segment: the ids at the beginnings of windows, from the window before the segment to
// the one after it, and where long runs may have begun in the window before.
struct SegmentRuns {
  int id[kSegmentWindows + 2];
  int found[kSegmentWindows];
  int count;
};
static_assert(kBackwardThreads >= kSegmentWindows + 2);

// The long runs whose first multiple of kWindow is in a segment of the order. Every long run has two of these.
template <int kWidth, typename G, typename D>
__device__ void add_long_runs(const OrderedRows& rows, int segment, const G* d_out_TC, D* d_table_VC, int cols,
                              int column) {
  __shared__ PieceSums<kWidth> pieces;
  __shared__ SegmentRuns runs;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  const int first = (segment * kSegmentWindows - 1) * kWindow;
  if (thread == 0) runs.count = 0;
  if (thread < kSegmentWindows + 2) runs.id[thread] = rows.id(first + thread * kWindow);
  __syncthreads();
  if (thread >= 1 && thread <= kSegmentWindows) {
    const int id = runs.id[thread];
    // In any order: no two runs have an id in common.
    if (id >= 0 && id != runs.id[thread - 1] && id == runs.id[thread + 1]) {
      runs.found[atomicAdd(&runs.count, 1)] = thread;
    }
  }
  __syncthreads();
  int round = 0;
  for (int n = 0; n < runs.count; ++n) {
    const int window = runs.found[n], id = runs.id[window], position = first + window * kWindow;
    const bool in_run = rows.id(position - lane) == id;
    const int begin = position + 1 - __popc(__ballot_sync(kFullWarp, in_run));
    if (rows.id(begin + kLong - 1) != id) continue;
    add_long_run<kWidth>(rows, begin, id, d_out_TC, d_table_VC, cols, column, pieces, round);
  }
}

// A window, and the two after it into which its last run may reach: a lane has a position of each.
struct Windows {
  static constexpr int kCount = 3;
  int row[kCount], id[kCount];
  unsigned mine[kCount];  // bit per position: in a run that begins in the window and is not long
  unsigned ends[kCount];  // the last position of a run

  __device__ Windows(const OrderedRows& rows, int begin) {
    const int lane = threadIdx.x % kWarpSize;
    unsigned inside[kCount], begins[kCount];
#pragma unroll
    for (int w = 0; w < kCount; ++w) row[w] = rows.row(begin + w * kWindow + lane);
    int last_id = rows.id(begin - 1);
#pragma unroll
    for (int w = 0; w < kCount; ++w) id[w] = rows.id_of_row(row[w]);
#pragma unroll
    for (int w = 0; w < kCount; ++w) {
      const int before = __shfl_up_sync(kFullWarp, id[w], 1);
      inside[w] = __ballot_sync(kFullWarp, row[w] >= 0);
      begins[w] = __ballot_sync(kFullWarp, id[w] != (lane == 0 ? last_id : before));
      last_id = __shfl_sync(kFullWarp, id[w], kWarpSize - 1);
    }
#pragma unroll
    for (int w = 0; w < kCount; ++w) ends[w] = begins[w] >> 1 | (w + 1 < kCount ? begins[w + 1] << 31 : 0);

    // The window's last run is long when none begins in the kLong - 1 positions after its first.
    const unsigned heads = begins[0] & inside[0];
    const unsigned last_head = heads != 0 ? 1u << (31 - __clz(heads)) : 0;
    const bool is_long = begins[1] == 0 && (begins[2] & (last_head - 1)) == 0 && inside[1] == kFullWarp &&
                         (inside[2] & (last_head - 1)) == last_head - 1;
    mine[0] = heads == 0 ? 0 : inside[0] & ~bits_below_lowest(heads);
    mine[1] = heads == 0 ? 0 : inside[1] & bits_below_lowest(begins[1]);
    mine[2] = mine[1] == kFullWarp ? inside[2] & bits_below_lowest(begins[2]) : 0;
    if (heads != 0 && is_long) {
      mine[0] &= last_head - 1;
      mine[1] = mine[2] = 0;
    }
  }
};

// The runs, but for long ones, that begin in a window: kWidth columns of them per lane.
template <int kWidth, typename G, typename D>
__device__ void add_short_runs(const OrderedRows& rows, int begin, const G* d_out_TC, D* d_table_VC, int cols,
                               int column) {
  // Rows under way at once, as many as registers are for.
  constexpr int kDepth = Stored<G, kWidth>::kWords + Stored<D, kWidth>::kWords <= 8 ? 8 : 4;
  constexpr unsigned kDepthBits = (1u << kDepth) - 1;
  const bool in_row = column < cols;
  const Windows windows(rows, begin);
  float sum[kWidth] = {};
#pragma unroll
  for (int w = 0; w < Windows::kCount; ++w) {
    for (int first = 0; first < kWindow; first += kDepth) {
      const unsigned mine = windows.mine[w] >> first & kDepthBits, ends = windows.ends[w] >> first & mine;
      if (mine == 0) continue;
      Stored<G, kWidth> values[kDepth];
      Stored<D, kWidth> before[kDepth];
#pragma unroll
      for (int n = 0; n < kDepth; ++n) {
        const int row = __shfl_sync(kFullWarp, windows.row[w], first + n);
        const int id = __shfl_sync(kFullWarp, windows.id[w], first + n);
        values[n] = load_stored<kWidth>(d_out_TC + int64_t{row} * cols + column, (mine >> n & 1) != 0 && in_row);
        before[n] = load_stored<kWidth>(d_table_VC + int64_t{id} * cols + column, (ends >> n & 1) != 0 && in_row);
      }
#pragma unroll
      for (int n = 0; n < kDepth; ++n) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] += values[n][i];
        if ((ends >> n & 1) == 0) continue;
        const int id = __shfl_sync(kFullWarp, windows.id[w], first + n);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] += before[n][i];
        if (in_row) store(d_table_VC + int64_t{id} * cols + column, sum);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = 0.0f;
      }
    }
  }
}

// Blocks take a segment of the order each and warps a window, and a piece of the rows' columns.
struct BackwardWork {
  int64_t long_blocks, long_pieces, short_warps, short_pieces;
};

template <typename G, typename D, int kLongWidth, int kShortWidth>
__global__ void __launch_bounds__(kBackwardThreads, backward_blocks(kLongWidth * sizeof(G)))
    embedding_backward_kernel(OrderedRows rows, BackwardWork work, const G* d_out_TC, D* d_table_VC, int cols) {
  const int lane = threadIdx.x % kWarpSize;
  int64_t block = blockIdx.x;
  if (block < work.long_blocks) {
    const int segment = static_cast<int>(block / work.long_pieces);
    const int column = static_cast<int>(block % work.long_pieces) * kWarpSize * kLongWidth + lane * kLongWidth;
    add_long_runs<kLongWidth>(rows, segment, d_out_TC, d_table_VC, cols, column);
    return;
  }
  const int64_t warp = (block - work.long_blocks) * kBackwardWarps + threadIdx.x / kWarpSize;
  if (warp >= work.short_warps) return;
  const int begin = static_cast<int>(warp / work.short_pieces) * kWindow;
  const int column = static_cast<int>(warp % work.short_pieces) * kWarpSize * kShortWidth + lane * kShortWidth;
  add_short_runs<kShortWidth>(rows, begin, d_out_TC, d_table_VC, cols, column);
}

template <typename G, typename D, int kLongWidth, int kShortWidth>
void launch_backward(CudaDevice& device, const EmbeddingBackward& a) {
  const int64_t count = a.ids.dim[0], cols = a.d_out.dim[1];
  PARKA_REQUIRE(cols <= INT32_MAX / 2);
  // Positions beyond the last are ints too.
  PARKA_REQUIRE(count <= INT32_MAX - 2 * (kSegmentWindows * kWindow + kBackwardWarps * kPiece));
  const int64_t long_pieces = ceil_div(cols, kWarpSize * kLongWidth);
  const int64_t short_pieces = ceil_div(cols, kWarpSize * kShortWidth);
  const int64_t long_blocks = ceil_div(count, kSegmentWindows * kWindow) * long_pieces;
  const int64_t short_warps = ceil_div(count, kWindow) * short_pieces;
  const int64_t blocks = long_blocks + ceil_div(short_warps, kBackwardWarps);
  PARKA_REQUIRE(blocks <= INT32_MAX);
  const OrderedRows rows = {a.ids.as<int32_t>(), a.order.as<int32_t>(), static_cast<int>(count)};
  const BackwardWork work = {long_blocks, long_pieces, short_warps, short_pieces};
  const auto kernel = embedding_backward_kernel<G, D, kLongWidth, kShortWidth>;
  kernel<<<static_cast<unsigned>(blocks), kBackwardThreads, 0, device.stream()>>>(
      rows, work, a.d_out.as<G>(), a.d_table.as<D>(), static_cast<int>(cols));
  check_launch("embedding_backward");
}

template <typename G, typename D>
void add_runs(CudaDevice& device, const EmbeddingBackward& a) {
  constexpr int kWideWidth = 16 / sizeof(G);
  if (a.d_out.dim[1] % kWideWidth == 0 && is_aligned(a.d_out.data, 16) && is_aligned(a.d_table.data, 16)) {
    launch_backward<G, D, 4 / sizeof(G), kWideWidth>(device, a);
  } else {
    launch_backward<G, D, 1, 1>(device, a);
  }
}

template <typename Unit>
void copy_rows(CudaDevice& device, const EmbeddingForward& a, int64_t row_bytes) {
  embedding_forward_kernel<<<static_cast<unsigned>(a.ids.dim[0]), kForwardThreads, 0, device.stream()>>>(
      a.ids.as<int32_t>(), static_cast<const Unit*>(a.table.data), static_cast<Unit*>(a.out.data),
      row_bytes / static_cast<int64_t>(sizeof(Unit)));
}

}  // namespace

void embedding_forward(Device& device, const EmbeddingForward& a) {
  PARKA_REQUIRE(a.ids.dim[0] <= INT32_MAX);
  const int64_t row_bytes = a.table.dim[1] * size_of(a.table.dtype);
  if (row_bytes % 16 == 0 && is_aligned(a.table.data, 16) && is_aligned(a.out.data, 16)) {
    copy_rows<uint4>(as_cuda(device), a, row_bytes);
  } else {
    copy_rows<uint16_t>(as_cuda(device), a, row_bytes);
  }
  check_launch("embedding_forward");
}

void embedding_backward(Device& device, const EmbeddingBackward& a) {
  with_plain_type(a.d_out.dtype, [&](auto g) {
    with_plain_type(a.d_table.dtype, [&](auto d) { add_runs<decltype(g), decltype(d)>(as_cuda(device), a); });
  });
}

}  // namespace parka::cuda
