#include "kernels/ops/gemm/int8.h"

#include <cmath>

#include "kernels/cuda/gemm/sm90_float8_tiles.cuh"

// INT8 codes of rows, and their products, by the kernels that sm90_float8_tiles.cuh describes: the tensor cores
// take as many codes of INT8 as of E4M3 at a time, and their sums are exact.
namespace parka::cuda {
namespace {

// ---- Codes: a block of threads for each row ----

constexpr int kEach = 16;  // numbers of a thread, one after the other
constexpr int kMostThreads = 1024;
constexpr uint32_t kMagnitudeBits = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

// Numbers of a thread, and those of up to three threads beside it, times the Hadamard matrix of order `width`.
__device__ __forceinline__ void rotate(float (&x)[kEach], int width, float factor) {
#pragma unroll
  for (int distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & distance) != 0) continue;
      const float sum = __fadd_rn(x[i], x[i + distance]);
      x[i + distance] = __fsub_rn(x[i], x[i + distance]);
      x[i] = sum;
    }
  }
  for (int distance = kEach; distance < width; distance *= 2) {
    const bool is_second = (threadIdx.x * kEach & distance) != 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, x[i], distance / kEach);
      x[i] = is_second ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = __fmul_rn(x[i], factor);
}

__device__ inline uint32_t block_max_bits(uint32_t x) {
  __shared__ uint32_t of_warps[kMostThreads / kWarpSize];
  x = __reduce_max_sync(kFullWarp, x);
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp) x = max(x, of_warps[warp]);
  return x;
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    quantize_kernel(const T* x, int8_t* codes, float* scales, int cols, int width, float factor) {
  wait_for_kernel_before();
  const int step = static_cast<int>(blockDim.x) * kEach, first = static_cast<int>(threadIdx.x) * kEach;
  x += int64_t{blockIdx.x} * cols;
  codes += int64_t{blockIdx.x} * cols;
  float h[kEach];
  const auto read = [&](int at) {
    if (at < cols) {
      load<kEach>(x + at, h);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) h[i] = 0.0f;
    }
    rotate(h, width, factor);
  };
  uint32_t largest = 0;  // infinities and NaNs have the largest magnitudes as integers, too
  for (int at = first; at - first < cols; at += step) {
    read(at);
#pragma unroll
    for (int i = 0; i < kEach; ++i) largest = max(largest, __float_as_uint(h[i]) & kMagnitudeBits);
  }
  largest = block_max_bits(largest);
  const float absmax = __uint_as_float(largest < kInfinityBits ? largest : kNanBits);
  const float inverse = __fdiv_rn(127.0f, absmax);
  const bool has_codes = isfinite(inverse);
  if (threadIdx.x == 0) scales[blockIdx.x] = __fdiv_rn(absmax, 127.0f);
  for (int at = first; at - first < cols; at += step) {
    if (cols > step) read(at);
    if (at >= cols) continue;
    uint32_t packed[kEach / 4] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int code = has_codes ? __float2int_rn(__fmul_rn(h[i], inverse)) : 0;
      packed[i / 4] |= (static_cast<uint32_t>(code) & 0xffu) << (i % 4 * 8);
    }
    *reinterpret_cast<uint4*>(codes + at) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

// ---- Products ----

using namespace sm90_float8;

struct Int8Product {
  CUtensorMap a_map, b_map;
  const float *scale_a, *scale_b;
  BFloat16* out;
  int rows, cols, steps;
  TileOrder order;
  bool accumulate;

  explicit Int8Product(const GemmInt8& a)
      : a_map(make_code_map(a.a.data.data, a.a.num_rows(), a.a.num_cols(), kTileRows)),
        b_map(make_code_map(a.b.data.data, a.b.num_rows(), a.b.num_cols(), kHalfCols)),
        scale_a(a.a.scale.as<float>()),
        scale_b(a.b.scale.as<float>()),
        out(a.out.as<BFloat16>()),
        rows(static_cast<int>(a.a.num_rows())),
        cols(static_cast<int>(a.b.num_rows())),
        steps(static_cast<int>(ceil_div(a.a.num_cols(), kCodesDepth))),
        order(rows, cols / 2, a.a.num_cols()),
        accumulate(a.accumulate) {}
};

#if PARKA_SM90_CODE

// The order has tiles of half as many columns, for kernels whose tiles have as many of another half beside them.
__device__ inline int first_column(TileOrder::Place place) { return 2 * place.col; }

// By one thread.
__device__ __forceinline__ void copy_int8_tiles(const Int8Product& p, uint32_t shared, const Ring& ring) {
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  const int rank = static_cast<int>(__clusterRelativeBlockRank());
  unsigned slot = 0;
  for_each_tile(p.order, [&](TileOrder::Place place, unsigned) {
    const int b_row = first_column(place) + rank * kHalfCols;
    for (int step = 0; step < p.steps; ++step, ++slot) {
      const uint32_t a = shared + Ring::place(slot) * kStageBytes, full = ring.full + Ring::place(slot) * 8;
      ring.wait_empty(slot);
      mbarrier_expect_tx(full, kStageBytes);
      copy_codes_async(a, p.a_map, step * kCodesDepth, place.row, full);
      copy_box_to_blocks_async(a + kBytesA + rank * kHalfCols * kCodesDepth, p.b_map, step * kCodesDepth, b_row,
                               full, kAllBlocks);
    }
  });
}

