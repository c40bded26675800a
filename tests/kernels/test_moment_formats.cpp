#include "bench/quantization_error.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/support/catch.h"

// The FP8 formats of the moments: what encode and decode promise. Their hazards are in test_moment_hazards.cpp.
using namespace parka;
using namespace parka::test;

namespace {

// The code of a non-negative number.
uint8_t nearest_code(double magnitude) { return encode_e4m3(static_cast<float>(magnitude)).bits; }

}  // namespace

TEST_CASE("range_expansion_exponent is floor(16 log2(R) / log2(amax / amin)) within 16..255",
          "[kernels][moments]") {
  struct Case {
    float amax, amin;
    int want;
  };
  const std::vector<Case> cases = {
      {1.0f, 0.5f, 255},   // 265 without the clamp
      {4.0f, 1.0f, 132},   // 16 * 16.6147 / 2
      {316.0f, 1.0f, 32},  // 316^2 is just below R = 100352
      {317.0f, 1.0f, 31},
      {100352.0f, 1.0f, 16},  // exactly R
      {94000.0f, 1.0f, 16},
      {1e6f, 1.0f, 16},                 // wider than R: never below k = 1
      {3e38f, 1e-45f, 16},              // the ratio is beyond fp32
      {1.0f, 0.99999994f, 255},         // one unit in the last place apart
      {1.0491395f, 0.506443739f, 253},  // 253.000008, but 252 from the fp32 ratio
      {7.0f, 7.0f, 16},
      {0.0f, 0.0f, 16},
  };
  std::vector<int> got, want;
  for (const Case& c : cases) {
    got.push_back(range_expansion_exponent(c.amax, c.amin));
    want.push_back(c.want);
  }
  CHECK(got == want);
}

