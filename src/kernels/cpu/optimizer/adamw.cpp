#include "kernels/ops/optimizer/adamw.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include "core/parallel.h"
#include "core/philox.h"
#include "core/split_float.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/log2_exp2.h"
#include "kernels/cpu/optimizer/groups.h"

namespace parka::cpu {

void for_each_group(int64_t numel, const std::function<void(const GroupRange&)>& body) {
  constexpr int64_t kGroupGrain = 64;  // groups per chunk of parallel_for: 8192 elements
  parallel_for(ceil_div(numel, kMomentGroup), kGroupGrain, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const int64_t begin = g * kMomentGroup;
      body({begin, std::min(kMomentGroup, numel - begin)});
    }
  });
}

// ---- Reading ----

namespace {

constexpr uint32_t kMagnitudeBits = 0x7fffffffu;

// (|q| / max)^(1 / k) for every exponent 16 k and magnitude of a code. Both fit in a byte, so all take 128 KiB, and
// reading a moment needs no power function. Exponents below 16, as of zeroed memory, have only zeros.
class RootTable {
 public:
  RootTable() : roots_(256 * kCodes) {
    for (int exponent = 16; exponent < 256; ++exponent) {
      for (int code = 0; code <= kE4M3Traits.max_code; ++code) {
        const double q = decode_e4m3({static_cast<uint8_t>(code)});
        roots_[exponent * kCodes + code] = static_cast<float>(std::pow(q / kE4M3Traits.max, 16.0 / exponent));
      }
    }
  }
  const float* of_exponent(uint8_t exponent) const { return roots_.data() + exponent * kCodes; }

 private:
  static constexpr int kCodes = 128;
  std::vector<float> roots_;
};

uint8_t* code_bytes(const TensorView& codes) { return static_cast<uint8_t*>(codes.data); }

}  // namespace

void read_moment(const MomentView& moment, const GroupRange& range, float* out) {
  if (!is_float8(moment.values.dtype)) {
    decode_elements(moment.values, range.begin, range.count, out);
    return;
  }
  const float amax = moment.amax.as<float>()[range.group()];
  const uint8_t exponent = moment.exponent.empty() ? 16 : moment.exponent.as<uint8_t>()[range.group()];
  static const RootTable table;
  const float* roots = table.of_exponent(exponent);
  const uint8_t* codes = code_bytes(moment.values) + range.begin;
  for (int64_t i = 0; i < range.count; ++i) {
    const float magnitude = amax * roots[codes[i] & 0x7fu];
    out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | uint32_t{codes[i] & 0x80u} << 24);
  }
}

// ---- Writing ----

namespace {

struct Extremes {
  float amax;  // NaN if a member is: as integers, NaNs are the largest magnitudes
  float amin;  // smallest magnitude that is not zero; 0 if there is none
};

Extremes extremes(const float* x, int64_t count) {
  uint32_t largest = 0, smallest_less_one = ~0u;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & kMagnitudeBits;
    largest = std::max(largest, magnitude);
    smallest_less_one = std::min(smallest_less_one, magnitude - 1u);  // a zero wraps round and is no minimum
  }
  return {std::bit_cast<float>(largest), std::bit_cast<float>(smallest_less_one + 1u)};
}

// out[i] = (|x[i]| / amax)^k, at least 2^-126, which becomes code 0. Exactly 1 for the largest. Relative error
// below 2^-18 for what k stretches over a format's range (from 2^-32 on), none for k = 1 but the division's.
void expand(const float* x, int64_t count, float amax, uint8_t exponent, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::abs(x[i]) / amax;
  if (exponent == 16) return;
  const float k = static_cast<float>(exponent) / 16.0f;
  for (int64_t i = 0; i < count; ++i) out[i] = exp2_of_negative(k * log2_of_fraction(out[i]));
}

