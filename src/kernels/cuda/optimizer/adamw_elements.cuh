#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/philox.h"
#include "core/split_float.h"
#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops/optimizer/adamw.h"

// Building blocks of all AdamW kernels, for any format of moments: a lane's elements, master forms, the arithmetic.
namespace parka::cuda {

// ---- One lane's elements ----

// A lane's part of a group of 128 elements: kPacks packs of kElements neighbours. It shares the group with the
// kLanes
// - 1 lanes next to it. Packs of these lanes are adjacent, so that a warp moves whole sectors.
template <int kPacks_, int kElements_, int kWarps>
struct LanePart {
  static constexpr int kPacks = kPacks_, kElements = kElements_;
  static constexpr int kLanes = static_cast<int>(kMomentGroup) / (kPacks * kElements);  // of a group
  static constexpr int kPackStride = kLanes * kElements;
  static constexpr int kThreads = kWarps * kWarpSize;  // of a block
  static constexpr int kBlockElements = kThreads * kPacks * kElements;
  static_assert(kWarpSize % kLanes == 0);

  int64_t left;  // elements of the tensor from the lane's first one on; may be negative

  static __device__ uint32_t lane() { return threadIdx.x % kLanes; }
  // The offset of a lane's first element in its block's.
  static __device__ uint32_t offset() {
    return threadIdx.x / kLanes * static_cast<uint32_t>(kMomentGroup) + lane() * kElements;
  }

  // True if the last group may lie beyond the tensor's end, as other lanes' may not.
  __device__ bool has_group() const { return left + lane() * kElements > 0; }
  // Below kElements only in the last group of a tensor and beyond, where it may be 0.
  __device__ int count(int pack) const {
    const int64_t here = left - pack * kPackStride;
    return here >= kElements ? kElements : here > 0 ? static_cast<int>(here) : 0;
  }
};

// A lane's elements of one tensor as fp32, and as they are stored.
template <typename Part>
using PartValues = float[Part::kPacks][Part::kElements];

template <typename T, typename Part>
struct StoredPart {
  Stored<T, Part::kElements> pack[Part::kPacks];
};

// Loads at the lane's first element. kWhole: all packs are full and aligned. Elements past the end read as 0.
template <bool kWhole, typename T, typename Part>
__device__ StoredPart<T, Part> load_part(const T* p, const Part& part) {
  constexpr int kElements = Part::kElements;
  StoredPart<T, Part> x;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
    if constexpr (kWhole) {
      x.pack[pack] = load_stored<kElements>(p + pack * Part::kPackStride);
    } else {
      Pack<T, kElements> elements{};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i < part.count(pack)) elements.element[i] = p[pack * Part::kPackStride + i];
      }
      x.pack[pack] = std::bit_cast<Stored<T, kElements>>(elements);
    }
  }
  return x;
}

template <bool kWhole, typename T, typename Part>
__device__ void store_part(T* p, const Part& part, const StoredPart<T, Part>& x) {
  using Words = Pack<uint32_t, Stored<T, Part::kElements>::kWords>;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
    if constexpr (kWhole) {
      *reinterpret_cast<Words*>(p + pack * Part::kPackStride) = std::bit_cast<Words>(x.pack[pack]);
    } else {
      const auto elements = std::bit_cast<Pack<T, Part::kElements>>(x.pack[pack]);
#pragma unroll
      for (int i = 0; i < Part::kElements; ++i) {
        if (i < part.count(pack)) p[pack * Part::kPackStride + i] = elements.element[i];
      }
    }
  }
}

// Calls f(pack, i) for each of a lane's elements.
template <typename Part, typename F>
__device__ void for_each_element(const F& f) {
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Part::kElements; ++i) f(pack, i);
  }
}

template <typename T, typename Part>
__device__ void to_floats(const StoredPart<T, Part>& stored, PartValues<Part>& x) {
  for_each_element<Part>([&](int pack, int i) { x[pack][i] = stored.pack[pack][i]; });
}

