#include "kernels/cuda/embedding.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/cuda/workspace.h"

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

// embedding_backward sorts the rows of d_out by token id, in order within each id. The rows of one id are a run of
// the sorted list. A run of at least kLong rows, and there are runs of thousands, is summed by a kernel that has
// kLong rows under way at once, a shorter one by a kernel with wider loads.
constexpr int kLong = kWarpSize;
constexpr int kShortMaxThreads = 512;
constexpr int kLongThreads = 256;

struct SortedRows {
  const uint32_t* ids_T;
  const int32_t* rows_T;
  int count;

  __device__ bool holds(int position, uint32_t id) const {
    return position >= 0 && position < count && ids_T[position] == id;
  }
};

// Adds the `count` rows of d_out whose numbers the first lanes of the warp hold, in order. All lanes take part,
// also those whose `column` is beyond the row: they add nothing.
template <int kDepth, int kWidth, typename G>
__device__ void add_rows(const G* d_out_TC, int row_of_lane, int count, int64_t column, int64_t cols,
                         float (&sum)[kWidth]) {
  static_assert(kWarpSize % kDepth == 0);
  for (int first = 0; first < count; first += kDepth) {
    Stored<G, kWidth> values[kDepth];
#pragma unroll
    for (int n = 0; n < kDepth; ++n) {
      const int64_t row = __shfl_sync(kFullWarp, row_of_lane, first + n);
      values[n] = load_stored<kWidth>(d_out_TC + row * cols + column, first + n < count && column < cols);
    }
#pragma unroll
    for (int n = 0; n < kDepth; ++n) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += values[n][i];  // the zeros beyond `count` change no sum
    }
  }
}

// A block per position in the list and piece of the row; it sums the run that begins there, if one does.
template <typename G, typename D, int kWidth>
__global__ void __launch_bounds__(kShortMaxThreads)
    add_short_runs_kernel(SortedRows sorted, const G* d_out_TC, D* d_table_VC, int64_t cols) {
  constexpr int kDepth = 4;
  const int begin = blockIdx.x, lane = threadIdx.x % kWarpSize;
  const uint32_t id = sorted.ids_T[begin];
  if (sorted.holds(begin - 1, id)) return;
  const bool in_run = sorted.holds(begin + lane, id);
  const int count = __popc(__ballot_sync(kFullWarp, in_run));
  if (count == kLong) return;

  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  D* const target = d_table_VC + id * cols + column;
  const auto before = load_stored<kWidth>(target, column < cols);
  float sum[kWidth] = {};
  add_rows<kDepth>(d_out_TC, in_run ? sorted.rows_T[begin + lane] : 0, count, column, cols, sum);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += before[i];
  if (column < cols) store(target, sum);
}

// A block per kLong positions and piece of the row. Every long run has a position that is a multiple of kLong; the
// block of the first of these sums it.
template <typename G, typename D>
__global__ void __launch_bounds__(kLongThreads)
    add_long_runs_kernel(SortedRows sorted, const G* d_out_TC, D* d_table_VC, int64_t cols) {
  const int position = blockIdx.x * kLong, lane = threadIdx.x % kWarpSize;
  const uint32_t id = sorted.ids_T[position];
  if (sorted.holds(position - kLong, id)) return;
  const bool in_run = sorted.holds(position - kLong + 1 + lane, id);
  const int begin = position + 1 - __popc(__ballot_sync(kFullWarp, in_run));
  if (!sorted.holds(begin + kLong - 1, id)) return;

  int end = begin + kLong, beyond = sorted.count;  // the run ends in [end, beyond]
  while (end < beyond) {
    const int middle = end + (beyond - end) / 2;
    if (sorted.ids_T[middle] == id) {
      end = middle + 1;
    } else {
      beyond = middle;
    }
  }
  const int64_t column = int64_t{blockIdx.y} * kLongThreads + threadIdx.x;
  float sum[1] = {};
  const auto row_at = [&](int at) { return at < end ? sorted.rows_T[at] : 0; };
  int row_of_lane = row_at(begin + lane);
  for (int first = begin; first < end; first += kLong) {
    const int next_row_of_lane = row_at(first + kLong + lane);
    add_rows<kLong>(d_out_TC, row_of_lane, min(kLong, end - first), column, cols, sum);
    row_of_lane = next_row_of_lane;
  }
  if (column >= cols) return;
  D* const target = d_table_VC + id * cols + column;
  *target = from_float<D>(sum[0] + to_float(*target));
}