void write_codes(const float* x, const float* fractions, int64_t count, uint8_t smallest_code, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
    const uint8_t rounded = encode_e4m3(kE4M3Traits.max * fractions[i]).bits;
    const uint8_t at_least = (bits & kMagnitudeBits) != 0 ? smallest_code : uint8_t{0};
    const uint8_t magnitude = std::max(rounded, at_least);
    const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
    codes[i] = magnitude == 0 ? uint8_t{0} : static_cast<uint8_t>(sign | magnitude);
  }
}

}  // namespace

void write_moment(const float* x, const GroupRange& range, bool is_second, const MomentView& moment) {
  if (!is_float8(moment.values.dtype)) {
    encode_elements(x, range.begin, range.count, moment.values);
    return;
  }
  const Extremes found = extremes(x, range.count);
  if (!std::isfinite(found.amax)) {
    throw_internal("moment is not finite in elements {} to {}", range.begin, range.begin + range.count - 1);
  }
  const bool zeros = found.amax == 0;
  const float amax = zeros ? 0.0f : std::max(found.amax, kSmallestMomentAmax);
  const uint8_t exponent =
      zeros || moment.exponent.empty() ? uint8_t{16} : range_expansion_exponent(amax, found.amin);
  GroupValues fractions;
  expand(x, range.count, zeros ? 1.0f : amax, exponent, fractions.data());

  write_codes(x, fractions.data(), range.count, is_second ? 1 : 0, code_bytes(moment.values) + range.begin);
  moment.amax.as<float>()[range.group()] = amax;
  if (!moment.exponent.empty()) moment.exponent.as<uint8_t>()[range.group()] = exponent;
}

// ---- Weights ----

void read_weights(const SteppedWeights& a, const GroupRange& range, float* w) {
  switch (a.master_form) {
    case MasterForm::kFp32: {
      const BFloat16* weight = a.weight.as<BFloat16>() + range.begin;
      const uint16_t* remainder = a.master.as<uint16_t>() + range.begin;
      for (int64_t i = 0; i < range.count; ++i) w[i] = join_float(weight[i], remainder[i]);
      return;
    }
    case MasterForm::kFp24Split: {
      const BFloat16* weight = a.weight.as<BFloat16>() + range.begin;
      const uint8_t* remainder = a.master.as<uint8_t>() + range.begin;
      for (int64_t i = 0; i < range.count; ++i) w[i] = join_float24(weight[i], remainder[i]);
      return;
    }
    case MasterForm::kBf16Sr:
    case MasterForm::kNone: decode_elements(a.weight, range.begin, range.count, w); return;
  }
}

namespace {

void write_split24(const SteppedWeights& a, const GroupRange& range, const float* w) {
  BFloat16* weight = a.weight.as<BFloat16>() + range.begin;
  uint8_t* remainder = a.master.as<uint8_t>() + range.begin;
  const uint64_t first = a.first_element + static_cast<uint64_t>(range.begin);
  for (int64_t i = 0; i < range.count; ++i) {
    const uint32_t phase = rounding_phase(a.step, first + static_cast<uint64_t>(i));
    const SplitFloat24 split = split_float24(round_to_float24(w[i], phase));
    weight[i] = split.weight;
    remainder[i] = split.remainder;
  }
}

void write_stochastic(const SteppedWeights& a, const GroupRange& range, const float* w) {
  BFloat16* weight = a.weight.as<BFloat16>() + range.begin;
  const uint64_t first = a.first_element + static_cast<uint64_t>(range.begin);
  for (int64_t i = 0; i < range.count; i += 4) {  // `first` is a multiple of 128: four elements share a draw
    const auto random = philox4x32(a.seed, a.step, (first + static_cast<uint64_t>(i)) / 4);
    const int64_t lanes = std::min<int64_t>(4, range.count - i);
    for (int64_t lane = 0; lane < lanes; ++lane)
      weight[i + lane] = encode_bf16_stochastic(w[i + lane], random[lane]);
  }
}

}  // namespace

