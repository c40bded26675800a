#pragma once
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/optimizer/adamw_moments.cuh"
#include "kernels/ops/optimizer/step_tensors.h"

// What the kernels of optimizers and their launches have in common. A warp takes one group of 128 elements, or
// several: it reads them of every tensor as fp32, updates them and writes them back.
namespace parka::cuda {

// Calls f(part, first, kWhole) for the lane's part of a tensor of N elements, its first one's number and whether
// the block's elements are all there, in aligned tensors.
template <typename Part, typename F>
__device__ void with_part(int64_t N, bool aligned, const F& f) {
  const int64_t begin = int64_t{blockIdx.x} * Part::kBlockElements, first = begin + Part::offset();
  const Part part{N - first};
  if (aligned && begin + Part::kBlockElements <= N) {
    f(part, first, std::true_type());
  } else {
    f(part, first, std::false_type());
  }
}

// Raises *weight_amax, unless it is null, to what the threads of a block have found, as the last thing they do.
template <int kThreads, typename LargestWeight>
__device__ void raise_weight_amax(float* weight_amax, const LargestWeight& largest) {
  __shared__ uint32_t shared[kThreads / kWarpSize];
  if (weight_amax != nullptr) raise_to_block_max<kThreads>(weight_amax, largest.value(), shared);
}

// `tensors` at the lane's first element of a block of elements.
template <typename Tensors>
__device__ Tensors of_block(const Tensors& tensors, int block) {
  Tensors moved = tensors;
  moved.move(int64_t{block} * Tensors::Part::kBlockElements + Tensors::Part::offset());
  return moved;
}

// ---- Launches ----

// Many lanes for each group, or few with wide accesses, which makes a group's own work cost less.
using SmallPart = LanePart<1, 4, 8>;
using LargePart = LanePart<2, 8, 16>;

// Calls f with the weights' device form.
template <typename F>
void with_weights(const SteppedWeights& a, const F& f) {
  switch (a.master_form) {
    case MasterForm::kFp32: f(SplitMaster{a.weight.as<BFloat16>(), a.master.as<uint16_t>()}); return;
    case MasterForm::kFp24Split: {
      const uint32_t phase = rounding_phase(a.step, a.first_element);
      f(Split24Master{a.weight.as<BFloat16>(), a.master.as<uint8_t>(), phase});
      return;
    }
    case MasterForm::kBf16Sr: f(StochasticWeight{a.weight.as<BFloat16>(), a.seed, a.step, a.first_element}); return;
    case MasterForm::kNone: f(Fp32Weight{a.weight.as<float>()}); return;
  }
}

// Call f with the moment's device form.
template <typename F>
void with_plain_moment(const MomentView& moment, const F& f) {
  with_plain_type(moment.values.dtype, [&](auto type) {
    using T = decltype(type);
    f(PlainMoment<T, SmallPart>{moment.values.as<T>()});
  });
}
template <bool kIsSecond>
using SmallFp8Moment = Fp8Moment<SmallPart, kIsSecond, false>;

// Whether a lane can move packs of `Part` of all tensors as it likes to.
template <typename Part>
bool is_aligned_for(std::initializer_list<TensorView> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const TensorView& t) {
    constexpr int64_t kWidestAccess = 16;
    const int64_t pack_bytes = Part::kElements * size_of(t.dtype);
    return is_aligned(t.data, static_cast<size_t>(std::min(pack_bytes, kWidestAccess)));
  });
}

}  // namespace parka::cuda
