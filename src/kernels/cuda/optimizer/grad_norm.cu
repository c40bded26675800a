#include "kernels/ops/optimizer/grad_norm.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/op/workspace.h"

namespace parka::cuda {
namespace {

// ---- Sums in double, in a fixed order ----

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // wide loads that a thread has under way before it uses the first

// What one thread adds to the sum over x[0 .. count).
template <int kBlock, typename T>
__device__ double thread_sum(const T* x, int64_t count) {
  double sum = 0.0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kBlock) sum += static_cast<double>(x[i]);
  return sum;
}

// Returns what one thread adds to the sum of squares over x[0 .. count), reading kWidth elements at a time.
template <int kWidth, typename T>
__device__ double thread_sum_of_squares(const T* x, int count) {
  constexpr int kStride = kThreads * kWidth;
  double sum = 0.0;
  const auto add = [&](float v) { sum = fma(static_cast<double>(v), static_cast<double>(v), sum); };
  int i = static_cast<int>(threadIdx.x) * kWidth;
  for (; i + (kBatch - 1) * kStride + kWidth <= count; i += kBatch * kStride) {
    float v[kBatch][kWidth];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) load<kWidth>(x + i + b * kStride, v[b]);
#pragma unroll
    for (int n = 0; n < kBatch * kWidth; ++n) add(v[n / kWidth][n % kWidth]);
  }
  for (; i + kWidth <= count; i += kStride) {
    float v[kWidth];
    load<kWidth>(x + i, v);
#pragma unroll
    for (int n = 0; n < kWidth; ++n) add(v[n]);
  }
  for (; i < count; ++i) add(to_float(x[i]));  // fewer than kWidth, of the one thread that they fall to
  return sum;
}

template <typename T>
__device__ double thread_sum_of_squares(const void* part, int64_t begin, int count, bool aligned) {
  const T* x = static_cast<const T*>(part) + begin;
  return aligned ? thread_sum_of_squares<16 / sizeof(T)>(x, count) : thread_sum_of_squares<1>(x, count);
}

// ---- Parts ----

struct Part {
  const void* data;
  int64_t numel;
  int32_t first_piece;  // counted from the first piece of the table
  bool is_bf16;
  bool aligned;  // to 16 bytes; pieces are multiples of that
};

// Goes to kernels as an argument, where 4 KiB are allowed, so that it needs no copy to the device.
struct PartTable {
  static constexpr int kCapacity = 160;
  int num_parts;
  int num_pieces;
  Part parts[kCapacity];
};
static_assert(sizeof(PartTable) <= 4000);

// The tensors [begin, end) as a table. Their pieces are fewer than 2^31.
PartTable make_table(const std::vector<TensorView>& tensors, size_t begin, size_t end) {
  PartTable table{};
  table.num_parts = static_cast<int>(end - begin);
  int64_t num_pieces = 0;
  for (size_t p = begin; p < end; ++p) {
    const TensorView& t = tensors[p];
    table.parts[p - begin] = {t.data, t.numel(), static_cast<int32_t>(num_pieces), t.dtype == DType::kBF16,
                              is_aligned(t.data, 16)};
    num_pieces += sum_of_squares_pieces(t.numel());
    PARKA_REQUIRE(num_pieces <= INT32_MAX);
  }
  table.num_pieces = static_cast<int>(num_pieces);
  return table;
}

// The part of a piece: the last that does not begin after it, as parts without elements begin with the next.
__device__ int part_of_piece(const PartTable& table, int piece) {
  int part = 0, end = table.num_parts;
  while (end - part > 1) {
    const int middle = (part + end) / 2;
    if (table.parts[middle].first_piece <= piece) {
      part = middle;
    } else {
      end = middle;
    }
  }
  return part;
}

// ---- Kernels ----

// One block for each piece.
__global__ void __launch_bounds__(kThreads)
    piece_sums_kernel(const __grid_constant__ PartTable table, double* piece_sums) {
  wait_for_kernel_before();
  const int piece = static_cast<int>(blockIdx.x);
  const Part& part = table.parts[part_of_piece(table, piece)];
  const int64_t begin = (piece - part.first_piece) * kSumOfSquaresPiece;
  const int64_t left = part.numel - begin;
  const int count = static_cast<int>(left < kSumOfSquaresPiece ? left : kSumOfSquaresPiece);
  const double sum = part.is_bf16 ? thread_sum_of_squares<BFloat16>(part.data, begin, count, part.aligned)
                                  : thread_sum_of_squares<float>(part.data, begin, count, part.aligned);
  const double total = block_sum_double<kThreads>(sum);
  if (threadIdx.x == 0) piece_sums[piece] = total;
}

