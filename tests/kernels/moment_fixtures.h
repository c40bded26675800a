#pragma once
#include <cmath>
#include <vector>

#include "kernels/ops/adamw.h"
#include "tests/support/tensors.h"

namespace parka::test {

// How a moment is stored.
struct MomentStorage {
  DType format;
  bool expanded = false;
};

inline const std::vector<MomentStorage> kFloat8Storages = {
    {DType::kE4M3, false}, {DType::kE4M3, true}, {DType::kE5M2, false}, {DType::kE5M2, true}};

// The tensors of one moment of N elements; poisoned unless `zeroed`, which is how a moment starts.
class TestMoment {
 public:
  TestMoment(Device& device, const MomentStorage& storage, int64_t N, bool zeroed = false)
      : values(device, storage.format, {N}, fill(N, zeroed)),
        amax(device, DType::kF32, {ceil_div(N, kMomentGroup)}, fill(ceil_div(N, kMomentGroup), zeroed)),
        exponent(device, DType::kU8, {ceil_div(N, kMomentGroup)}, fill(ceil_div(N, kMomentGroup), zeroed)),
        storage_(storage) {}

  MomentView view() const {
    MomentView moment{values, {}, {}};
    if (is_float8(storage_.format)) moment.amax = amax;
    if (storage_.expanded) moment.exponent = exponent;
    return moment;
  }
  // The part [begin, end) as a moment of its own; `begin` is a multiple of 128.
  MomentView range(int64_t begin, int64_t end) const {
    const int64_t first_group = begin / kMomentGroup, groups = ceil_div(end - begin, kMomentGroup);
    MomentView moment = view();
    moment.values = moment.values.rows(begin, end - begin);
    if (!moment.amax.empty()) moment.amax = moment.amax.rows(first_group, groups);
    if (!moment.exponent.empty()) moment.exponent = moment.exponent.rows(first_group, groups);
    return moment;
  }
  bool guard_intact() const { return values.guard_intact() && amax.guard_intact() && exponent.guard_intact(); }
  bool same_bits(const TestMoment& other) const {
    return values.bytes() == other.values.bytes() && amax.bytes() == other.amax.bytes() &&
           exponent.bytes() == other.exponent.bytes();
  }

  TestTensor values, amax, exponent;

 private:
  static std::vector<float> fill(int64_t count, bool zeroed) {
    return std::vector<float>(zeroed ? static_cast<size_t>(count) : 0);
  }
  MomentStorage storage_;
};

// What encoding `values` leaves behind, and what decoding gives back.
struct StoredMoment {
  std::vector<uint8_t> codes;
  std::vector<float> amax;
  std::vector<uint8_t> exponent;  // 16 everywhere without expansion
  std::vector<float> values;
  bool guard_intact;
};

inline std::vector<uint8_t> as_uint8(const std::vector<std::byte>& bytes) {
  std::vector<uint8_t> result;
  for (std::byte b : bytes) result.push_back(static_cast<uint8_t>(b));
  return result;
}

inline StoredMoment store_and_read(Device& device, const std::vector<float>& values, const MomentStorage& storage,
                                   bool is_second) {
  const auto N = static_cast<int64_t>(values.size());
  const TestTensor in(device, DType::kF32, {N}, values), out(device, DType::kF32, {N});
  const TestMoment moment(device, storage, N);
  moment_encode(device, {.values = in, .moment = moment.view(), .is_second = is_second});
  moment_decode(device, {.moment = moment.view(), .values = out});
  std::vector<uint8_t> exponent(static_cast<size_t>(ceil_div(N, kMomentGroup)), 16);
  if (storage.expanded) exponent = as_uint8(moment.exponent.bytes());
  return {as_uint8(moment.values.bytes()), moment.amax.host(), exponent, out.host(),
          moment.guard_intact() && in.guard_intact() && out.guard_intact()};
}

// `count` magnitudes spread evenly over the logarithm of [smallest, smallest * ratio], in random order.
inline std::vector<float> log_uniform(int64_t count, double smallest, double ratio, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double position = uniform_open(philox4x32(seed, 9, static_cast<uint64_t>(i))[0]);
    values[i] = static_cast<float>(smallest * std::pow(ratio, position));
  }
  return values;
}

inline std::vector<float> with_random_signs(std::vector<float> values, uint64_t seed) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (philox4x32(seed, 10, i)[0] & 1u) values[i] = -values[i];
  }
  return values;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Root mean square of (stored - x) / x over the elements that are not 0.
inline double rms_relative_error(const std::vector<float>& stored, const std::vector<float>& x) {
  double squares = 0;
  int64_t count = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == 0) continue;
    const double relative = (double{stored[i]} - x[i]) / x[i];
    squares += relative * relative;
    ++count;
  }
  return std::sqrt(squares / static_cast<double>(count));
}

}  // namespace parka::test
