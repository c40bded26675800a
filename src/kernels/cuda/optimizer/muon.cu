#include "kernels/ops/optimizer/muon.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/cuda/gemm/gemm_cache.h"
#include "kernels/cuda/optimizer/block_scheduler.cuh"
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

template <typename GradientOf, typename Momentum>
struct MomentumTensors {
  using Part = typename Momentum::Part;

  GradientOf gradient;
  Momentum momentum;
  BFloat16* direction_N;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    gradient.move(elements);
    momentum.move(elements);
    direction_N += elements;
  }
  template <bool kWhole>
  __device__ void store_direction(const Part& part, const PartValues<Part>& u) const {
    store_part<kWhole>(direction_N, part, to_stored<BFloat16, Part>(u));
  }
};

// Makes directions of gradients g, and next momenta of b. Each operation is rounded by itself, as on the CPU.
template <typename Part>
__device__ void update_momentum(const MomentumConstants& c, float grad_scale, PartValues<Part>& g,
                                PartValues<Part>& b) {
  for_each_element<Part>([&](int pack, int i) {
    const float g_i = __fmul_rn(g[pack][i], grad_scale);
    float& b_i = b[pack][i];
    b_i = __fadd_rn(b_i, __fmul_rn(c.gain, __fsub_rn(g_i, b_i)));
    g[pack][i] = __fadd_rn(g_i, __fmul_rn(c.mu, __fsub_rn(b_i, g_i)));
  });
}

template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads)
    muon_momentum_kernel(Tensors tensors, const float* grad_scale, MomentumConstants constants, int64_t N,
                         bool aligned) {
  using Part = typename Tensors::Part;
  const float scale = *grad_scale;
  with_part<Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    tensors.move(first);
    PartValues<Part> g = {}, b;
    if (isfinite(scale)) {
      to_floats(tensors.gradient.template load<whole.value>(part), g);
      tensors.momentum.template read<whole.value>(part, b);
      update_momentum<Part>(constants, scale, g, b);
      tensors.momentum.template write<whole.value>(part, b);
    }
    tensors.template store_direction<whole.value>(part, g);
  });
}

template <typename GradientOf, typename Momentum>
struct LoadedMomentum {
  GradientOf gradient;
  Momentum momentum;
};

// Of `count` times Part::kBlockElements elements of aligned tensors, with an expanded fp8 momentum; made as
// adamw_fp8_kernel is, but with more warps, because each has fewer bytes under way.
template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads, 1)
    muon_momentum_fp8_kernel(const __grid_constant__ Tensors tensors, const float* grad_scale,
                             MomentumConstants constants, int count, unsigned* counters) {
  using Part = typename Tensors::Part;
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    const PartValues<Part> zeros = {};
    for (int block = static_cast<int>(blockIdx.x); block < count; block += static_cast<int>(gridDim.x)) {
      of_block(tensors, block).template store_direction<true>(Part{}, zeros);
    }
    return;
  }
  BlockScheduler scheduler(counters, count);
  const auto load_block = [&](int block) {
    const Tensors at = of_block(tensors, block);
    return LoadedMomentum{at.gradient.template load<true>(Part{}), at.momentum.template load<true>(Part{})};
  };
  auto elements = load_block(scheduler.block());

  extern __shared__ uint4 shared[];
  auto& roots = *reinterpret_cast<RootTable*>(shared);
  copy_roots<Part::kThreads>(kRootTable, roots);
  __syncthreads();

  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    const Tensors at = of_block(tensors, scheduler.block());
    PartValues<Part> g, b;
    to_floats(elements.gradient, g);
    at.momentum.decode(elements.momentum, roots, b);
    update_momentum<Part>(constants, scale, g, b);
    at.template store_direction<true>(Part{}, g);
    if (scheduler.has_next()) elements = load_block(scheduler.next());
    at.momentum.template store<true>(Part{}, b, at.momentum.extremes(b));
  }
  BlockScheduler::end<Part::kThreads>(counters);
}

using FastPart = LanePart<2, 8, 24>;

// Elements that the fast kernel can have, from the first on.
int64_t num_fast_elements(const CudaDevice& device, const MuonMomentum& a) {
  const bool can = !a.momentum.exponent.empty() &&
                   is_aligned_for<FastPart>({a.gradient, a.momentum.values, a.direction}) &&
                   device.properties().sharedMemPerBlockOptin >= sizeof(RootTable);
  return can ? a.gradient.numel() / FastPart::kBlockElements * FastPart::kBlockElements : 0;
}

