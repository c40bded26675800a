#include <limits>

#include "core/error.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/support/catch.h"

// Known ways in which FP8 optimizer states go wrong, one test each.
using namespace parka;
using namespace parka::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every device in turn: the test case runs once for each.
Device& any_device() { return *GENERATE(from_range(devices())); }

// Calls check(storage, is_second) for each way to store a moment.
template <typename Check>
void for_each_storage(Check check) {
  for (const MomentStorage& storage : kFloat8Storages) {
    for (bool is_second : {false, true}) {
      CAPTURE(storage.expanded, is_second);
      check(storage, is_second);
    }
  }
}

// The exit code of the Error that `action` throws; kOk if it throws none.
template <typename Action>
ExitCode error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::kOk;
}

}  // namespace

TEST_CASE("hazard: a group of one magnitude has an infinite exponent", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    int64_t wrong = 0;
    for (uint64_t n = 0; n < 200; ++n) {
      // Random constants, half of them rounded to bf16 as equal gradients are; whole groups and tails of one.
      float constant = std::exp(20.0f * static_cast<float>(philox_normal2(1, 0, n)[0]) - 20.0f);
      constant = std::max(constant, kSmallestMomentAmax);
      if (n % 2 == 0) constant = decode_bf16(encode_bf16_round_up(constant));
      std::vector<float> x(n % 3 == 0 ? 1 : n % 3 == 1 ? 128 : 129, constant);
      if (!is_second) x = with_random_signs(x, n);
      const StoredMoment stored = store_and_read(device, x, storage, is_second);
      wrong += !same_bits(stored.values, x) || !stored.guard_intact;
      for (uint8_t code : stored.codes) wrong += (code & 0x7fu) != kE4M3Traits.max_code;
      for (uint8_t exponent : stored.exponent) wrong += exponent != 16;
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("hazard: a nearly equal group has an exponent of millions", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    std::vector<float> x(kMomentGroup);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 0.7f + static_cast<float>(i) * 0x1p-24f;
    const StoredMoment stored = store_and_read(device, x, storage, is_second);
    int64_t wrong = 0;
    // 2^-20 of spread is far below a code's step, so all share the largest code: half a spread of error is lost.
    for (size_t i = 0; i < x.size(); ++i) wrong += !(std::abs(stored.values[i] - x[i]) <= 128 * 0x1p-24f);
    CHECK(wrong == 0);
    CHECK(stored.exponent[0] == (storage.expanded ? 255 : 16));
  });
}

TEST_CASE("hazard: a group of zeros decodes to 1e-30", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    const std::vector<float> zeros(300);
    const StoredMoment stored = store_and_read(device, zeros, storage, is_second);
    CHECK(same_bits(stored.values, zeros));
    CHECK(stored.codes == std::vector<uint8_t>(300));
    CHECK(same_bits(stored.amax, {0, 0, 0}));
  });
}

