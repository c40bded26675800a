#include "kernels/ops/optimizer/muon.h"

#include <type_traits>
#include <utility>

#include "kernels/cuda/gemm/gemm_cache.h"
#include "kernels/cuda/optimizer/step_kernels.cuh"
#include "kernels/op/workspace.h"

namespace parka::cuda {
namespace {

// ---- Momentum ----

struct MomentumConstants {
  float mu, gain;  // gain = 1 - mu

  explicit MomentumConstants(const MuonMomentum& a)
      : mu(static_cast<float>(a.mu)), gain(static_cast<float>(1.0 - a.mu)) {}
};

template <typename Gradient, typename Momentum>
struct MomentumTensors {
  Gradient gradient;
  Momentum momentum;
  PlainTensor<BFloat16> direction;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    gradient.move(elements);
    momentum.move(elements);
    direction.move(elements);
  }
};

// Makes directions of gradients g, and next momenta of b. Each operation is rounded by itself, as on the CPU.
template <typename Shape>
__device__ void update_momentum(const MomentumConstants& c, float grad_scale, float (&g)[Shape::kCount],
                                float (&b)[Shape::kCount]) {
  for_each_element<Shape>([&](int e) {
    const float g_e = __fmul_rn(g[e], grad_scale);
    b[e] = __fadd_rn(b[e], __fmul_rn(c.gain, __fsub_rn(g_e, b[e])));
    g[e] = __fadd_rn(g_e, __fmul_rn(c.mu, __fsub_rn(b[e], g_e)));
  });
}

template <typename Shape, typename Tensors>
__global__ void __launch_bounds__(Shape::kThreads)
    muon_momentum_kernel(Tensors tensors, const float* grad_scale, MomentumConstants constants, int64_t N,
                         bool aligned) {
  const float scale = *grad_scale;
  with_part<Shape>(N, aligned, [&](const auto& part, int64_t first) {
    tensors.move(first);
    float g[Shape::kCount] = {}, b[Shape::kCount];
    if (isfinite(scale)) {
      to_floats(tensors.gradient.load(part), g);
      to_floats(tensors.momentum.load(part), b);
      update_momentum<Shape>(constants, scale, g, b);
      tensors.momentum.store(part, b);
    }
    tensors.direction.store(part, g);
  });
}

template <typename Gradient, typename Momentum>
struct LoadedMomentum {
  Gradient gradient;
  Momentum momentum;
};

// Of `count` times Shape::kBlockElements elements of aligned tensors, with an expanded fp8 momentum; made as
// adamw_fp8_kernel is, but with more warps, because each has fewer bytes under way.
template <typename Shape, typename Tensors>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    muon_momentum_fp8_kernel(const __grid_constant__ Tensors tensors, const float* grad_scale,
                             MomentumConstants constants, int count, unsigned* counters) {
  constexpr WholePart<Shape> part;
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    const float zeros[Shape::kCount] = {};
    for (int block = static_cast<int>(blockIdx.x); block < count; block += static_cast<int>(gridDim.x)) {
      at_block<Shape>(tensors, block).direction.store(part, zeros);
    }
    return;
  }
  BlockScheduler scheduler(counters, count);
  const auto load_block = [&](int block) {
    const Tensors at = at_block<Shape>(tensors, block);
    return LoadedMomentum{at.gradient.load(part), at.momentum.load(part)};
  };
  auto elements = load_block(scheduler.block());
  const RootTable& roots = copy_roots<Shape::kThreads>();

  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    const Tensors at = at_block<Shape>(tensors, scheduler.block());
    float g[Shape::kCount], b[Shape::kCount];
    to_floats(elements.gradient, g);
    decode(elements.momentum, roots, b);
    update_momentum<Shape>(constants, scale, g, b);
    at.direction.store(part, g);
    if (scheduler.has_next()) elements = load_block(scheduler.next());
    at.momentum.store(part, b);
  }
  BlockScheduler::end<Shape::kThreads>(counters);
}

using FastShape = PartShape<2, 8, 24>;

