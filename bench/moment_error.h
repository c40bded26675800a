#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/dynamic_float8.h"
#include "core/error.h"
#include "core/float16.h"
#include "core/number_formats.h"
#include "core/parallel.h"
#include "kernels/device/device.h"

// How far Adam's direction u = m / (sqrt(v) + eps) moves when m and v are stored in 8 bits. Used by the benchmark
// of the same name and by its test.
namespace parka::bench {

struct StoredFormat {
  const char* name;
  enum class Kind : uint8_t { kE4M3, kDynamic } kind;
  bool expanded;
};

inline constexpr std::array<StoredFormat, 4> kStoredFormats = {{
    {"E4M3", StoredFormat::Kind::kE4M3, false},
    {"E4M3 expanded", StoredFormat::Kind::kE4M3, true},
    {"DE8", StoredFormat::Kind::kDynamic, false},
    {"DE8 expanded", StoredFormat::Kind::kDynamic, true},
}};
inline constexpr size_t kPlainE4M3 = 0, kExpandedE4M3 = 1, kDE8 = 2;  // in kStoredFormats

// Returns the values of a moment after they were stored in groups of 128 and read back. E4M3 goes through the
// optimizer's own moment_encode and moment_decode.
inline std::vector<float> stored_and_read(Device& device, std::vector<float>& values, const StoredFormat& format,
                                          bool is_second) {
  const auto N = static_cast<int64_t>(values.size()), groups = ceil_div(N, kMomentGroup);
  std::vector<float> stored(values.size());
  if (format.kind == StoredFormat::Kind::kDynamic) {
    constexpr int64_t kGroupsAtATime = 64;
    parallel_for(groups, kGroupsAtATime, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * kMomentGroup; first < std::min(end * kMomentGroup, N); first += kMomentGroup) {
        const int64_t count = std::min(kMomentGroup, N - first);
        store_dynamic_float8(values.data() + first, count, is_second, format.expanded, stored.data() + first);
      }
    });
    return stored;
  }
  std::vector<uint8_t> codes(values.size()), exponent(static_cast<size_t>(groups));
  std::vector<float> amax(static_cast<size_t>(groups));
  MomentView moment{{codes.data(), DType::kE4M3, {N}}, {amax.data(), DType::kF32, {groups}}, {}};
  if (format.expanded) moment.exponent = {exponent.data(), DType::kU8, {groups}};
  const TensorView in(values.data(), DType::kF32, {N}), out(stored.data(), DType::kF32, {N});
  moment_encode(device, {.values = in, .moment = moment, .is_second = is_second});
  moment_decode(device, {.moment = moment, .values = out});
  return stored;
}

// The smallest and the largest magnitude in a group, zeros left out.
struct GroupRange {
  float amin = 0, amax = 0;
  bool is_empty() const { return amax == 0; }
  double powers_of_two() const { return std::log2(double{amax} / amin); }
};

inline GroupRange range_of(const float* x, int64_t count) {
  GroupRange range;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(x[i]);
    range.amax = std::max(range.amax, magnitude);
    if (magnitude != 0 && (range.amin == 0 || magnitude < range.amin)) range.amin = magnitude;
  }
  return range;
}

// What groups of 128 span in powers of two, before and after expansion in E4M3, and the exponents k of it. Groups
// of zeros are left out.
struct MomentRanges {
  std::vector<double> before, after, exponents;

  void add(const std::vector<float>& values) {
    const auto N = static_cast<int64_t>(values.size());
    for (int64_t first = 0; first < N; first += kMomentGroup) {
      const GroupRange range = range_of(values.data() + first, std::min(kMomentGroup, N - first));
      if (range.is_empty()) continue;
      before.push_back(range.powers_of_two());
      exponents.push_back(range_expansion_exponent(range.amax, range.amin) / 16.0);
      after.push_back(exponents.back() * before.back());
    }
  }
  // The value that a share of all are below, to the nearest one.
  static double quantile(std::vector<double> values, double share) {
    PARKA_REQUIRE(!values.empty());
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))];
  }
};

// A group as COAT's code stores it in E4M3 (arXiv 2410.19313 and its repository), where zeros do not count for the
// smallest: around c = sqrt(amax amin), with k = floor(16 log2(R) / log2(amax / amin)) / 16, which may be below 1
// and has no upper limit. A group of one magnitude, which gives no k there, is stored exactly.
inline void store_as_coat(const float* x, int64_t count, float* stored) {
  const GroupRange range = range_of(x, count);
  const double powers = range.is_empty() ? 0 : range.powers_of_two();
  if (powers == 0) {
    std::copy(x, x + count, stored);
    return;
  }
  const double k = std::floor(16 * std::log2(448.0 * 448.0 / 2) / powers) / 16;
  const double centre = std::sqrt(double{range.amax}) * std::sqrt(double{range.amin});
  const double scale = std::pow(range.amax / centre, k) / 448;
  for (int64_t i = 0; i < count; ++i) {
    const auto scaled = static_cast<float>(std::pow(std::abs(double{x[i]}) / centre, k) / scale);
    const double code = decode_e4m3(encode_e4m3(scaled));
    stored[i] = static_cast<float>(std::copysign(std::pow(code * scale, 1 / k) * centre, x[i]));
  }
}