TEST_CASE("hazard: zeros in a group, at any place, disturb the minimum of the others", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    int64_t wrong = 0;
    for (int64_t place = -1; place < 2 * kMomentGroup; ++place) {  // -1: about half of all members, at random
      std::vector<float> x = log_uniform(2 * kMomentGroup, 1e-10, 50.0, 3);
      std::vector<float> others;
      for (int64_t i = 0; i < kMomentGroup; ++i) {
        const bool zero = place < 0 ? (philox4x32(4, 0, static_cast<uint64_t>(i))[0] & 1u) != 0 : i == place;
        if (zero) x[i] = 0;
        if (!zero) others.push_back(x[i]);
      }
      const StoredMoment with_zeros = store_and_read(device, x, storage, is_second);
      const StoredMoment without = store_and_read(device, others, storage, is_second);
      size_t n = 0;
      for (int64_t i = 0; i < kMomentGroup; ++i) {
        const float want = x[i] == 0 ? 0.0f : without.values[n];
        n += x[i] != 0;
        wrong += with_zeros.values[i] != want;
      }
      wrong += with_zeros.exponent[0] != without.exponent[0];
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("hazard: a zero taken as the minimum 1e-30 wastes the range of a small second moment",
          "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  std::vector<float> v = log_uniform(kMomentGroup, 2e-11, 5.0, 5);  // largest 1e-10
  v[0] = 0;
  const StoredMoment stored = store_and_read(device, v, {DType::kE4M3, true}, /*is_second=*/true);
  CHECK(rms_relative_error(stored.values, v) < 0.007);  // 11 % with that minimum
  CHECK(stored.exponent[0] > 100);
}

TEST_CASE("hazard: a nonzero second moment stored as zero explodes the update", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for (const MomentStorage& storage : kFloat8Storages) {
    CAPTURE(storage.expanded);
    std::vector<float> v = log_uniform(1000, 1e-30, 1e30, 6);
    for (size_t i = 0; i < v.size(); i += 10) v[i] = 0;
    v[1] = std::numeric_limits<float>::denorm_min();
    const StoredMoment second = store_and_read(device, v, storage, /*is_second=*/true);
    const StoredMoment first = store_and_read(device, v, storage, /*is_second=*/false);
    int64_t wrong = 0, lost = 0;
    for (size_t i = 0; i < v.size(); ++i) {
      wrong += (second.values[i] == 0) != (v[i] == 0);
      wrong += second.codes[i] != std::max<uint8_t>(first.codes[i], v[i] == 0 ? 0 : 1);
      lost += first.values[i] == 0 && v[i] != 0;
    }
    CHECK(wrong == 0);
    CHECK(lost > 0);  // the same numbers as a first moment do round to 0: the case is reached
  }
}

TEST_CASE("hazard: an additive floor flattens groups of tiny values", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    // Without a floor, scaling a group by a power of two changes its amax and nothing else.
    const auto x = log_uniform(kMomentGroup, 1.0, 200.0, 7);
    const StoredMoment want = store_and_read(device, x, storage, is_second);
    int64_t wrong = 0;
    for (int power = -90; power <= 110; power += 10) {
      std::vector<float> scaled = x;
      for (float& v : scaled) v = std::ldexp(v, power);
      const StoredMoment got = store_and_read(device, scaled, storage, is_second);
      wrong += got.codes != want.codes || got.exponent != want.exponent;
      for (size_t i = 0; i < x.size(); ++i) wrong += got.values[i] != std::ldexp(want.values[i], power);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("hazard: groups below the smallest amax, subnormals included, keep their order of magnitude",
          "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    const float smallest = kSmallestMomentAmax;
    int64_t wrong = 0;
    for (float largest :
         {0.99f * smallest, smallest * 0x1p-10f, 0x1p-130f, std::numeric_limits<float>::denorm_min()}) {
      const auto x = log_uniform(kMomentGroup, largest / 100.0, 100.0, 8);
      const StoredMoment stored = store_and_read(device, x, storage, is_second);
      wrong += stored.amax[0] != smallest && *std::max_element(x.begin(), x.end()) > 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const float value = stored.values[i];
        wrong += !(value == 0 || std::isnormal(value));
        wrong += is_second && (value == 0) != (x[i] == 0);
        // Half a step of the coarser format, or half its smallest value; a second moment may take the whole of it.
        wrong += !(std::abs(value - x[i]) <= std::max(x[i] / 8, 0x1.01p-126f));
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("hazard: a group wider than the format compresses everything to save its smallest",
          "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    constexpr Float8Traits traits = kE4M3Traits;
    const auto x = log_uniform(4 * kMomentGroup, 1e-20, 1e15, 9);
    const StoredMoment stored = store_and_read(device, x, storage, is_second);
    const double half_step = std::ldexp(1.0, -traits.mantissa_bits - 1);  // largest relative error of a normal code
    int64_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double smallest_normal = double{stored.amax[i / kMomentGroup]} * traits.min_normal / traits.max;
      if (x[i] >= smallest_normal) wrong += !(std::abs(stored.values[i] - x[i]) <= half_step * x[i]);
    }
    CHECK(wrong == 0);
    CHECK(stored.exponent == std::vector<uint8_t>(4, 16));
  });
}

TEST_CASE("hazard: the product of maximum and minimum leaves the range of fp32", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for (float largest : {2e-28f, 1e-25f, 1e25f, 3e38f}) {
    CAPTURE(largest);
    const auto x = log_uniform(kMomentGroup, largest / 30, 30.0, 10);
    CHECK(rms_relative_error(store_and_read(device, x, {DType::kE4M3, true}, true).values, x) < 0.013);
  }
}

TEST_CASE("hazard: a NaN or infinite moment is stored and poisons its group for ever", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    for (float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      std::vector<float> x(200, 1.0f);
      x[150] = bad;
      const TestTensor values(device, DType::kF32, {200}, x);
      const TestMoment moment(device, storage, 200, /*zeroed=*/true);
      const ExitCode code = error_of(
          [&] { moment_encode(device, {.values = values, .moment = moment.view(), .is_second = is_second}); });
      // Only the CPU can say so. What else becomes of the group is not promised.
      const bool is_cpu = device.kind() == DeviceKind::kCpu;
      CHECK(code == (is_cpu ? ExitCode::kInternal : ExitCode::kOk));
      CHECK(std::isfinite(moment.amax.host()[1]));
      if (is_cpu) CHECK(moment.amax.host()[1] == 0.0f);
      CHECK(moment.guard_intact());
    }
  });
}

TEST_CASE("hazard: codes that are not finite", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    int64_t wrong = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      auto x = log_uniform(777, 1e-6, seed % 2 == 0 ? 1.001 : 1e6, seed);
      if (!is_second) x = with_random_signs(x, seed);
      for (uint8_t code : store_and_read(device, x, storage, is_second).codes) {
        wrong += (code & 0x7fu) > kE4M3Traits.max_code;
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("hazard: the sign of zero", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    // Zeros of both signs; a negative that survives and one that rounds to zero as a first moment.
    const std::vector<float> x = {0.0f, -0.0f, 1.0f, -0.5f, -1e-20f};
    const StoredMoment stored = store_and_read(device, x, storage, is_second);
    CHECK(stored.codes[0] == 0);
    CHECK(stored.codes[1] == 0);
    CHECK(stored.codes[3] > 0x80);
    CHECK(stored.codes[4] == (is_second ? 0x81 : 0));
    CHECK(same_bits({stored.values[0], stored.values[1]}, {0.0f, 0.0f}));
    const std::vector<float> negative_zeros(5, -0.0f);
    CHECK(store_and_read(device, negative_zeros, storage, is_second).codes == std::vector<uint8_t>(5));
  });
}

TEST_CASE("hazard: the last, short group and tensors without elements", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for_each_storage([&](const MomentStorage& storage, bool is_second) {
    for (int64_t N : {0, 1, 127, 128, 129, 1000}) {
      CAPTURE(N);
      const auto x = log_uniform(N, 1e-9, 300.0, 12);
      const StoredMoment whole = store_and_read(device, x, storage, is_second);
      std::vector<float> group_by_group;
      for (int64_t begin = 0; begin < N; begin += kMomentGroup) {
        const std::vector<float> group(x.begin() + begin, x.begin() + std::min(begin + kMomentGroup, N));
        const auto alone = store_and_read(device, group, storage, is_second).values;
        group_by_group.insert(group_by_group.end(), alone.begin(), alone.end());
      }
      CHECK(same_bits(whole.values, group_by_group));
      CHECK(whole.guard_intact);
    }
  });
}

TEST_CASE("hazard: every thread adds its floor to the scale of a plain group", "[kernels][hazards]") {
  Device& device = any_device();
  CAPTURE(device.name());
  for (const MomentStorage& storage : kFloat8Storages) {
    const auto x = with_random_signs(log_uniform(3 * kMomentGroup, 1e-19, 10.0, 13), 14);
    const StoredMoment stored = store_and_read(device, x, storage, /*is_second=*/false);
    for (int64_t g = 0; g < 3; ++g) {
      float largest = 0;
      for (int64_t i = 0; i < kMomentGroup; ++i) largest = std::max(largest, std::abs(x[g * kMomentGroup + i]));
      CHECK(stored.amax[g] == largest);
    }
  }
}

TEST_CASE("hazard: moments of a wrong shape, dtype or layout are taken without a check", "[kernels][hazards]") {
  Device& device = cpu_device();
  const int64_t N = 130;
  const TestTensor values(device, DType::kF32, {N}, std::vector<float>(N, 1.0f)), bf16(device, DType::kBF16, {N});
  const TestTensor codes(device, DType::kE4M3, {N}), two(device, DType::kF32, {2}), one(device, DType::kF32, {1});
  const TestTensor two_bf16(device, DType::kBF16, {2}), exponent(device, DType::kU8, {2}),
      short_codes(device, DType::kE4M3, {N - 1});
  const TestTensor matrix(device, DType::kE4M3, {2, N / 2});
  const std::vector<MomentView> bad = {
      {codes, {}, {}},        // fp8 without amax
      {codes, one, {}},       // one group too few
      {codes, two_bf16, {}},  // scales are fp32, whatever the weights are
      {codes, two, two},      // the exponent is a byte
      {short_codes, two, exponent},
      {matrix, two, exponent},
      {exponent, two, exponent},  // not a float format
      {bf16, two, {}},            // bf16 has no groups
      {values, {}, exponent},
  };
  int wrong = 0;
  for (const MomentView& moment : bad) {
    wrong += error_of([&] { moment_encode(device, {values, moment, false}); }) != ExitCode::kInternal;
    wrong += error_of([&] { moment_decode(device, {moment, values}); }) != ExitCode::kInternal;
  }
  CHECK(wrong == 0);
  CHECK(error_of([&] { moment_encode(device, {bf16, {codes, two, exponent}, false}); }) == ExitCode::kInternal);
  CHECK(error_of([&] { moment_encode(device, {values, {codes, two, exponent}, false}); }) == ExitCode::kOk);
}
