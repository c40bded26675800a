#include "kernels/ops/elementwise/embedding.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/op/workspace.h"

// Shapes: T tokens, V rows of the table, C columns.
namespace parka::cuda {
namespace {

constexpr int kForwardThreads = 128;
constexpr int kForwardUnits = 4;  // that a thread has under way at once

enum class Copy { kEmbed, kGather, kScatter };

// A block copies row n, of `row_units` units of 16 bytes or the 2 that every row is a multiple of: from
// x[positions[n]], or to out[positions[n]] if it scatters. A row gathered from a negative position is zeros. A row
// without a place to go to, or of an image, is left out.
template <Copy kCopy, typename Unit>
__global__ void __launch_bounds__(kForwardThreads)
    copy_rows_kernel(const int32_t* positions_N, const Unit* x, Unit* out, int64_t row_units) {
  const int64_t n = blockIdx.x, position = positions_N[n];
  if (kCopy == Copy::kEmbed ? position == kImageSlot : kCopy == Copy::kScatter && position < 0) return;
  const Unit* const source = x + (kCopy == Copy::kScatter ? n : position) * row_units;
  Unit* const target = out + (kCopy == Copy::kScatter ? position : n) * row_units;
  for (int64_t first = threadIdx.x; first < row_units; first += kForwardUnits * kForwardThreads) {
    Unit units[kForwardUnits] = {};
#pragma unroll
    for (int i = 0; i < kForwardUnits; ++i) {
      const int64_t at = first + i * kForwardThreads;
      if (at < row_units && (kCopy != Copy::kGather || position >= 0)) units[i] = source[at];
    }
#pragma unroll
    for (int i = 0; i < kForwardUnits; ++i) {
      const int64_t at = first + i * kForwardThreads;
      if (at < row_units) target[at] = units[i];
    }
  }
}

// An embedding with each element times `scale`: packs of kWidth elements, 16 bytes or one.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kForwardThreads)
    scaled_embedding_kernel(const int32_t* ids_T, const T* table_VC, T* out_TC, int64_t cols, float scale) {
  if (ids_T[blockIdx.x] == kImageSlot) return;
  const T* const source = table_VC + ids_T[blockIdx.x] * cols;
  T* const target = out_TC + int64_t{blockIdx.x} * cols;
  constexpr int kStride = kForwardThreads * kWidth;
  for (int64_t first = int64_t{threadIdx.x} * kWidth; first < cols; first += kForwardUnits * kStride) {
    Stored<T, kWidth> x[kForwardUnits];
#pragma unroll
    for (int n = 0; n < kForwardUnits; ++n) {
      const int64_t at = first + n * kStride;
      x[n] = load_stored<kWidth>(source + at, at < cols);
    }
#pragma unroll
    for (int n = 0; n < kForwardUnits; ++n) {
      const int64_t at = first + n * kStride;
      float scaled[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) scaled[i] = x[n][i] * scale;
      if (at < cols) store(target + at, scaled);
    }
  }
}

// embedding_backward has two kernels. One sums pieces of rows; the sum of a token's only piece is added to d_table.
// The other adds the sums of the few tokens that have several pieces.
constexpr int kBackwardThreads = 128;
constexpr int kBackwardBlocks = 4;  // on a multiprocessor: leaves registers for many loads at once
constexpr int kWindow = 32;
constexpr int kPiece = kEmbeddingPiece;

__device__ inline bool has_one_piece(const TokenRow& row) { return row.count <= kPiece; }
// The slot in the workspace of the first piece of the token whose row is at a position of the order.
__device__ inline int64_t first_slot(const TokenRow& row, int64_t position) {
  return (position - row.rank) / kEmbeddingSlotRows;
}

// Threads have a few columns each. Blocks that follow one another are a group: together they have a whole row.
struct RowBlocks {
  unsigned per_row;
  int cols;