// Pairs of formats beside those of kStoredFormats.
struct OtherPair {
  enum Which : uint8_t { kCoat, kTensorScales, kFirstAlone, kCount };
  static constexpr std::array<const char*, kCount> kNames = {
      "E4M3 expanded by COAT's rules, both", "m in E4M3, v in fp16, each with one scale per parameter (FP8-LM)",
      "m in E4M3, v in bf16"};
};

// Not of kFirstAlone, whose first moment is that of kStoredFormats.
inline std::vector<float> stored_in_pair(OtherPair::Which pair, const std::vector<float>& values, bool is_second) {
  const auto N = static_cast<int64_t>(values.size());
  std::vector<float> stored(values.size());
  if (pair == OtherPair::kCoat) {
    for (int64_t first = 0; first < N; first += kMomentGroup) {
      store_as_coat(values.data() + first, std::min(kMomentGroup, N - first), stored.data() + first);
    }
    return stored;
  }
  const float largest = is_second ? 65504.0f : 448.0f, amax = range_of(values.data(), N).amax;
  const float scale = amax == 0 ? 1.0f : amax / largest;
  for (size_t n = 0; n < values.size(); ++n) {
    const float x = values[n] / scale;
    stored[n] = scale * (is_second ? decode_fp16(encode_fp16(std::min(x, largest))) : decode_e4m3(encode_e4m3(x)));
  }
  return stored;
}

// Sums over the elements of one or several parameter tensors.
struct UpdateErrors {
  static constexpr size_t kFormats = kStoredFormats.size();
  std::array<std::array<double, kFormats>, kFormats> squares{};  // of u' - u; [format of m][format of v]
  std::array<double, OtherPair::kCount> other_squares{};         // the same of other pairs
  double update_squares = 0;                                     // of u
  int64_t counted = 0;
  int64_t left_out = 0;  // elements whose v is exactly 0: parameters that have never had a gradient

  double mse(size_t first, size_t second) const { return squares[first][second] / static_cast<double>(counted); }
  double mse(OtherPair::Which pair) const { return other_squares[pair] / static_cast<double>(counted); }
  double mean_square() const { return update_squares / static_cast<double>(counted); }
  // Of the plain formats' error to that of the expanded ones: what range expansion is for.
  double gain() const { return mse(kPlainE4M3, kPlainE4M3) / mse(kExpandedE4M3, kExpandedE4M3); }

  void add(const UpdateErrors& other) {
    for (size_t i = 0; i < kFormats; ++i) {
      for (size_t j = 0; j < kFormats; ++j) squares[i][j] += other.squares[i][j];
    }
    for (size_t pair = 0; pair < other_squares.size(); ++pair) other_squares[pair] += other.other_squares[pair];
    update_squares += other.update_squares;
    counted += other.counted;
    left_out += other.left_out;
  }
};

// Of one parameter tensor with fp32 moments m and v.
inline UpdateErrors update_errors(Device& device, std::vector<float>& m, std::vector<float>& v, double eps) {
  PARKA_REQUIRE(m.size() == v.size());
  UpdateErrors errors;
  const auto direction = [&](float first, float second) { return first / (std::sqrt(double{second}) + eps); };
  std::array<std::vector<float>, UpdateErrors::kFormats> first, second;
  for (size_t f = 0; f < UpdateErrors::kFormats; ++f) {
    first[f] = stored_and_read(device, m, kStoredFormats[f], false);
    second[f] = stored_and_read(device, v, kStoredFormats[f], true);
  }
  std::array<std::vector<float>, OtherPair::kCount> other_first, other_second;
  for (const uint8_t pair : {OtherPair::kCoat, OtherPair::kTensorScales}) {
    other_first[pair] = stored_in_pair(OtherPair::Which{pair}, m, false);
    other_second[pair] = stored_in_pair(OtherPair::Which{pair}, v, true);
  }
  other_first[OtherPair::kFirstAlone] = first[kPlainE4M3];
  other_second[OtherPair::kFirstAlone].resize(v.size());
  std::ranges::transform(v, other_second[OtherPair::kFirstAlone].begin(),
                         [](float x) { return decode_bf16(encode_bf16(x)); });
  for (size_t n = 0; n < m.size(); ++n) {
    if (v[n] == 0) {
      ++errors.left_out;
      continue;
    }
    ++errors.counted;
    const double u = direction(m[n], v[n]);
    errors.update_squares += u * u;
    for (size_t pair = 0; pair < OtherPair::kCount; ++pair) {
      const double error = direction(other_first[pair][n], other_second[pair][n]) - u;
      errors.other_squares[pair] += error * error;
    }
    for (size_t j = 0; j < UpdateErrors::kFormats; ++j) {
      const double inverse = direction(1.0f, second[j][n]);
      for (size_t i = 0; i < UpdateErrors::kFormats; ++i) {
        const double error = first[i][n] * inverse - u;
        errors.squares[i][j] += error * error;
      }
    }
  }
  return errors;
}

}  // namespace parka::bench
