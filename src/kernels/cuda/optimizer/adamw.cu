#include "kernels/ops/optimizer/adamw.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/optimizer/adamw_update.cuh"
#include "kernels/cuda/optimizer/block_scheduler.cuh"
#include "kernels/cuda/optimizer/step_kernels.cuh"

// There are two kernels: adamw_fp8_kernel for whole blocks with expanded fp8 moments, adamw_kernel for the rest.
namespace parka::cuda {
namespace {

// ---- Kernels ----

template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads)
    adamw_kernel(Tensors tensors, const float* grad_scale, float* weight_amax, UpdateConstants constants, int64_t N,
                 bool aligned) {
  using Part = typename Tensors::Part;
  const float scale = *grad_scale;
  const bool changes = isfinite(scale);
  if (!changes && weight_amax == nullptr) return;
  typename Tensors::LargestWeight largest;  // elements past the end, read as zeros, stay zeros or become NaN
  with_part<Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    tensors.move(first);
    if (!changes) {
      largest.raise_to(load_part<whole.value>(tensors.weights.weight_N, part));
    } else {
      step_in_turn<whole.value>(tensors, part, scale, constants, largest);
    }
  });
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

// adamw_fp8_kernel does this where nothing is changed, by own pointers: the step's would cost it registers.
template <typename Tensors, typename T>
__device__ void find_unchanged_amax(const T* weight_N, int count, float* weight_amax) {
  using Part = typename Tensors::Part;
  if (weight_amax == nullptr) return;
  typename Tensors::LargestWeight largest;
  for (int block = static_cast<int>(blockIdx.x); block < count; block += static_cast<int>(gridDim.x)) {
    const T* const first = weight_N + int64_t{block} * Part::kBlockElements + Part::offset();
    largest.raise_to(load_part<true>(first, Part{}));
  }
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

// The fast step with fp8 moments, of `count` times Part::kBlockElements elements of aligned tensors: every block
// copies the table of roots to its shared memory, so there is one block for each SM.
//
// A warp loads its next elements while it encodes; asynchronous copies all the time are slower. Dynamic scheduling
// matters: with equal shares for all warps, some multiprocessors wait for others during 8 % of the time. After
// memory, instructions are the limit, more so at the lower clock in a step. On sm_90, with a split master and a
// bf16 gradient, one element took 71 instructions before dynamic scheduling:
//   4  loads, stores and their addresses           10  decoding two moments
//   2  gradient: to fp32, scaled                    7  new moments
//   5  extremes of a group, a third in shuffles    14  direction: exact root and quotient
//   4  new weight                                   4  weight joined and split
//  15  encoding two moments                         4  exponents and constants of two groups
//   1  largest weight
// and about one more for codes in doubt. Of a scheduler's 71 cycles for 32 elements, MUFU is busy for 53 and the
// integer units for 43. Registers are used up: a few more live values spill.
template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads, 1)
    adamw_fp8_kernel(const __grid_constant__ Tensors tensors, const float* grad_scale, float* weight_amax,
                     UpdateConstants constants, int count, unsigned* counters) {
  using Part = typename Tensors::Part;
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    find_unchanged_amax<Tensors>(tensors.weights.weight_N, count, weight_amax);
    return;
  }
  BlockScheduler scheduler(counters, count);
  auto elements = load_elements(of_block(tensors, scheduler.block()), Part{});

  extern __shared__ uint4 shared[];
  auto& roots = *reinterpret_cast<RootTable*>(shared);
  copy_roots<Part::kThreads>(kRootTable, roots);
  __syncthreads();

  typename Tensors::LargestWeight largest;
  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    step_fp8(of_block(tensors, scheduler.block()), Part{}, roots, scale, constants, elements, largest, [&] {
      if (scheduler.has_next()) elements = load_elements(of_block(tensors, scheduler.next()), Part{});
    });
  }
  BlockScheduler::end<Part::kThreads>(counters);
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

template <typename Moment>
__global__ void __launch_bounds__(Moment::Part::kThreads)
    moment_encode_kernel(const float* values_N, Moment moment, int64_t N, bool aligned) {
  with_part<typename Moment::Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    moment.move(first);
    typename Moment::Values x;
    to_floats(load_part<whole.value>(values_N + first, part), x);
    moment.template write<whole.value>(part, x);
  });
}

template <typename Moment>
__global__ void __launch_bounds__(Moment::Part::kThreads)
    moment_decode_kernel(Moment moment, float* values_N, int64_t N, bool aligned) {
  with_part<typename Moment::Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    moment.move(first);
    typename Moment::Values x;
    moment.template read<whole.value>(part, x);
    store_part<whole.value>(values_N + first, part, to_stored<float, typename Moment::Part>(x));
  });
}

// ---- Launches ----

// Calls f(weights, gradient) with their device forms.
template <typename F>
void with_weights_and_gradient(const AdamwStep& a, const F& f) {
  with_weights(SteppedWeights(a), [&](auto weights) {
    with_plain_type(a.gradient.dtype, [&](auto type) {
      using T = decltype(type);
      f(weights, Gradient<T>{a.gradient.as<T>()});
    });
  });
}