// One block for each part.
__global__ void __launch_bounds__(kThreads)
    part_sums_kernel(const __grid_constant__ PartTable table, const double* piece_sums, double* part_sums,
                     float* partial) {
  wait_for_kernel_before();
  const int p = static_cast<int>(blockIdx.x);
  const int begin = table.parts[p].first_piece;
  const int end = p + 1 < table.num_parts ? table.parts[p + 1].first_piece : table.num_pieces;
  const double sum = block_sum_double<kThreads>(thread_sum<kThreads>(piece_sums + begin, end - begin));
  if (threadIdx.x == 0) {
    part_sums[p] = sum;
    partial[p] = static_cast<float>(sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* part_sums, int64_t num_parts, float* result) {
  wait_for_kernel_before();
  const double sum = block_sum_double<kThreads>(thread_sum<kThreads>(part_sums, num_parts));
  if (threadIdx.x == 0) *result = static_cast<float>(sum);
}

__global__ void clip_coefficient_kernel(const float* sum_of_squares, const float* clipped_squares,
                                        const float* loss, float max_norm, float most_squares, float most_loss,
                                        float* coefficient) {
  constexpr float kEpsilon = 1e-6f;
  const float squares = *sum_of_squares, clipped = *clipped_squares;
  const bool finite = isfinite(squares) && isfinite(*loss) && isfinite(clipped);
  const bool fits = finite && squares <= most_squares && *loss <= most_loss;
  const float ratio = __fdiv_rn(max_norm, __fadd_rn(__fsqrt_rn(clipped), kEpsilon));
  *coefficient = fits ? fminf(1.0f, ratio) : __int_as_float(0x7fffffff);
}

constexpr int kAddSumThreads = 1024;  // one block reads everything

__global__ void __launch_bounds__(kAddSumThreads) add_sum_kernel(const float* x, int64_t count, float* total) {
  const double sum = block_sum_double<kAddSumThreads>(thread_sum<kAddSumThreads>(x, count));
  if (threadIdx.x == 0) *total = static_cast<float>(static_cast<double>(*total) + sum);
}

}  // namespace

void sum_of_squares(Device& device, const SumOfSquares& a) {
  const CudaDevice& cuda_device = as_cuda(device);
  const auto queue = [&](auto* kernel, int blocks, const auto&... arguments) {
    launch_early(cuda_device, "sum_of_squares", kernel, {blocks, kThreads}, arguments...);
  };
  const size_t num_parts = a.parts.size();
  auto* const part_sums = static_cast<double*>(cuda_device.workspace("sum_of_squares", workspace_of(a)));
  double* piece_sums = part_sums + num_parts;
  float* partial = a.partial.as<float>();

  for (size_t begin = 0; begin < num_parts; begin += PartTable::kCapacity) {
    const size_t end = std::min(begin + PartTable::kCapacity, num_parts);
    const PartTable table = make_table(a.parts, begin, end);
    if (table.num_pieces > 0) queue(piece_sums_kernel, table.num_pieces, table, piece_sums);
    queue(part_sums_kernel, table.num_parts, table, piece_sums, part_sums + begin, partial + begin);
    piece_sums += table.num_pieces;
  }
  queue(total_kernel, 1, part_sums, static_cast<int64_t>(num_parts), a.result.as<float>());
}

void clip_coefficient(Device& device, const ClipCoefficient& a) {
  const TensorView& clipped = a.clipped_squares.empty() ? a.sum_of_squares : a.clipped_squares;
  launch(as_cuda(device), "clip_coefficient", clip_coefficient_kernel, {1, 1}, a.sum_of_squares.as<float>(),
         clipped.as<float>(), a.loss.as<float>(), a.max_norm, a.most_squares, a.most_loss,
         a.coefficient.as<float>());
}

void add_sum(Device& device, const AddSum& a) {
  launch(as_cuda(device), "add_sum", add_sum_kernel, {1, kAddSumThreads}, a.x.as<float>(), a.x.numel(),
         a.total.as<float>());
}

}  // namespace parka::cuda
