#pragma once
#include <cstdint>
#include <limits>

#include "kernels/cuda/optimizer/adamw_elements.cuh"
#include "kernels/cuda/optimizer/fp8_moment.cuh"

// Moments in AdamW's kernels: a lane's elements of one tensor, with their scales. move() goes on by a number of
// elements: to the lane's first element at the beginning, then by multiples of 128. read() and write() convert
// values. Members are called by all lanes of a warp.
namespace parka::cuda {

// fp32 or bf16.
template <typename T, typename Part_>
struct PlainMoment {
  using Part = Part_;
  using Values = PartValues<Part>;
  T* values_N;

  PARKA_HOST_DEVICE void move(int64_t elements) { values_N += elements; }
  template <bool kWhole>
  __device__ void read(const Part& part, Values& x) const {
    to_floats(load_part<kWhole>(values_N, part), x);
  }
  template <bool kWhole>
  __device__ void write(const Part& part, const Values& x) const {
    store_part<kWhole>(values_N, part, to_stored<T, Part>(x));
  }
};

// kOfFastStep: there is range expansion, and no second moment has a sign. Otherwise that is found at run time.
template <typename Part_, bool kIsSecond, bool kOfFastStep>
struct Fp8Moment {
  static constexpr bool kSigned = !(kIsSecond && kOfFastStep);
  using Part = Part_;
  using Values = PartValues<Part>;
  struct StoredValues {
    StoredPart<Float8E4M3, Part> codes;
    float amax;
    uint32_t exponent;
  };

  Float8E4M3* codes_N;
  float* amax_G;
  uint8_t* exponent_G;  // null without range expansion

  explicit Fp8Moment(const MomentView& moment)
      : codes_N(moment.values.as<Float8E4M3>()),
        amax_G(moment.amax.as<float>()),
        exponent_G(moment.exponent.empty() ? nullptr : moment.exponent.as<uint8_t>()) {}

  PARKA_HOST_DEVICE void move(int64_t elements) {
    codes_N += elements;
    amax_G += elements / kMomentGroup;
    if (is_expanded()) exponent_G += elements / kMomentGroup;
  }
  PARKA_HOST_DEVICE bool is_expanded() const { return kOfFastStep || exponent_G != nullptr; }
  template <bool kWhole>
  __device__ StoredValues load(const Part& part) const {
    const bool has_group = kWhole || part.has_group();
    const bool has_exponent = is_expanded() && has_group;
    return {load_part<kWhole>(codes_N, part), has_group ? *amax_G : 0.0f,
            has_exponent ? uint32_t{*exponent_G} : kLeastExponent};
  }

  static __device__ void decode(const StoredValues& stored, const RootTable& roots, Values& x) {
    const uint32_t row = max(stored.exponent, kLeastExponent) - kLeastExponent;
    float values[kWords][4];
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t codes = stored.codes.pack[word / kPackWords].word[word % kPackWords];
      decode_moment<kSigned>(codes, stored.amax, roots, row, values[word]);
    }
    for_each_element<Part>([&](int pack, int i) { x[pack][i] = values[pack * kPackWords + i / 4][i % 4]; });
  }

  // The group's extremes, in all of its lanes.
  static __device__ MomentExtremes extremes(const Values& x) {
    // As integers, NaNs are the largest magnitudes.
    const auto magnitude = [&](int pack, int i) {
      return __float_as_uint(x[pack][i]) & (kSigned ? 0x7fffffffu : ~0u);
    };
    uint32_t largest = 0, smallest = ~0u;
    for_each_element<Part>([&](int pack, int i) {
      largest = max(largest, magnitude(pack, i));
      smallest = min(smallest, magnitude(pack, i));
    });
    largest = over_group(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
    const auto lesser = [](uint32_t a, uint32_t b) { return min(a, b); };
    smallest = over_group(smallest, lesser);
    uint32_t smallest_nonzero = smallest;
    if (__any_sync(kFullWarp, smallest == 0 && largest != 0)) {
      uint32_t less_one = ~0u;  // a zero wraps round and is no minimum
      for_each_element<Part>([&](int pack, int i) { less_one = min(less_one, magnitude(pack, i) - 1u); });
      smallest_nonzero = over_group(less_one, lesser) + 1u;
    }
    return {__uint_as_float(largest), __uint_as_float(smallest_nonzero), smallest == 0};
  }

  template <bool kWhole>
  __device__ void store(const Part& part, const Values& x, const MomentExtremes& found) const {
    const float amax = fmaxf(found.amax, kSmallestMomentAmax);
    const float exponent = is_expanded() ? moment_exponent(amax, found.amin) : float{kLeastExponent};
    const MomentGroup group(amax, exponent);
    float values[kWords][4];
    for_each_element<Part>([&](int pack, int i) { values[pack * kPackWords + i / 4][i % 4] = x[pack][i]; });
    uint32_t words[kWords];
    encode_moment<kIsSecond, kSigned>(values, group, words);
    StoredPart<Float8E4M3, Part> codes;
#pragma unroll
    for (int word = 0; word < kWords; ++word) codes.pack[word / kPackWords].word[word % kPackWords] = words[word];
    store_part<kWhole>(codes_N, part, codes);
    // A value that is not finite, which no step makes, becomes zero: stored, it would come back at every step.
    const bool is_finite = found.amax <= std::numeric_limits<float>::max();
    if (!is_finite) store_part<kWhole>(codes_N, part, StoredPart<Float8E4M3, Part>{});
    if (Part::lane() == 0 && (kWhole || part.has_group())) {
      *amax_G = is_finite && found.amax != 0.0f ? amax : 0.0f;
      if (is_expanded()) *exponent_G = static_cast<uint8_t>(is_finite ? exponent : kLeastExponent);
    }
  }

  // The whole way from and to memory.
  template <bool kWhole>
  __device__ void read(const Part& part, Values& x) const {
    decode(load<kWhole>(part), kRootTable, x);
  }
  template <bool kWhole>
  __device__ void write(const Part& part, const Values& x) const {
    store<kWhole>(part, x, extremes(x));
  }

 private:
  static constexpr int kPackWords = Part::kElements / 4, kWords = Part::kPacks * kPackWords;  // of four codes

  template <typename F>
  static __device__ uint32_t over_group(uint32_t x, const F& reduce) {
#pragma unroll
    for (int offset = Part::kLanes / 2; offset > 0; offset /= 2) {
      x = reduce(x, __shfl_xor_sync(kFullWarp, x, offset));
    }
    return x;
  }
};

}  // namespace parka::cuda
