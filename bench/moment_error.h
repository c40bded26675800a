#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/dynamic_float8.h"
#include "core/error.h"
#include "core/parallel.h"
#include "kernels/device/device.h"

// How far Adam's direction u = m / (sqrt(v) + eps) moves when m and v are stored in 8 bits. Used by the benchmark
// of the same name and by its test.
namespace parka::bench {

struct StoredFormat {
  const char* name;
  enum class Kind : uint8_t { kE4M3, kE5M2, kDynamic } kind;
  bool expanded;
};

inline constexpr std::array<StoredFormat, 6> kStoredFormats = {{
    {"E4M3", StoredFormat::Kind::kE4M3, false},
    {"E4M3 expanded", StoredFormat::Kind::kE4M3, true},
    {"E5M2", StoredFormat::Kind::kE5M2, false},
    {"E5M2 expanded", StoredFormat::Kind::kE5M2, true},
    {"DE8", StoredFormat::Kind::kDynamic, false},
    {"DE8 expanded", StoredFormat::Kind::kDynamic, true},
}};
inline constexpr size_t kPlainE4M3 = 0, kExpandedE4M3 = 1, kDE8 = 4;  // in kStoredFormats

// What a moment's values are once they were stored in groups of 128 and read back. E4M3 and E5M2 go through the
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
  const DType dtype = format.kind == StoredFormat::Kind::kE4M3 ? DType::kE4M3 : DType::kE5M2;
  std::vector<uint8_t> codes(values.size()), exponent(static_cast<size_t>(groups));
  std::vector<float> amax(static_cast<size_t>(groups));
  MomentView moment{{codes.data(), dtype, {N}}, {amax.data(), DType::kF32, {groups}}, {}};
  if (format.expanded) moment.exponent = {exponent.data(), DType::kU8, {groups}};
  const TensorView in(values.data(), DType::kF32, {N}), out(stored.data(), DType::kF32, {N});
  moment_encode(device, {.values = in, .moment = moment, .is_second = is_second});
  moment_decode(device, {.moment = moment, .values = out});
  return stored;
}

// Sums over the elements of one or several parameter tensors.
struct UpdateErrors {
  static constexpr size_t kFormats = kStoredFormats.size();
  std::array<std::array<double, kFormats>, kFormats> squares{};  // of u' - u; [format of m][format of v]
  double update_squares = 0;                                     // of u
  int64_t counted = 0;
  int64_t left_out = 0;  // elements whose v is exactly 0: parameters that have never had a gradient

  double mse(size_t first, size_t second) const { return squares[first][second] / static_cast<double>(counted); }
  double mean_square() const { return update_squares / static_cast<double>(counted); }
  // Of the plain formats' error to that of the expanded ones: what range expansion is for.
  double gain() const { return mse(kPlainE4M3, kPlainE4M3) / mse(kExpandedE4M3, kExpandedE4M3); }

  void add(const UpdateErrors& other) {
    for (size_t i = 0; i < kFormats; ++i) {
      for (size_t j = 0; j < kFormats; ++j) squares[i][j] += other.squares[i][j];
    }
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
  for (size_t n = 0; n < m.size(); ++n) {
    if (v[n] == 0) {
      ++errors.left_out;
      continue;
    }
    ++errors.counted;
    const double u = direction(m[n], v[n]);
    errors.update_squares += u * u;
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