void fast_momentum(CudaDevice& device, const MuonMomentum& a, int64_t num_elements) {
  with_plain_tensor(a.gradient, [&](auto gradient) {
    MomentumTensors tensors{gradient, Fp8Moment<false, true>(a.momentum), {a.direction.as<BFloat16>()}};
    launch_with_roots<FastShape>(device, "muon_momentum", muon_momentum_fp8_kernel<FastShape, decltype(tensors)>,
                                 num_elements, tensors, a.grad_scale.as<float>(), MomentumConstants(a));
  });
}

// Of the elements from number `begin` on, a multiple of 128.
template <typename Momentum>
void any_momentum(CudaDevice& device, const MuonMomentum& a, const Momentum& momentum, int64_t begin = 0) {
  const int64_t N = a.gradient.numel() - begin;
  if (N == 0) return;
  MomentumTensors tensors{AnyGradient(a.gradient), momentum, {a.direction.as<BFloat16>()}};
  tensors.move(begin);
  const bool aligned = is_aligned_for<SmallShape>({a.gradient, a.momentum.values, a.direction});
  launch(device, "muon_momentum", muon_momentum_kernel<SmallShape, decltype(tensors)>,
         {ceil_div(N, SmallShape::kBlockElements), SmallShape::kThreads}, tensors, a.grad_scale.as<float>(),
         MomentumConstants(a), N, aligned);
}

// ---- Step ----

struct StepConstants {
  float lr, weight_decay;
};

template <typename Weights>
struct StepTensors {
  Weights weights;
  PlainTensor<BFloat16> direction;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weights.move(elements);
    direction.move(elements);
  }
};

using StepShape = PartShape<1, 8, 8>;

// w -= lr (o + weight_decay w), with the orthogonalized direction o
template <typename Weights>
__global__ void __launch_bounds__(StepShape::kThreads)
    muon_step_kernel(StepTensors<Weights> tensors, const float* grad_scale, float* weight_amax, StepConstants c,
                     int64_t N, bool aligned) {
  const bool changes = isfinite(*grad_scale);
  if (!changes && weight_amax == nullptr) return;
  LargestStored<typename Weights::Type> largest;
  with_part<StepShape>(N, aligned, [&](const auto& part, int64_t first) {
    tensors.move(first);
    if (!changes) {
      largest.raise_to(load_part(tensors.weights.x_N, part));
      return;
    }
    float w[StepShape::kCount], o[StepShape::kCount];
    to_floats(tensors.direction.load(part), o);
    to_floats(tensors.weights.load(part), w);
    for_each_element<StepShape>([&](int e) { update_weight(c, o[e], w[e]); });
    largest.raise_to(tensors.weights.store(part, w));
  });
  largest.template write<StepShape::kThreads>(weight_amax);
}

// ---- Norm of matrices ----

constexpr int kThreads = 256, kWidth = 8;

// One thread block's elements of one of many matrices of `numel` elements.
struct Piece {
  int64_t matrix, begin;  // the first element, of all matrices
  int count;

  __device__ Piece(int64_t numel, int pieces) : matrix(blockIdx.x / pieces) {
    const int64_t in_matrix = blockIdx.x % pieces * kOrthogonalizePiece;
    begin = matrix * numel + in_matrix;
    count = static_cast<int>(min(kOrthogonalizePiece, numel - in_matrix));
  }
  // Calls f(i, whole) for each kWidth elements from the i-th on that the thread has, fewer at the end unless
  // `whole`. Their order is the same for matrices that are aligned and others.
  template <typename F>
  __device__ void for_each_pack(bool aligned, const F& f) const {
    for (int i = static_cast<int>(threadIdx.x) * kWidth; i < count; i += kThreads * kWidth) {
      if (aligned && i + kWidth <= count) {
        f(i, std::true_type());
      } else {
        f(i, std::false_type());
      }
    }
  }
};