template <typename F>
void with_moment(const MomentView& moment, bool is_second, const F& f) {
  if (!is_float8(moment.values.dtype)) {
    with_plain_moment(moment, f);
  } else if (is_second) {
    f(SmallFp8Moment<true>(moment));
  } else {
    f(SmallFp8Moment<false>(moment));
  }
}

template <typename Part>
bool has_aligned_tensors(const AdamwStep& a) {
  return is_aligned_for<Part>({a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values});
}

// Steps the elements from number `begin` on, a multiple of 128.
template <typename Tensors>
void launch_step(CudaDevice& device, const AdamwStep& a, Tensors tensors, int64_t begin = 0) {
  using Part = typename Tensors::Part;
  const int64_t N = a.weight.numel() - begin;
  if (N == 0) return;
  tensors.move(begin);
  launch(device, "adamw_step", adamw_kernel<Tensors>, {ceil_div(N, Part::kBlockElements), Part::kThreads}, tensors,
         a.grad_scale.as<float>(), optional<float>(a.weight_amax), UpdateConstants(a), N,
         has_aligned_tensors<Part>(a));
}

void step_with_plain_moments(CudaDevice& device, const AdamwStep& a) {
  with_weights_and_gradient(a, [&](auto weights, auto gradient) {
    with_plain_moment(a.exp_avg, [&](auto exp_avg) {
      auto exp_avg_sq = exp_avg;
      exp_avg_sq.values_N = static_cast<decltype(exp_avg_sq.values_N)>(a.exp_avg_sq.values.data);
      launch_step(device, a, Tensors{weights, gradient, exp_avg, exp_avg_sq});
    });
  });
}

// Elements that the fast step can have. Without range expansion there is one row of roots, for any cache.
int64_t num_fast_elements(const CudaDevice& device, const AdamwStep& a) {
  const bool can = !a.exp_avg.exponent.empty() && !a.exp_avg_sq.exponent.empty() &&
                   has_aligned_tensors<LargePart>(a) &&
                   device.properties().sharedMemPerBlockOptin >= sizeof(RootTable);
  return can ? a.weight.numel() / LargePart::kBlockElements * LargePart::kBlockElements : 0;
}

void fast_step(CudaDevice& device, const AdamwStep& a, int64_t num_elements) {
  const int count = static_cast<int>(num_elements / LargePart::kBlockElements);
  const int blocks = std::min(count, device.num_multiprocessors());
  with_weights_and_gradient(a, [&](auto weights, auto gradient) {
    const Tensors tensors{weights, gradient, Fp8Moment<LargePart, false, true>(a.exp_avg),
                          Fp8Moment<LargePart, true, true>(a.exp_avg_sq)};
    auto* const kernel = adamw_fp8_kernel<std::remove_const_t<decltype(tensors)>>;
    constexpr int kSharedBytes = sizeof(RootTable);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "adamw_step");
    launch_early(device, "adamw_step", kernel, {blocks, LargePart::kThreads, kSharedBytes}, tensors,
                 a.grad_scale.as<float>(), optional<float>(a.weight_amax), UpdateConstants(a), count,
                 device.counters());
  });
}

// Steps what the fast step leaves: the elements behind `num_fast`, the last of a tensor, or all where it cannot be.
void step_rest(CudaDevice& device, const AdamwStep& a, int64_t num_fast) {
  with_weights(SteppedWeights(a), [&](auto weights) {
    const Tensors tensors{weights, AnyGradient(a.gradient), SmallFp8Moment<false>(a.exp_avg),
                          SmallFp8Moment<true>(a.exp_avg_sq)};
    launch_step(device, a, tensors, num_fast);
  });
}

}  // namespace

// Both moments have one format: no config asks for others.
void adamw_step(Device& any_device, const AdamwStep& a) {
  CudaDevice& device = as_cuda(any_device);
  PARKA_REQUIRE(a.exp_avg.values.dtype == a.exp_avg_sq.values.dtype);
  if (!is_float8(a.exp_avg.values.dtype)) {
    step_with_plain_moments(device, a);
    return;
  }
  const int64_t num_fast = num_fast_elements(device, a);
  if (num_fast > 0) fast_step(device, a, num_fast);
  step_rest(device, a, num_fast);
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  with_moment(a.moment, a.is_second, [&](auto moment) {
    using Part = typename decltype(moment)::Part;
    const bool aligned = is_aligned_for<Part>({a.values, a.moment.values});
    launch(as_cuda(device), "moment_encode", moment_encode_kernel<decltype(moment)>,
           {ceil_div(N, Part::kBlockElements), Part::kThreads}, a.values.as<float>(), moment, N, aligned);
  });
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.values.numel();
  with_moment(a.moment, /*is_second=*/false, [&](auto moment) {
    using Part = typename decltype(moment)::Part;
    const bool aligned = is_aligned_for<Part>({a.values, a.moment.values});
    launch(as_cuda(device), "moment_decode", moment_decode_kernel<decltype(moment)>,
           {ceil_div(N, Part::kBlockElements), Part::kThreads}, moment, a.values.as<float>(), N, aligned);
  });
}

}  // namespace parka::cuda