TEST_CASE("every code of every exponent decodes to amax (q / max)^(1 / k)", "[kernels][moments]") {
  constexpr int64_t kCodes = 128;      // one group holds all magnitudes
  constexpr int64_t kExponents = 240;  // 16..255
  for (Device* device : devices()) {
    std::vector<float> amax(kExponents), exponents(kExponents), codes;
    for (int e = 0; e < kExponents; ++e) {
      exponents[e] = static_cast<float>(e + 16);
      amax[e] = 0.3f * static_cast<float>(e + 1);
      for (int code = 0; code < kCodes; ++code) {
        const int magnitude = std::min(code, int{kE4M3Traits.max_code});
        codes.push_back(decode_e4m3({static_cast<uint8_t>(magnitude | (code % 2 == 0 ? 0 : 0x80))}));
      }
    }
    const TestTensor values(*device, DType::kE4M3, {kExponents * kCodes}, codes),
        scale(*device, DType::kF32, {kExponents}, amax), exponent(*device, DType::kU8, {kExponents}, exponents),
        out(*device, DType::kF32, {kExponents * kCodes});
    moment_decode(*device, {.moment = {values, scale, exponent}, .values = out});
    const std::vector<float> decoded = out.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < kExponents * kCodes; ++i) {
      const double k = exponents[i / kCodes] / 16.0, q = std::abs(double{codes[i]});
      const double want = amax[i / kCodes] * std::pow(q / kE4M3Traits.max, 1 / k);
      wrong += !(std::abs(std::abs(decoded[i]) - want) <= decode_error(*device) * want);
      wrong += q != 0 && std::signbit(decoded[i]) != std::signbit(codes[i]);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("codes equal those of a computation in double, but for 2^-18 around rounding boundaries",
          "[kernels][moments]") {
  for (Device* device : devices()) {
    for (const MomentStorage& storage : kFloat8Storages) {
      const double max = kE4M3Traits.max;
      int64_t outside = 0, different = 0, total = 0;
      for (double ratio : {1.2, 2.0, 8.0, 100.0, 3e4, 1e9}) {
        const auto x = with_random_signs(log_uniform(64 * kMomentGroup, 1e-7, ratio, 21), 22);
        const StoredMoment stored = store_and_read(*device, x, storage, /*is_second=*/false);
        for (size_t i = 0; i < x.size(); ++i) {
          const size_t group = i / kMomentGroup;
          const double fraction = std::abs(double{x[i]}) / stored.amax[group];
          const double exact = max * std::pow(fraction, stored.exponent[group] / 16.0);
          const uint8_t code = stored.codes[i] & 0x7fu;
          outside += code < nearest_code(exact * (1 - 0x1p-18)) || code > nearest_code(exact * (1 + 0x1p-18));
          different += code != nearest_code(exact);
          outside += code != 0 && (stored.codes[i] >> 7 != 0) != std::signbit(x[i]);
        }
        total += static_cast<int64_t>(x.size());
      }
      CAPTURE(storage.expanded, different, total);
      CHECK(outside == 0);
      CHECK(different <= total / 2000);
    }
  }
}

TEST_CASE("the largest member of a group is stored exactly and the smallest survives expansion",
          "[kernels][moments]") {
  for (Device* device : devices()) {
    int64_t wrong = 0;
    for (double ratio : {1.5, 10.0, 1e3, 9e4}) {
      const auto x = with_random_signs(log_uniform(40 * kMomentGroup + 17, 3e-9, ratio, 31), 32);
      const StoredMoment stored = store_and_read(*device, x, {DType::kE4M3, true}, /*is_second=*/false);
      for (size_t begin = 0; begin < x.size(); begin += kMomentGroup) {
        const size_t end = std::min(begin + kMomentGroup, x.size());
        const auto smaller = [](float a, float b) { return std::abs(a) < std::abs(b); };
        const size_t largest =
            static_cast<size_t>(std::max_element(x.begin() + begin, x.begin() + end, smaller) - x.begin());
        wrong += stored.values[largest] != x[largest];
        wrong += stored.amax[begin / kMomentGroup] != std::abs(x[largest]);
        for (size_t i = begin; i < end; ++i) wrong += (stored.codes[i] & 0x7fu) < 2;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("exponent 16 stores exactly what plain fp8 stores", "[kernels][moments]") {
  for (Device* device : devices()) {
    const auto x = with_random_signs(log_uniform(8 * kMomentGroup, 1e-12, 1e12, 41), 42);
    const StoredMoment plain = store_and_read(*device, x, {DType::kE4M3, false}, false);
    const StoredMoment expanded = store_and_read(*device, x, {DType::kE4M3, true}, false);
    REQUIRE(expanded.exponent == std::vector<uint8_t>(8, 16));
    CHECK(plain.codes == expanded.codes);
    CHECK(same_bits(plain.values, expanded.values));
  }
}

TEST_CASE("plain fp32 and bf16 moments are rounded to nearest and have no groups", "[kernels][moments]") {
  for (Device* device : devices()) {
    const std::vector<float> x = random_normal(300, 51);
    CHECK(same_bits(store_and_read(*device, x, {DType::kF32}, true).values, x));
    std::vector<float> rounded = x;
    for (float& v : rounded) v = decode_bf16(encode_bf16(v));
    CHECK(same_bits(store_and_read(*device, x, {DType::kBF16}, true).values, rounded));
  }
}

TEST_CASE("a zeroed moment reads as zeros", "[kernels][moments]") {
  for (Device* device : devices()) {
    for (const MomentStorage& storage : kFloat8Storages) {
      const TestMoment moment(*device, storage, 200, /*zeroed=*/true);
      const TestTensor out(*device, DType::kF32, {200});
      moment_decode(*device, {.moment = moment.view(), .values = out});
      CHECK(same_bits(out.host(), std::vector<float>(200)));
    }
  }
}

// Figures of the study that range expansion was chosen by: root mean square of the relative error, E4M3.
TEST_CASE("range expansion reaches the published errors", "[kernels][moments]") {
  struct Figure {
    double plain, expanded;  // rms relative error in percent, or normalised MSE
  };
  const std::vector<Figure> want = {{2.67, 0.17}, {2.67, 0.66}, {2.65, 1.06},     {2.65, 2.09},
                                    {2.63, 2.79}, {37, 37},     {6.6e-4, 2.1e-4}, {6.9e-4, 1.6e-5}};
  const auto contents = bench::all_group_contents();
  REQUIRE(contents.size() == want.size());
  Device& device = cpu_device();
  int wrong = 0;
  for (size_t i = 0; i < contents.size(); ++i) {
    const bool is_relative = contents[i].kind == bench::GroupContent::Kind::kLogUniform;
    const auto figure = [&](bool expanded) {
      const auto error = bench::quantization_error(device, contents[i], expanded, 250);
      return is_relative ? 100 * error.rms_relative : error.normalised_mse;
    };
    const double plain = figure(false), expanded = figure(true);
    wrong += !(std::abs(plain - want[i].plain) <= 0.04 * want[i].plain);
    wrong += !(std::abs(expanded - want[i].expanded) <= 0.04 * want[i].expanded);
    UNSCOPED_INFO(contents[i].name << ": plain " << plain << ", expanded " << expanded);
  }
  CHECK(wrong == 0);
}