template <bool kWhole>
__device__ void load_pack(const BFloat16* p, int left, float (&x)[kWidth]) {
  if constexpr (kWhole) {
    load(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = i < left ? to_float(p[i]) : 0.0f;
  }
}

__global__ void __launch_bounds__(kThreads)
    piece_squares_kernel(const BFloat16* matrices, int64_t numel, int pieces, bool aligned, double* sums) {
  wait_for_kernel_before();
  const Piece piece(numel, pieces);
  const BFloat16* const first = matrices + piece.begin;
  double sum = 0.0;
  piece.for_each_pack(aligned, [&](int i, auto whole) {
    float x[kWidth];
    load_pack<whole.value>(first + i, piece.count - i, x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum = fma(static_cast<double>(x[k]), static_cast<double>(x[k]), sum);
  });
  sum = block_sum_double<kThreads>(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// out = matrices / max(safety * norm, 1e-7); `out` may be `matrices`.
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(const BFloat16* matrices, BFloat16* out, int64_t numel, int pieces, bool aligned, float safety,
                     const double* sums) {
  wait_for_kernel_before();
  const Piece piece(numel, pieces);
  double squares = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kThreads) squares += sums[piece.matrix * pieces + i];
  const float norm = __fmul_rn(safety, static_cast<float>(__dsqrt_rn(block_sum_double<kThreads>(squares))));
  const float divisor = norm < kLeastMatrixNorm ? kLeastMatrixNorm : norm;
  piece.for_each_pack(aligned, [&](int i, auto whole) {
    float x[kWidth];
    load_pack<whole.value>(matrices + piece.begin + i, piece.count - i, x);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) x[k] = __fdiv_rn(x[k], divisor);
    BFloat16* const to = out + piece.begin + i;
    if constexpr (whole.value) {
      store(to, x);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (i + k < piece.count) to[k] = from_float<BFloat16>(x[k]);
      }
    }
  });
}

void normalize(const CudaDevice& device, const Orthogonalize& a, const TensorView& out) {
  const int64_t numel = a.matrices.dim[1] * a.matrices.dim[2];
  const int pieces = static_cast<int>(orthogonalize_pieces(numel));
  const Grid grid(a.matrices.dim[0] * pieces, kThreads);
  const bool aligned = numel % kWidth == 0 && are_aligned({a.matrices.data, out.data});
  auto* const sums = static_cast<double*>(device.workspace("orthogonalize", workspace_of(a)));
  const auto* const matrices = a.matrices.as<BFloat16>();
  launch_early(device, "orthogonalize", piece_squares_kernel, grid, matrices, numel, pieces, aligned, sums);
  launch_early(device, "orthogonalize", normalize_kernel, grid, matrices, out.as<BFloat16>(), numel, pieces,
               aligned, a.safety, sums);
}

// ---- Symmetric products ----

constexpr int kMirrorTile = 64, kMirrorWidth = 2;
constexpr int64_t kHalfUnit = 128;

// Rows [half, r) and columns [0, half) of each matrix [r, r] become columns and rows of the same numbers. `half` is
// a multiple of the tile, and r is even.
__global__ void __launch_bounds__(kThreads) mirror_kernel(BFloat16* matrices, int r, int half) {
  static_assert(kMirrorTile == kMirrorWidth * kWarpSize);
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ uint16_t tile[kMirrorTile][kMirrorTile + kMirrorWidth];
  wait_for_kernel_before();
  auto* const matrix = reinterpret_cast<uint16_t*>(matrices) + int64_t{blockIdx.z} * r * r;
  const int row = half + static_cast<int>(blockIdx.y) * kMirrorTile,
            col = static_cast<int>(blockIdx.x) * kMirrorTile;
  const int at = static_cast<int>(threadIdx.x) % kWarpSize * kMirrorWidth;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  for (int i = warp; i < min(kMirrorTile, r - row); i += kWarps) {
    const auto* const from = matrix + int64_t{row + i} * r + col + at;
    *reinterpret_cast<uint32_t*>(&tile[i][at]) = *reinterpret_cast<const uint32_t*>(from);
  }
  __syncthreads();
  if (row + at >= r) return;
  for (int i = warp; i < kMirrorTile; i += kWarps) {
    auto* const to = matrix + int64_t{col + i} * r + row + at;
    *reinterpret_cast<uint32_t*>(to) = tile[at][i] | uint32_t{tile[at + 1][i]} << 16;
  }
}

// A product that is symmetric. In halves its lower left, the diagonal's blocks included, is two strips of columns,
// and the rest is its mirror image.
void multiply_symmetric(CudaDevice& device, BatchedGemm a, bool in_halves) {
  const int64_t r = a.out.dim[1], half = ceil_div(r, 2 * kHalfUnit) * kHalfUnit;
  if (!in_halves || r % kWidth != 0 || half >= r) {
    multiply_batch(device, a);
    return;
  }
  a.end_col = half;
  multiply_batch(device, a);
  a.first_row = a.first_col = half;
  a.end_col = r;
  multiply_batch(device, a);
  const dim3 blocks(static_cast<unsigned>(half / kMirrorTile),
                    static_cast<unsigned>(ceil_div(r - half, kMirrorTile)), static_cast<unsigned>(a.out.dim[0]));
  launch_early(device, "orthogonalize", mirror_kernel, Grid(blocks, kThreads), a.out.as<BFloat16>(),
               static_cast<int>(r), static_cast<int>(half));
}

}  // namespace

