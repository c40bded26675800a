#include "kernels/ops/optimizer/adamw.h"

#include "kernels/cuda/optimizer/adamw_update.cuh"

// Launches of AdamW, whose formula and kernels are in adamw_update.cuh, and moments alone, encoded and decoded.
namespace parka::cuda {
namespace {

template <typename Moment>
__global__ void __launch_bounds__(SmallShape::kThreads)
    moment_encode_kernel(const float* values_N, Moment moment, int64_t N, bool aligned) {
  with_part<SmallShape>(N, aligned, [&](const auto& part, int64_t first) {
    moment.move(first);
    float x[SmallShape::kCount];
    to_floats(load_part(values_N + first, part), x);
    moment.store(part, x);
  });
}

template <typename Moment>
__global__ void __launch_bounds__(SmallShape::kThreads)
    moment_decode_kernel(Moment moment, float* values_N, int64_t N, bool aligned) {
  with_part<SmallShape>(N, aligned, [&](const auto& part, int64_t first) {
    moment.move(first);
    float x[SmallShape::kCount];
    to_floats(moment.load(part), x);
    store_part(values_N + first, part, to_stored<float, SmallShape>(x));
  });
}

// Calls f(weights, gradient) with their device forms.
template <typename F>
void with_weights_and_gradient(const AdamwStep& a, const F& f) {
  with_weights(SteppedWeights(a),
               [&](auto weights) { with_plain_tensor(a.gradient, [&](auto gradient) { f(weights, gradient); }); });
}

// Calls f with the moment's device form.
template <typename F>
void with_moment(const MomentView& moment, bool is_second, const F& f) {
  if (!is_float8(moment.values.dtype)) return with_plain_tensor(moment.values, f);
  with_constant(is_second, [&](auto second) { f(AnyFp8Moment<decltype(second)::value>(moment)); });
}

// Steps the elements from number `begin` on, a multiple of 128.
template <typename Tensors>
void launch_step(CudaDevice& device, const AdamwStep& a, Tensors tensors, int64_t begin = 0) {
  const int64_t N = a.weight.numel() - begin;
  if (N == 0) return;
  tensors.move(begin);
  const bool aligned =
      is_aligned_for<SmallShape>({a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values});
  launch(device, "adamw_step", adamw_kernel<SmallShape, Tensors>,
         {ceil_div(N, SmallShape::kBlockElements), SmallShape::kThreads}, tensors, a.grad_scale.as<float>(),
         optional<float>(a.weight_amax), UpdateConstants(a), N, aligned);
}

void fast_step(CudaDevice& device, const AdamwStep& a, int64_t num_elements) {
  with_weights_and_gradient(a, [&](auto weights, auto gradient) {
    AdamwTensors tensors{weights, gradient, Fp8Moment<false, true>(a.exp_avg), Fp8Moment<true, true>(a.exp_avg_sq)};
    launch_with_roots<LargeShape>(device, "adamw_step", adamw_fp8_kernel<LargeShape, decltype(tensors)>,
                                  num_elements, tensors, a.grad_scale.as<float>(), optional<float>(a.weight_amax),
                                  UpdateConstants(a));
  });
}

}  // namespace

void adamw_step(Device& any_device, const AdamwStep& a) {
  CudaDevice& device = as_cuda(any_device);
  if (!is_float8(a.exp_avg.values.dtype)) {
    with_weights_and_gradient(a, [&](auto weights, auto gradient) {
      with_plain_tensor(a.exp_avg.values, [&](auto exp_avg) {
        const decltype(exp_avg) exp_avg_sq{static_cast<decltype(exp_avg.x_N)>(a.exp_avg_sq.values.data)};
        launch_step(device, a, AdamwTensors{weights, gradient, exp_avg, exp_avg_sq});
      });
    });
    return;
  }
  const int64_t num_fast =
      a.exp_avg_sq.exponent.empty()
          ? 0
          : num_fast_elements<LargeShape>(device, a.weight.numel(), a.exp_avg,
                                          {a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values});
  if (num_fast > 0) fast_step(device, a, num_fast);
  // What the fast step leaves: the last elements of a tensor, or all of one that it cannot have.
  with_weights(SteppedWeights(a), [&](auto weights) {
    launch_step(device, a,
                AdamwTensors{weights, AnyGradient(a.gradient), AnyFp8Moment<false>(a.exp_avg),
                             AnyFp8Moment<true>(a.exp_avg_sq)},
                num_fast);
  });
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  const Grid grid(ceil_div(N, SmallShape::kBlockElements), SmallShape::kThreads);
  with_moment(a.moment, a.is_second, [&](auto moment) {
    launch(as_cuda(device), "moment_encode", moment_encode_kernel<decltype(moment)>, grid, a.values.as<float>(),
           moment, N, is_aligned_for<SmallShape>({a.values, a.moment.values}));
  });
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.values.numel();
  const Grid grid(ceil_div(N, SmallShape::kBlockElements), SmallShape::kThreads);
  with_moment(a.moment, /*is_second=*/false, [&](auto moment) {
    launch(as_cuda(device), "moment_decode", moment_decode_kernel<decltype(moment)>, grid, moment,
           a.values.as<float>(), N, is_aligned_for<SmallShape>({a.values, a.moment.values}));
  });
}

}  // namespace parka::cuda