  RowBlocks(int64_t cols_, int width)
      : per_row(static_cast<unsigned>(ceil_div(cols_, kBackwardThreads * width))), cols(static_cast<int>(cols_)) {}
  __device__ int64_t group() const { return blockIdx.x / per_row; }
  __device__ int column(int width) const {  // the first one of a thread
    return static_cast<int>(blockIdx.x % per_row * kBackwardThreads + threadIdx.x) * width;
  }
};

template <int kWidth, typename T>
__device__ inline void add(const Stored<T, kWidth>& x, float (&sum)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += x[i];
}

// The total of a token's rows becomes what its row of the table is to be.
template <int kWidth, typename T>
__device__ inline void add_scaled(float scale, const Stored<T, kWidth>& before, float (&sum)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = __fadd_rn(__fmul_rn(sum[i], scale), before[i]);
}

// The use of the sum after a row of d_out has been added to it.
enum class Then : int { kNothing, kAddToTable, kLeaveInSlot };

struct Step {
  int64_t source;  // where the row begins in d_out
  int64_t target;  // and that in d_table or in the slots, if there is one
  Then then;
};

// A block takes a window of kWindow positions of the order and sums the pieces that begin in it. Most have one or
// two rows, so kDepth rows are loaded at once, of any pieces. The sum of a token's only piece is added to d_table.
template <typename G, typename D, int kWidth>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    sum_pieces_kernel(const TokenRow* order_T, int64_t T, const G* d_out_TC, D* d_table_VC, float* slots_SC,
                      RowBlocks blocks, float scale) {
  // As many as registers are for.
  constexpr int kDepth = Stored<G, kWidth>::kWords + Stored<D, kWidth>::kWords <= 8 ? 8 : 4;
  __shared__ Step steps[kBackwardThreads];
  static_assert(kBackwardThreads >= kWindow + kPiece + kDepth);  // the last piece may reach beyond the window
  wait_for_kernel_before();
  const int64_t begin = blocks.group() * kWindow, position = begin + threadIdx.x;
  const int cols = blocks.cols, column = blocks.column(kWidth);
  int64_t piece_begin = T;  // of a row to add, where its piece begins
  const TokenRow row = position < T ? order_T[position] : TokenRow{};
  if (position < T && row.id != kImageSlot) {
    piece_begin = position - row.rank % kPiece;
    Step& step = steps[threadIdx.x];
    step.source = int64_t{row.row} * cols;
    if (row.rank % kPiece != kPiece - 1 && row.rank != row.count - 1) {
      step.then = Then::kNothing;
    } else if (has_one_piece(row)) {
      step.then = Then::kAddToTable;
      step.target = int64_t{row.id} * cols;
    } else {
      step.then = Then::kLeaveInSlot;
      step.target = (first_slot(row, position) + row.rank / kPiece) * cols;
    }
  }
  const int first = __syncthreads_count(piece_begin < begin);
  const int end = __syncthreads_count(piece_begin < min(begin + kWindow, T));
  if (column >= cols) return;

  float sum[kWidth] = {};
  for (int n = first; n < end; n += kDepth) {
    Stored<G, kWidth> values[kDepth];
    Stored<D, kWidth> before[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const Step& step = steps[n + i];
      values[i] = load_stored<kWidth>(d_out_TC + step.source + column, n + i < end);
      const bool adds = n + i < end && step.then == Then::kAddToTable;
      before[i] = load_stored<kWidth>(d_table_VC + step.target + column, adds);
    }
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const Step& step = steps[n + i];
      if (n + i >= end) break;
      add(values[i], sum);
      if (step.then == Then::kNothing) continue;
      if (step.then == Then::kAddToTable) {
        add_scaled(scale, before[i], sum);
        store(d_table_VC + step.target + column, sum);
      } else {
        store(slots_SC + step.target + column, sum);
      }
#pragma unroll
      for (float& x : sum) x = 0.0f;
    }
  }
}

constexpr int kSlotWidth = 4;
constexpr int kSlotDepth = 16;  // slots that are loaded at once

// Adds to d_table the sums of the tokens that have several pieces. Such a token has rows at multiples of kPiece in
// the order: the group of the first of these takes it.
template <typename D, int kWidth>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    add_slots_kernel(const TokenRow* order_T, const float* slots_SC, D* d_table_VC, RowBlocks blocks, float scale) {
  wait_for_kernel_before();
  const int64_t position = blocks.group() * kPiece;
  const TokenRow row = order_T[position];
  const int column = blocks.column(kWidth);
  if (row.id == kImageSlot || has_one_piece(row) || row.rank >= kPiece || column >= blocks.cols) return;
  const float* const slots = slots_SC + first_slot(row, position) * blocks.cols + column;
  D* const target = d_table_VC + int64_t{row.id} * blocks.cols + column;
  const Stored<D, kWidth> before = load_stored<kWidth>(target);
  const int pieces = (row.count - 1) / kPiece + 1;
  float sum[kWidth] = {};
  for (int n = 0; n < pieces; n += kSlotDepth) {
    Stored<float, kWidth> values[kSlotDepth];
#pragma unroll
    for (int i = 0; i < kSlotDepth; ++i) {
      values[i] = load_stored<kWidth>(slots + int64_t{n + i} * blocks.cols, n + i < pieces);
    }
#pragma unroll
    for (int i = 0; i < kSlotDepth; ++i) add(values[i], sum);  // zeros beyond the last piece change no sum
  }
  add_scaled(scale, before, sum);
  store(target, sum);
}

template <typename G, typename D, int kWidth>
void launch_backward(CudaDevice& device, const EmbeddingBackward& a) {
  const int64_t T = a.d_out.dim[0], C = a.d_out.dim[1];
  PARKA_REQUIRE(C <= INT32_MAX / 2);
  constexpr int kNarrow = kWidth < kSlotWidth ? kWidth : kSlotWidth;
  const RowBlocks blocks(C, kWidth), slot_blocks(C, kNarrow);
  const int64_t windows = ceil_div(T, kWindow), pieces = ceil_div(T, kPiece);
  constexpr const char* kOp = "embedding_backward";
  auto* const slots_SC = static_cast<float*>(device.workspace(kOp, workspace_of(a)));
  D* const d_table_VC = a.d_table.as<D>();
  launch_early(device, kOp, sum_pieces_kernel<G, D, kWidth>, {windows * blocks.per_row, kBackwardThreads}, a.rows(),
               T, a.d_out.as<G>(), d_table_VC, slots_SC, blocks, a.scale);
  launch_early(device, kOp, add_slots_kernel<D, kNarrow>, {pieces * slot_blocks.per_row, kBackwardThreads},
               a.rows(), static_cast<const float*>(slots_SC), d_table_VC, slot_blocks, a.scale);
}

template <typename G, typename D>
void add_rows(CudaDevice& device, const EmbeddingBackward& a) {
  constexpr int kWideWidth = 16 / sizeof(G);
  if (a.d_out.dim[1] % kWideWidth == 0 && is_aligned(a.d_out.data, 16) && is_aligned(a.d_table.data, 16)) {
    launch_backward<G, D, kWideWidth>(device, a);
  } else {
    launch_backward<G, D, 1>(device, a);
  }
}

void scale_rows(CudaDevice& device, const EmbeddingForward& a) {
  with_plain_type(a.table.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = a.table.dim[1] % kWide == 0 && are_aligned({a.table.data, a.out.data});
    launch(device, "embedding_forward", wide ? scaled_embedding_kernel<T, kWide> : scaled_embedding_kernel<T, 1>,
           {a.ids.dim[0], kForwardThreads}, a.ids.as<int32_t>(), a.table.as<T>(), a.out.as<T>(), a.table.dim[1],
           a.scale);
  });
}