void muon_momentum(Device& any_device, const MuonMomentum& a) {
  CudaDevice& device = as_cuda(any_device);
  if (!is_float8(a.momentum.values.dtype)) {
    with_plain_tensor(a.momentum.values, [&](auto momentum) { any_momentum(device, a, momentum); });
    return;
  }
  const int64_t num_fast = num_fast_elements<FastShape>(device, a.gradient.numel(), a.momentum,
                                                        {a.gradient, a.momentum.values, a.direction});
  if (num_fast > 0) fast_momentum(device, a, num_fast);
  any_momentum(device, a, AnyFp8Moment<false>(a.momentum), num_fast);
}

// Every iteration goes from one of `matrices` and `other` to the other one. It ends in `matrices`, so where it
// begins depends on the number of steps.
void orthogonalize(Device& any_device, const Orthogonalize& a) {
  CudaDevice& device = as_cuda(any_device);
  const bool is_tall = a.matrices.dim[1] > a.matrices.dim[2];
  TensorView x = a.matrices, next = a.other;
  if (a.steps.size() % 2 == 1) std::swap(x, next);
  normalize(device, a, x);
  for (const NewtonSchulzStep& step : a.steps) {
    multiply_symmetric(device, {.a = x, .b = x, .a_transposed = is_tall, .b_transposed = is_tall, .out = a.gram},
                       a.in_halves);
    multiply_symmetric(device,
                       {.a = a.gram,
                        .b = a.gram,
                        .b_transposed = true,
                        .factor = step.c,
                        .addend = a.gram,
                        .addend_factor = step.b,
                        .out = a.polynomial},
                       a.in_halves);
    multiply_batch(device, {.a = is_tall ? x : a.polynomial,
                            .b = is_tall ? a.polynomial : x,
                            .b_transposed = true,
                            .addend = x,
                            .addend_factor = step.a,
                            .out = next});
    std::swap(x, next);
  }
}

void muon_step(Device& device, const MuonStep& a) {
  const int64_t N = a.weight.numel();
  const bool aligned = is_aligned_for<StepShape>({a.weight, a.master, a.direction});
  with_weights(SteppedWeights(a), [&](auto weights) {
    StepTensors tensors{weights, {a.direction.as<BFloat16>()}};
    launch(as_cuda(device), "muon_step", muon_step_kernel<decltype(weights)>,
           {ceil_div(N, StepShape::kBlockElements), StepShape::kThreads}, tensors, a.grad_scale.as<float>(),
           optional<float>(a.weight_amax), StepConstants{a.lr, a.weight_decay}, N, aligned);
  });
}

}  // namespace parka::cuda
