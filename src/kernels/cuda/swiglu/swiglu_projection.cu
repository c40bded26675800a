#include "kernels/ops/swiglu/swiglu.h"

#include "kernels/cuda/gemm/sm90_float8_tiles.cuh"
#include "kernels/cuda/swiglu/gate_codes.cuh"

namespace parka::cuda {
namespace {

// A tile of the projection is 128 columns of up beside the same of gate.
template <bool kSavesSilu, typename Activation>
__global__ void __launch_bounds__(sm90_float8::kThreads, 1) __cluster_dims__(sm90_float8::kClusterBlocks, 1, 1)
    project_gate_kernel(const __grid_constant__ sm90_float8::Product product, const GateCodes<Activation> codes,
                        float* amax) {
#if PARKA_SM90_CODE
  using namespace sm90_float8;
  extern __shared__ __align__(1024) unsigned char shared[];
  float largest = 0.0f;
  run_product(product, shared, [&](TileOrder::Place place, int half, uint32_t memory) {
    constexpr int kRowThreads = kHalfCols / kSourceWidth, kRowsAtATime = kFinishers / kRowThreads;
    const int thread = finisher_index(), col = thread % kRowThreads * kSourceWidth;
    struct Row {
      Stored<BFloat16, kSourceWidth> up, gate;
    };
    const auto read = [&](int row) -> Row {
      return {read_half<kSourceWidth>(memory, row, col), read_half<kSourceWidth>(memory, row, kHalfCols + col)};
    };
    const auto make = [&](const Row& row) { return codes.template make<Float8E4M3, kSavesSilu>(row.up, row.gate); };
    const auto store = [&](const auto& made, int row) {
      codes.store(made, place.row + OutTile::tile_row(half, row), place.col + col);
    };
#pragma unroll 1
    for (int row = thread / kRowThreads; row < kHalfRows; row += 2 * kRowsAtATime) {
      // Two rows, so that one's instructions fill the time that the other's wait for each other.
      const int next = row + kRowsAtATime;
      const Row here = read(row), below = read(min(next, kHalfRows - 1));
      const auto made = make(here), made_below = make(below);
      largest = fmaxf(largest, fmaxf(made.amax, made_below.amax));
      store(made, row);
      if (next < kHalfRows) store(made_below, next);
    }
  });
  if (amax == nullptr || !is_finisher()) return;
  const uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(largest));
  if (threadIdx.x % kWarpSize == 0) raise_to(amax, __uint_as_float(of_warp));
#endif
}

void project_gate(CudaDevice& device, const SwigluProjection& a, float* amax) {
  with_activation(a.swiglu.activation, [&](auto activation) {
    using A = decltype(activation);
    const auto kernel = a.swiglu.silu.empty() ? project_gate_kernel<false, A> : project_gate_kernel<true, A>;
    sm90_float8::launch_product(device, "swiglu_projection", kernel, sm90_float8::Product(a.projection),
                                GateCodes<A>(a.swiglu, activation), amax);
  });
}

}  // namespace

bool has_one_kernel(Device& device, const SwigluProjection& a) {
  return sm90_float8::runs_on(as_cuda(device)) && suits_one_kernel(a) && fits_gate_codes(a.swiglu);
}

void swiglu_projection(Device& device, const SwigluProjection& a) {
  if (!cuda::has_one_kernel(device, a)) {
    cuda::gemm(device, a.projection);
    cuda::swiglu_forward(device, a.swiglu);
    return;
  }
  CudaDevice& gpu = as_cuda(device);
  float* const amax = zero_product_amax(gpu, "swiglu_projection", a.swiglu);
  project_gate(gpu, a, amax);
  write_product_of_codes(gpu, a.swiglu, amax);
}

}  // namespace parka::cuda