template <typename T, typename Part>
__device__ StoredPart<T, Part> to_stored(const PartValues<Part>& x) {
  StoredPart<T, Part> stored;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
    Pack<T, Part::kElements> elements;
#pragma unroll
    for (int i = 0; i < Part::kElements; ++i) elements.element[i] = from_float<T>(x[pack][i]);
    stored.pack[pack] = std::bit_cast<Stored<T, Part::kElements>>(elements);
  }
  return stored;
}

// The largest magnitude of numbers as they are stored; NaN is skipped. Words of two are compared as such.
template <typename T>
class LargestStored {
 public:
  template <typename Part>
  __device__ void raise_to(const StoredPart<T, Part>& x) {
#pragma unroll
    for (const auto& pack : x.pack) {
#pragma unroll
      for (const uint32_t word : pack.word) largest_ = larger(largest_, word);
    }
  }
  __device__ float value() const {
    if constexpr (sizeof(T) == 4) return __uint_as_float(largest_);
    return fmaxf(fabsf(__uint_as_float(largest_ << 16)), fabsf(__uint_as_float(largest_ & 0xffff0000u)));
  }

 private:
  static __device__ uint32_t larger(uint32_t largest, uint32_t word) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(max_magnitude(__uint_as_float(largest), __uint_as_float(word)));
    } else {
      uint32_t pair;
#if __CUDA_ARCH__ >= 860
      asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(largest), "r"(word));
#else
      asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(largest), "r"(word & 0x7fff7fffu));
#endif
      return pair;
    }
  }

  uint32_t largest_ = 0;  // the bits of one number; or of one for each half of a word, of either sign
};

// ---- Gradient, and weights, one type for each MasterForm ----

// Each can move() by a number of elements, load() what is stored, as to_floats() takes it, and store() floats,
// which gives the weights (not the masters) as they are stored.

template <typename T>
struct Gradient {
  const T* gradient_N;

  PARKA_HOST_DEVICE void move(int64_t elements) { gradient_N += elements; }
  template <bool kWhole, typename Part>
  __device__ auto load(const Part& part) const {
    return load_part<kWhole>(gradient_N, part);
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
  template <bool kWhole, typename Part>
  __device__ StoredPart<float, Part> load(const Part& part) const {
    if (!is_bf16) return load_part<kWhole>(static_cast<const float*>(gradient_N), part);
    PartValues<Part> x;
    to_floats(load_part<kWhole>(static_cast<const BFloat16*>(gradient_N), part), x);
    return to_stored<float, Part>(x);
  }
};

// split_float of each element, in words of two. The remainder is just the low half of a float; the weight is the
// high half of the float plus half of its last place.
template <typename Part>
__device__ StoredPart<BFloat16, Part> split_weights(const PartValues<Part>& w) {
  constexpr uint32_t kHalfPlace = 0x8000u;
  StoredPart<BFloat16, Part> weight;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Part::kElements; i += 2) {
      const uint32_t first = __float_as_uint(w[pack][i]) + kHalfPlace;
      const uint32_t second = __float_as_uint(w[pack][i + 1]) + kHalfPlace;
      weight.pack[pack].word[i / 2] = __byte_perm(first, second, 0x7632);
    }
  }
  return weight;
}

template <typename Part>
__device__ StoredPart<uint16_t, Part> split_remainders(const PartValues<Part>& w) {
  StoredPart<uint16_t, Part> remainder;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Part::kElements; i += 2) {
      const uint32_t first = __float_as_uint(w[pack][i]), second = __float_as_uint(w[pack][i + 1]);
      remainder.pack[pack].word[i / 2] = __byte_perm(first, second, 0x5410);
    }
  }
  return remainder;
}

template <typename Part>
struct SplitPart {
  StoredPart<BFloat16, Part> weight;
  StoredPart<uint16_t, Part> remainder;
};