void fast_momentum(CudaDevice& device, const MuonMomentum& a, int64_t num_elements) {
  const int count = static_cast<int>(num_elements / FastPart::kBlockElements);
  const int blocks = std::min(count, device.num_multiprocessors());
  with_plain_type(a.gradient.dtype, [&](auto type) {
    using T = decltype(type);
    using Momentum = Fp8Moment<FastPart, false, true>;
    const MomentumTensors<Gradient<T>, Momentum> tensors{
        {a.gradient.as<T>()}, Momentum(a.momentum), a.direction.as<BFloat16>()};
    auto* const kernel = muon_momentum_fp8_kernel<std::remove_const_t<decltype(tensors)>>;
    constexpr int kSharedBytes = sizeof(RootTable);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "muon_momentum");
    launch_early(device, "muon_momentum", kernel, {blocks, FastPart::kThreads, kSharedBytes}, tensors,
                 a.grad_scale.as<float>(), MomentumConstants(a), count, device.counters());
  });
}

// Of the elements from number `begin` on, a multiple of 128.
template <typename Momentum>
void any_momentum(CudaDevice& device, const MuonMomentum& a, const Momentum& momentum, int64_t begin = 0) {
  using Part = typename Momentum::Part;
  const int64_t N = a.gradient.numel() - begin;
  if (N == 0) return;
  MomentumTensors<AnyGradient, Momentum> tensors{AnyGradient(a.gradient), momentum, a.direction.as<BFloat16>()};
  tensors.move(begin);
  const bool aligned = is_aligned_for<Part>({a.gradient, a.momentum.values, a.direction});
  launch(device, "muon_momentum", muon_momentum_kernel<decltype(tensors)>,
         {ceil_div(N, Part::kBlockElements), Part::kThreads}, tensors, a.grad_scale.as<float>(),
         MomentumConstants(a), N, aligned);
}

// ---- Step ----

struct StepConstants {
  float lr, weight_decay;
};

template <typename Weights>
struct StepTensors {
  using LargestWeight = LargestStored<std::remove_pointer_t<decltype(Weights::weight_N)>>;

  Weights weights;
  const BFloat16* direction_N;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weights.move(elements);
    direction_N += elements;
  }
};

using StepPart = LanePart<1, 8, 8>;

template <typename Tensors>
__global__ void __launch_bounds__(StepPart::kThreads)
    muon_step_kernel(Tensors tensors, const float* grad_scale, float* weight_amax, StepConstants constants,
                     int64_t N, bool aligned) {
  const bool changes = isfinite(*grad_scale);
  if (!changes && weight_amax == nullptr) return;
  typename Tensors::LargestWeight largest;
  with_part<StepPart>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    tensors.move(first);
    if (!changes) {
      largest.raise_to(load_part<whole.value>(tensors.weights.weight_N, part));
      return;
    }
    PartValues<StepPart> w, o;
    to_floats(load_part<whole.value>(tensors.direction_N, part), o);
    to_floats(tensors.weights.template load<whole.value>(part), w);
    for_each_element<StepPart>([&](int pack, int i) { update_weight(constants, o[pack][i], w[pack][i]); });
    largest.raise_to(tensors.weights.template store<whole.value>(part, w));
  });
  raise_weight_amax<StepPart::kThreads>(weight_amax, largest);
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

}  // namespace

void muon_momentum(Device& any_device, const MuonMomentum& a) {
  CudaDevice& device = as_cuda(any_device);
  if (!is_float8(a.momentum.values.dtype)) {
    with_plain_moment(a.momentum, [&](auto momentum) { any_momentum(device, a, momentum); });
    return;
  }
  const int64_t num_fast = num_fast_elements(device, a);
  if (num_fast > 0) fast_momentum(device, a, num_fast);
  any_momentum(device, a, SmallFp8Moment<false>(a.momentum), num_fast);
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
    multiply_batch(device, {.a = x, .b = x, .a_transposed = is_tall, .b_transposed = is_tall, .out = a.gram});
    multiply_batch(device, {.a = a.gram,
                            .b = a.gram,
                            .b_transposed = true,
                            .factor = step.c,
                            .addend = a.gram,
                            .addend_factor = step.b,
                            .out = a.polynomial});
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
  const bool aligned = is_aligned_for<StepPart>({a.weight, a.master, a.direction});
  with_weights(SteppedWeights(a), [&](auto weights) {
    const StepTensors<decltype(weights)> tensors{weights, a.direction.as<BFloat16>()};
    launch(as_cuda(device), "muon_step", muon_step_kernel<std::remove_const_t<decltype(tensors)>>,
           {ceil_div(N, StepPart::kBlockElements), StepPart::kThreads}, tensors, a.grad_scale.as<float>(),
           optional<float>(a.weight_amax), StepConstants{a.lr, a.weight_decay}, N, aligned);
  });
}

}  // namespace parka::cuda
