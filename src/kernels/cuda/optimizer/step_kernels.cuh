#pragma once
#include <algorithm>
#include <initializer_list>

#include "core/philox.h"
#include "core/split_float.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/optimizer/block_scheduler.cuh"
#include "kernels/cuda/optimizer/moments.cuh"
#include "kernels/ops/optimizer/step_tensors.h"

// What the kernels of AdamW and Muon have in common: the weights in each MasterForm, their largest magnitude, and
// launches. lanes.cuh has the legend.
namespace parka::cuda {

// ---- Weights; to_floats() gives masters, and store() the weights as they are stored ----

// PlainTensor<float> is MasterForm::kNone's. A SplitMaster has a weight in bf16 and, as R, what it lacks of its
// master: uint16_t the low half of fp32 (split_float), uint8_t a byte (split_float24).
template <typename R, typename Shape_>
struct SplitPart {
  using Shape = Shape_;
  StoredPart<BFloat16, Shape> weight;
  StoredPart<R, Shape> remainder;

  // join_float: with the remainder's sign bit flipped, both parts are the float's plus half a last place.
  __device__ float operator[](int e) const {
    constexpr uint32_t kHalfPlace = 0x8000u, kSignBits = sizeof(R) == 2 ? 0x80008000u : 0x80808080u;
    constexpr int kPerWord = 4 / sizeof(R);
    const uint32_t remainders = remainder.word(e / kPerWord) ^ kSignBits, weights = weight.word(e / 2);
    if constexpr (sizeof(R) == 2) {
      return __uint_as_float(__byte_perm(remainders, weights, e % 2 == 0 ? 0x5410 : 0x7632) - kHalfPlace);
    } else {
      // Bytes of the weight, its remainder, and any for the lowest, which is then cleared.
      const uint32_t selected = (e % 2 == 0 ? 0x5400u : 0x7600u) | (e % 4) << 4;
      return __uint_as_float((__byte_perm(remainders, weights, selected) & ~0xffu) - kHalfPlace);
    }
  }
};

template <typename R>
struct SplitMaster : PlainTensor<BFloat16> {
  R* remainder_N;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    x_N += elements;
    remainder_N += elements;
  }
  template <typename Part>
  __device__ SplitPart<R, typename Part::Shape> load(const Part& part) const {
    return {load_part(x_N, part), load_part(remainder_N, part)};
  }
  // The weight is the high half of the float plus half of its last place; the remainder just its next bytes.
  template <typename Part>
  __device__ auto store(const Part& part, const float (&w)[Part::kCount]) const {
    constexpr uint32_t kHalfPlace = 0x8000u;
    const auto bits = [&](int e) { return __float_as_uint(w[e]); };
    StoredPart<BFloat16, typename Part::Shape> weight;
    StoredPart<R, typename Part::Shape> remainder;
    for_each<Part::kCount / 2>([&](int i) {
      const uint32_t first = bits(2 * i) + kHalfPlace, second = bits(2 * i + 1) + kHalfPlace;
      weight.word(i) = __byte_perm(first, second, 0x7632);
    });
    store_part(x_N, part, weight);
    const auto pair = [&](int e, int bytes) { return __byte_perm(bits(e), bits(e + 1), bytes); };
    for_each<remainder.kWords>([&](int i) {
      if constexpr (sizeof(R) == 2) {
        remainder.word(i) = pair(2 * i, 0x5410);
      } else {
        remainder.word(i) = __byte_perm(pair(4 * i, 0x0051), pair(4 * i + 2, 0x0051), 0x5410);
      }
    });
    store_part(remainder_N, part, remainder);
    return weight;
  }
};

struct Split24Master : SplitMaster<uint8_t> {
  uint32_t phase;  // rounding_phase() of the first element

  PARKA_HOST_DEVICE void move(int64_t elements) {
    x_N += elements;
    remainder_N += elements;
    phase += static_cast<uint32_t>(elements) * kPhaseOfElement;
  }
  template <typename Part>
  __device__ auto store(const Part& part, const float (&w)[Part::kCount]) const {
    float rounded[Part::kCount];
    for_each_element<typename Part::Shape>([&](int e) {
      const auto offset = static_cast<uint32_t>(Part::at(e));
      rounded[e] = round_to_float24(w[e], phase + offset * kPhaseOfElement);
    });
    return SplitMaster::store(part, rounded);
  }
};

struct StochasticWeight : PlainTensor<BFloat16> {
  uint64_t seed, step, first_element;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    x_N += elements;
    first_element += static_cast<uint64_t>(elements);
  }
  template <typename Part>
  __device__ auto store(const Part& part, const float (&w)[Part::kCount]) const {
    constexpr int kDraw = 4;  // elements that share a draw of philox4x32
    StoredPart<BFloat16, typename Part::Shape> stored;
    for_each<Part::kPacks>([&](int pack) {
      Pack<BFloat16, Part::kElements> weight;
      for_each<Part::kElements / kDraw>([&](int draw) {
        const int e = pack * Part::kElements + draw * kDraw;
        const auto random = philox4x32(seed, step, (first_element + Part::at(e)) / kDraw);
        for_each<kDraw>(
            [&](int i) { weight.element[draw * kDraw + i] = encode_bf16_stochastic(w[e + i], random[i]); });
      });
      stored.pack[pack] = std::bit_cast<Stored<BFloat16, Part::kElements>>(weight);
    });
    store_part(x_N, part, stored);
    return stored;
  }
};