// Multiplies sums by the scales of their rows and columns. `row` and `col` are those of this thread's first sum.
struct Scales {
  const Int8Product& p;
  int row, col;
  __device__ __forceinline__ float2 operator()(const int (&x)[4], int n, int half) const {
    const float scale_a = __ldg(p.scale_a + min(row + half * 8, p.rows - 1));
    const float2 scale_b = __ldg(reinterpret_cast<const float2*>(p.scale_b + min(col + n * 8, p.cols - 2)));
    const float low = __int2float_rn(x[2 * half]), high = __int2float_rn(x[2 * half + 1]);
    return make_float2(__fmul_rn(__fmul_rn(low, scale_a), scale_b.x),
                       __fmul_rn(__fmul_rn(high, scale_a), scale_b.y));
  }
};

// By all finishers.
__device__ __forceinline__ void store_tiles(const Int8Product& p, uint32_t shared, const OutTile& out) {
  constexpr int kWidth = 8;
  const int warp = finisher_index() / kWarpSize, lane = finisher_index() % kWarpSize;
  finish_tiles(out, p.order, [&](TileOrder::Place place, int half) {
    const int col = first_column(place) + lane * kWidth;
#pragma unroll 4
    for (int row = warp; row < kHalfRows; row += kFinisherWarps) {
      const Stored<BFloat16, kWidth> x = read_half<kWidth>(shared, row, lane * kWidth);
      const int to = place.row + OutTile::tile_row(half, row);
      if (to >= p.rows || col >= p.cols) continue;
      BFloat16* const target = p.out + int64_t{to} * p.cols + col;
      float y[kWidth];
      if (p.accumulate) load<kWidth>(target, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[i] = p.accumulate ? __fadd_rn(y[i], x[i]) : x[i];
      store<kWidth>(target, y);
    }
  });
}

#endif  // PARKA_SM90_CODE

__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kClusterBlocks, 1, 1)
    gemm_int8_kernel(const __grid_constant__ Int8Product product) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Ring ring(shared);
  const OutTile out(shared);
  run_roles(
      ring, out, [] {}, [&] { copy_int8_tiles(product, shared, ring); },
      [&](int consumer) {
        const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
        const int warp = static_cast<int>(threadIdx.x) / kWarpSize % kWarpsOfGroup;
        const int row = consumer * kConsumerRows + warp * 16 + lane / 4, col = lane % 4 * 2;
        multiply_tiles<int8_t, false>(consumer, product.steps, shared, ring, out, [&](const auto& f) {
          for_each_tile(product.order, [&](TileOrder::Place place, unsigned) {
            f(Scales{product, place.row + row, first_column(place) + col});
          });
        });
      },
      [&] { store_tiles(product, shared, out); });
#endif
}

}  // namespace

void quantize_int8(Device& device, const QuantizeInt8& a) {
  const int64_t R = a.x.dim[0], K = a.x.dim[1], width = rotation_width(K);
  PARKA_REQUIRE(K % kEach == 0 && R <= INT32_MAX && K <= INT32_MAX && are_aligned({a.x.data, a.out.data.data}));
  const int64_t threads = std::min<int64_t>(ceil_div(K / kEach, kWarpSize) * kWarpSize, kMostThreads);
  const float factor = 1.0f / std::sqrt(static_cast<float>(width));
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    launch_early(as_cuda(device), "quantize_int8", quantize_kernel<T>, {R, static_cast<unsigned>(threads)},
                 a.x.as<T>(), a.out.data.as<int8_t>(), a.out.scale.as<float>(), static_cast<int>(K),
                 static_cast<int>(width), factor);
  });
}

void gemm_int8(Device& device, const GemmInt8& a) {
  CudaDevice& gpu = as_cuda(device);
  PARKA_REQUIRE(a.out.dtype == DType::kBF16 && a.b.num_rows() % 8 == 0 && a.a.num_cols() % 16 == 0 &&
                a.a.num_rows() <= INT32_MAX && a.b.num_rows() <= INT32_MAX &&
                are_aligned({a.a.data.data, a.b.data.data, a.out.data}));
  const Int8Product product(a);
  const int clusters =
      std::min(static_cast<int>(product.order.count()), gpu.num_multiprocessors() / kClusterBlocks);
  check(cudaFuncSetAttribute(gemm_int8_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "gemm_int8");
  launch(gpu, "gemm_int8", gemm_int8_kernel, {clusters * kClusterBlocks, kThreads, kSharedBytes}, product);
}

}  // namespace parka::cuda