void write_weights(const SteppedWeights& a, const GroupRange& range, const float* w) {
  switch (a.master_form) {
    case MasterForm::kFp32: {
      BFloat16* weight = a.weight.as<BFloat16>() + range.begin;
      uint16_t* remainder = a.master.as<uint16_t>() + range.begin;
      for (int64_t i = 0; i < range.count; ++i) {
        const SplitFloat split = split_float(w[i]);
        weight[i] = split.weight;
        remainder[i] = split.remainder;
      }
      return;
    }
    case MasterForm::kFp24Split: write_split24(a, range, w); return;
    case MasterForm::kBf16Sr: write_stochastic(a, range, w); return;
    case MasterForm::kNone: encode_elements(w, range.begin, range.count, a.weight); return;
  }
}

void raise_weight_amax(const SteppedWeights& a, const GroupRange& range) {
  if (a.weight_amax.empty()) return;
  GroupValues stored;
  decode_elements(a.weight, range.begin, range.count, stored.data());
  const float largest = max_abs(stored.data(), range.count);
  const std::atomic_ref<float> amax(a.weight_amax.as<float>()[0]);
  float found = amax.load();
  while (largest > found && !amax.compare_exchange_weak(found, largest)) {
  }
}

// ---- AdamW ----

namespace {

struct UpdateConstants {
  float grad_scale;
  float gain1, gain2;  // 1 - beta
  float inverse_bias1, inverse_sqrt_bias2;

  explicit UpdateConstants(const AdamwStep& a)
      : grad_scale(a.grad_scale.as<float>()[0]),
        gain1(static_cast<float>(1.0 - a.beta1)),
        gain2(static_cast<float>(1.0 - a.beta2)),
        inverse_bias1(static_cast<float>(1.0 / a.bias_correction1)),
        inverse_sqrt_bias2(static_cast<float>(1.0 / std::sqrt(double{a.bias_correction2}))) {}
};

// w, m and v of `count` elements, in place. v's root comes before the bias correction: v / bias2 could overflow.
void update(const AdamwStep& a, const UpdateConstants& c, int64_t count, const float* gradient, float* m, float* v,
            float* w) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * c.grad_scale;
    m[i] += c.gain1 * (g - m[i]);
    v[i] += c.gain2 * (g * g - v[i]);
    const float direction = m[i] * c.inverse_bias1 / (std::sqrt(v[i]) * c.inverse_sqrt_bias2 + a.eps);
    w[i] -= a.lr * (direction + a.weight_decay * w[i]);
  }
}

void step_group(const AdamwStep& a, const SteppedWeights& weights, const UpdateConstants& constants,
                const GroupRange& range) {
  GroupValues g, m, v, w;
  decode_elements(a.gradient, range.begin, range.count, g.data());
  read_moment(a.exp_avg, range, m.data());
  read_moment(a.exp_avg_sq, range, v.data());
  read_weights(weights, range, w.data());
  update(a, constants, range.count, g.data(), m.data(), v.data(), w.data());
  write_moment(m.data(), range, /*is_second=*/false, a.exp_avg);
  write_moment(v.data(), range, /*is_second=*/true, a.exp_avg_sq);
  write_weights(weights, range, w.data());
}

}  // namespace

void adamw_step(Device&, const AdamwStep& a) {
  const UpdateConstants constants(a);
  const SteppedWeights weights(a);
  const bool changes = std::isfinite(constants.grad_scale);
  if (!changes && a.weight_amax.empty()) return;
  for_each_group(a.weight.numel(), [&](const GroupRange& range) {
    if (changes) step_group(a, weights, constants, range);
    raise_weight_amax(weights, range);
  });
}

void moment_encode(Device&, const MomentEncode& a) {
  const float* values = a.values.as<float>();
  for_each_group(a.values.numel(), [&](const GroupRange& range) {
    write_moment(values + range.begin, range, a.is_second, a.moment);
  });
}

void moment_decode(Device&, const MomentDecode& a) {
  float* values = a.values.as<float>();
  for_each_group(a.values.numel(),
                 [&](const GroupRange& range) { read_moment(a.moment, range, values + range.begin); });
}

}  // namespace parka::cpu