// A gradient of any plain format, chosen as it is read: for the many kernels which little time is spent in.
struct AnyGradient {
  const void* gradient_N;
  bool is_bf16;  // otherwise fp32

  explicit AnyGradient(const TensorView& gradient)
      : gradient_N(gradient.data), is_bf16(gradient.dtype == DType::kBF16) {}

  PARKA_HOST_DEVICE void move(int64_t elements) {
    const int64_t bytes = elements * (is_bf16 ? sizeof(BFloat16) : sizeof(float));
    gradient_N = static_cast<const char*>(gradient_N) + bytes;
  }
  template <typename Part>
  __device__ auto load(const Part& part) const {
    if (!is_bf16) return load_part(static_cast<const float*>(gradient_N), part);
    float x[Part::kCount];
    to_floats(load_part(static_cast<const BFloat16*>(gradient_N), part), x);
    return to_stored<float, typename Part::Shape>(x);
  }
};

// The largest magnitude of weights as they are stored; NaN is skipped. Words of two are compared as such.
template <typename T>
class LargestStored {
 public:
  template <typename Shape>
  __device__ void raise_to(const StoredPart<T, Shape>& x) {
    for_each<x.kWords>([&](int w) {
      const uint32_t word = x.word(w);
      if constexpr (sizeof(T) == 4) {
        largest_ = __float_as_uint(max_magnitude(__uint_as_float(largest_), __uint_as_float(word)));
      } else {
        uint32_t pair;
#if __CUDA_ARCH__ >= 860
        asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(largest_), "r"(word));
#else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(largest_), "r"(word & 0x7fff7fffu));
#endif
        largest_ = pair;
      }
    });
  }
  // Raises *weight_amax, unless it is null, to what the threads of a block have found, as the last thing they do.
  template <int kThreads>
  __device__ void write(float* weight_amax) const {
    __shared__ uint32_t shared[kThreads / kWarpSize];
    if (weight_amax != nullptr) raise_to_block_max<kThreads>(weight_amax, value(), shared);
  }

 private:
  __device__ float value() const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(largest_);
    return fmaxf(fabsf(__uint_as_float(largest_ << 16)), fabsf(__uint_as_float(largest_ & 0xffff0000u)));
  }

  uint32_t largest_ = 0;  // the bits of one number; or of one for each half of a word, of either sign
};

// With decoupled decay: w -= lr (direction + weight_decay w).
template <typename Constants>
__device__ void update_weight(const Constants& c, float direction, float& w) {
  w = __fsub_rn(w, __fmul_rn(c.lr, __fadd_rn(direction, __fmul_rn(c.weight_decay, w))));
}

// ---- Launches ----

// Calls f with a tensor's device form, of fp32 or bf16.
template <typename F>
void with_plain_tensor(const TensorView& t, const F& f) {
  with_plain_type(t.dtype, [&](auto type) { f(PlainTensor<decltype(type)>{t.as<decltype(type)>()}); });
}

// Calls f with the weights' device form.
template <typename F>
void with_weights(const SteppedWeights& a, const F& f) {
  if (a.master_form == MasterForm::kNone) return f(PlainTensor<float>{a.weight.as<float>()});
  const PlainTensor<BFloat16> weight{a.weight.as<BFloat16>()};
  switch (a.master_form) {
    case MasterForm::kFp32: return f(SplitMaster<uint16_t>{weight, a.master.as<uint16_t>()});
    case MasterForm::kFp24Split:
      return f(Split24Master{{weight, a.master.as<uint8_t>()}, rounding_phase(a.step, a.first_element)});
    default: return f(StochasticWeight{weight, a.seed, a.step, a.first_element});
  }
}

// Whether a lane can move packs of all tensors as it likes to.
template <typename Shape>
bool is_aligned_for(std::initializer_list<TensorView> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const TensorView& t) {
    constexpr int64_t kWidestAccess = 16;
    const int64_t pack_bytes = Shape::kElements * size_of(t.dtype);
    return is_aligned(t.data, static_cast<size_t>(std::min(pack_bytes, kWidestAccess)));
  });
}

// Of N elements those that kernels with the table of roots can have: whole blocks of aligned tensors, with expanded
// moments. Without range expansion there is one row of roots, for any cache.
template <typename Shape>
int64_t num_fast_elements(const CudaDevice& device, int64_t N, const MomentView& moment,
                          std::initializer_list<TensorView> tensors) {
  const bool can = !moment.exponent.empty() && is_aligned_for<Shape>(tensors) &&
                   device.properties().sharedMemPerBlockOptin >= sizeof(RootTable);
  return can ? N / Shape::kBlockElements * Shape::kBlockElements : 0;
}

// Launches such a kernel, with a block for each multiprocessor. Behind `arguments` it gets the number of blocks of
// elements, and the scheduler's counters.
template <typename Shape, typename... Parameters, typename... Arguments>
void launch_with_roots(CudaDevice& device, std::string_view op, void (*kernel)(Parameters...), int64_t num_elements,
                       const Arguments&... arguments) {
  constexpr int kSharedBytes = sizeof(RootTable);
  const int count = static_cast<int>(num_elements / Shape::kBlockElements);
  const int blocks = std::min(count, device.num_multiprocessors());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), op);
  launch_early(device, op, kernel, {blocks, Shape::kThreads, kSharedBytes}, arguments..., count, device.counters());
}

}  // namespace parka::cuda