template <Copy kCopy>
void copy_rows(CudaDevice& device, const char* op, const TensorView& positions, const TensorView& x,
               const TensorView& out) {
  const int64_t row_bytes = x.dim[1] * size_of(x.dtype);
  const auto copy = [&](auto unit) {
    using Unit = decltype(unit);
    launch(device, op, copy_rows_kernel<kCopy, Unit>, {positions.dim[0], kForwardThreads}, positions.as<int32_t>(),
           static_cast<const Unit*>(x.data), static_cast<Unit*>(out.data),
           row_bytes / static_cast<int64_t>(sizeof(Unit)));
  };
  row_bytes % 16 == 0 && are_aligned({x.data, out.data}) ? copy(uint4{}) : copy(uint16_t{});
}

}  // namespace

void embedding_forward(Device& any_device, const EmbeddingForward& a) {
  CudaDevice& device = as_cuda(any_device);
  if (a.scale != 1) {
    scale_rows(device, a);
  } else {
    copy_rows<Copy::kEmbed>(device, "embedding_forward", a.ids, a.table, a.out);
  }
}

void embedding_backward(Device& device, const EmbeddingBackward& a) {
  with_plain_type(a.d_out.dtype, [&](auto g) {
    with_plain_type(a.d_table.dtype, [&](auto d) { add_rows<decltype(g), decltype(d)>(as_cuda(device), a); });
  });
}

void scatter_rows(Device& device, const ScatterRows& a) {
  copy_rows<Copy::kScatter>(as_cuda(device), "scatter_rows", a.positions, a.x, a.out);
}

void gather_rows(Device& device, const GatherRows& a) {
  copy_rows<Copy::kGather>(as_cuda(device), "gather_rows", a.positions, a.x, a.out);
}

}  // namespace parka::cuda