// join_float: with the remainder's sign bit flipped, both halves are the float plus half a last place.
template <typename Part>
__device__ void to_floats(const SplitPart<Part>& stored, PartValues<Part>& w) {
  constexpr uint32_t kHalfPlace = 0x8000u;
  for_each_element<Part>([&](int pack, int i) {
    const uint32_t remainders = stored.remainder.pack[pack].word[i / 2] ^ (kHalfPlace << 16 | kHalfPlace);
    const uint32_t weights = stored.weight.pack[pack].word[i / 2];
    w[pack][i] = __uint_as_float(__byte_perm(remainders, weights, i % 2 == 0 ? 0x5410 : 0x7632) - kHalfPlace);
  });
}

struct SplitMaster {
  BFloat16* weight_N;
  uint16_t* remainder_N;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weight_N += elements;
    remainder_N += elements;
  }
  template <bool kWhole, typename Part>
  __device__ SplitPart<Part> load(const Part& part) const {
    return {load_part<kWhole>(weight_N, part), load_part<kWhole>(remainder_N, part)};
  }
  template <bool kWhole, typename Part>
  __device__ auto store(const Part& part, const PartValues<Part>& w) const {
    const auto weights = split_weights<Part>(w);
    store_part<kWhole>(weight_N, part, weights);
    store_part<kWhole>(remainder_N, part, split_remainders<Part>(w));
    return weights;
  }
};

template <typename Part>
struct Split24Part {
  StoredPart<BFloat16, Part> weight;
  StoredPart<uint8_t, Part> remainder;
};

// join_float24, as above: the remainder is a float's second byte from the low end, and the first is 0.
template <typename Part>
__device__ void to_floats(const Split24Part<Part>& stored, PartValues<Part>& w) {
  constexpr uint32_t kHalfPlace = 0x8000u, kSignBits = 0x80808080u;
  for_each_element<Part>([&](int pack, int i) {
    const uint32_t remainders = stored.remainder.pack[pack].word[i / 4] ^ kSignBits;
    const uint32_t weights = stored.weight.pack[pack].word[i / 2];
    // Bytes of the weight, its remainder, and any for the lowest, which is then cleared.
    const uint32_t selected = (i % 2 == 0 ? 0x5400u : 0x7600u) | (i % 4) << 4;
    w[pack][i] = __uint_as_float((__byte_perm(remainders, weights, selected) & ~0xffu) - kHalfPlace);
  });
}

template <typename Part>
__device__ StoredPart<uint8_t, Part> split_remainders24(const PartValues<Part>& w) {
  StoredPart<uint8_t, Part> remainder;
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Part::kElements; i += 4) {
      const auto pair = [&](int k) {  // the second byte of each
        return __byte_perm(__float_as_uint(w[pack][k]), __float_as_uint(w[pack][k + 1]), 0x0051);
      };
      remainder.pack[pack].word[i / 4] = __byte_perm(pair(i), pair(i + 2), 0x5410);
    }
  }
  return remainder;
}

struct Split24Master {
  BFloat16* weight_N;
  uint8_t* remainder_N;
  uint32_t phase;  // rounding_phase() of the first element

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weight_N += elements;
    remainder_N += elements;
    phase += static_cast<uint32_t>(elements) * kPhaseOfElement;
  }
  template <bool kWhole, typename Part>
  __device__ Split24Part<Part> load(const Part& part) const {
    return {load_part<kWhole>(weight_N, part), load_part<kWhole>(remainder_N, part)};
  }
  template <bool kWhole, typename Part>
  __device__ auto store(const Part& part, const PartValues<Part>& w) const {
    PartValues<Part> rounded;
    for_each_element<Part>([&](int pack, int i) {
      const auto offset = static_cast<uint32_t>(pack * Part::kPackStride + i);
      rounded[pack][i] = round_to_float24(w[pack][i], phase + offset * kPhaseOfElement);
    });
    const auto weights = split_weights<Part>(rounded);
    store_part<kWhole>(weight_N, part, weights);
    store_part<kWhole>(remainder_N, part, split_remainders24<Part>(rounded));
    return weights;
  }
};