__global__ void count_up_kernel(int32_t* rows_T, int count) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < count) rows_T[t] = t;
}

// The rows sorted by id, in the workspace.
SortedRows sort_rows(CudaDevice& device, const TensorView& ids, int64_t vocabulary) {
  constexpr const char* kOp = "embedding_backward";
  constexpr int kThreads = 256;
  const int64_t count = ids.dim[0], workspace_bytes = embedding_backward_workspace_bytes(count);
  PARKA_REQUIRE(count <= INT32_MAX - 2 * kLong);
  auto* const workspace = static_cast<std::byte*>(device.workspace(kOp, workspace_bytes));
  const int64_t list_bytes = ceil_div(count * size_of(DType::kI32), 256) * 256;
  auto* const rows = reinterpret_cast<int32_t*>(workspace);
  auto* const sorted_ids = reinterpret_cast<uint32_t*>(workspace + list_bytes);
  auto* const sorted_rows = reinterpret_cast<int32_t*>(workspace + 2 * list_bytes);
  std::byte* const sort_memory = workspace + 3 * list_bytes;

  count_up_kernel<<<static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, device.stream()>>>(
      rows, static_cast<int>(count));
  check_launch(kOp);
  const auto sort = [&](void* memory, size_t& bytes) {
    const auto* const unsorted_ids = reinterpret_cast<const uint32_t*>(ids.as<int32_t>());
    const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocabulary - 1))));
    check(cub::DeviceRadixSort::SortPairs(memory, bytes, unsorted_ids, sorted_ids, rows, sorted_rows,
                                          static_cast<int>(count), 0, bits, device.stream()),
          kOp);
  };
  size_t sort_bytes = 0;
  sort(nullptr, sort_bytes);  // only says how much memory it takes
  PARKA_REQUIRE(static_cast<int64_t>(sort_bytes) <= workspace_bytes - 3 * list_bytes);
  sort(sort_memory, sort_bytes);
  return {sorted_ids, sorted_rows, static_cast<int>(count)};
}

template <typename G, typename D>
void add_runs(CudaDevice& device, const SortedRows& sorted, const EmbeddingBackward& a) {
  const int64_t cols = a.d_out.dim[1];
  constexpr int kWideWidth = 16 / sizeof(G);
  const bool wide = cols % kWideWidth == 0 && is_aligned(a.d_out.data, 16) && is_aligned(a.d_table.data, 16);
  const auto short_kernel = wide ? add_short_runs_kernel<G, D, kWideWidth> : add_short_runs_kernel<G, D, 1>;
  const int64_t packs = cols / (wide ? kWideWidth : 1);
  const int64_t threads = std::min<int64_t>(ceil_div(packs, kWarpSize) * kWarpSize, kShortMaxThreads);
  const dim3 short_blocks(static_cast<unsigned>(sorted.count), static_cast<unsigned>(ceil_div(packs, threads)));
  short_kernel<<<short_blocks, static_cast<unsigned>(threads), 0, device.stream()>>>(sorted, a.d_out.as<G>(),
                                                                                     a.d_table.as<D>(), cols);
  check_launch("embedding_backward");

  const dim3 long_blocks(static_cast<unsigned>(ceil_div(sorted.count, kLong)),
                         static_cast<unsigned>(ceil_div(cols, kLongThreads)));
  add_long_runs_kernel<<<long_blocks, kLongThreads, 0, device.stream()>>>(sorted, a.d_out.as<G>(),
                                                                          a.d_table.as<D>(), cols);
  check_launch("embedding_backward");
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
  const SortedRows sorted = sort_rows(as_cuda(device), a.ids, a.d_table.dim[0]);
  with_plain_type(a.d_out.dtype, [&](auto g) {
    with_plain_type(a.d_table.dtype,
                    [&](auto d) { add_runs<decltype(g), decltype(d)>(as_cuda(device), sorted, a); });
  });
}

}  // namespace parka::cuda