struct StochasticWeight {
  BFloat16* weight_N;
  uint64_t seed, step, first_element;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weight_N += elements;
    first_element += static_cast<uint64_t>(elements);
  }
  template <bool kWhole, typename Part>
  __device__ auto load(const Part& part) const {
    return load_part<kWhole>(weight_N, part);
  }
  template <bool kWhole, typename Part>
  __device__ auto store(const Part& part, const PartValues<Part>& w) const {
    constexpr int kDraw = 4;  // elements that share a draw of philox4x32
    StoredPart<BFloat16, Part> stored;
#pragma unroll
    for (int pack = 0; pack < Part::kPacks; ++pack) {
      const uint64_t first = first_element + pack * Part::kPackStride;
      Pack<BFloat16, Part::kElements> weight;
#pragma unroll
      for (int begin = 0; begin < Part::kElements; begin += kDraw) {
        const auto random = philox4x32(seed, step, (first + begin) / kDraw);
#pragma unroll
        for (int i = 0; i < kDraw; ++i)
          weight.element[begin + i] = encode_bf16_stochastic(w[pack][begin + i], random[i]);
      }
      stored.pack[pack] = std::bit_cast<Stored<BFloat16, Part::kElements>>(weight);
    }
    store_part<kWhole>(weight_N, part, stored);
    return stored;
  }
};

struct Fp32Weight {
  float* weight_N;

  PARKA_HOST_DEVICE void move(int64_t elements) { weight_N += elements; }
  template <bool kWhole, typename Part>
  __device__ auto load(const Part& part) const {
    return load_part<kWhole>(weight_N, part);
  }
  template <bool kWhole, typename Part>
  __device__ auto store(const Part& part, const PartValues<Part>& w) const {
    const auto weights = to_stored<float, Part>(w);
    store_part<kWhole>(weight_N, part, weights);
    return weights;
  }
};

// ---- The update ----

struct UpdateConstants {
  float gain1, gain2;  // 1 - beta
  float inverse_bias1, inverse_sqrt_bias2;
  float lr, eps, weight_decay;
  bool are_safe;  // for safe_direction_of, in adamw_update.cuh

  explicit UpdateConstants(const AdamwStep& a)
      : gain1(static_cast<float>(1.0 - a.beta1)),
        gain2(static_cast<float>(1.0 - a.beta2)),
        inverse_bias1(static_cast<float>(1.0 / a.bias_correction1)),
        inverse_sqrt_bias2(static_cast<float>(1.0 / std::sqrt(double{a.bias_correction2}))),
        lr(a.lr),
        eps(a.eps),
        weight_decay(a.weight_decay),
        are_safe(inverse_bias1 <= 0x1p10f && inverse_sqrt_bias2 <= 0x1p10f && eps >= 0x1p-100f && eps <= 0x1p10f) {}
};

// The update of one element, in three parts. Each operation is rounded by itself, which compilers would contract in
// one instance and not another. So all master forms, and the CPU, give equal bits.

__device__ inline void update_moments(const UpdateConstants& c, float g, float& m, float& v) {
  m = __fadd_rn(m, __fmul_rn(c.gain1, __fsub_rn(g, m)));
  v = __fadd_rn(v, __fmul_rn(c.gain2, __fsub_rn(__fmul_rn(g, g), v)));
}

// The weight's direction. The root of v is taken before the bias correction: v / bias2 could overflow.
__device__ inline float direction_of(float m, float v, float inverse_bias1, float inverse_sqrt_bias2, float eps) {
  const float root = __fmul_rn(__fsqrt_rn(v), inverse_sqrt_bias2);
  return __fdiv_rn(__fmul_rn(m, inverse_bias1), __fadd_rn(root, eps));
}

template <typename Constants>
__device__ void update_weight(const Constants& c, float direction, float& w) {
  w = __fsub_rn(w, __fmul_rn(c.lr, __fadd_rn(direction, __fmul_rn(c.weight_decay, w))));
}

}  // namespace parka::cuda
