#include <bit>
#include <limits>
#include <string>

#include "tests/kernels/float8_devices.h"
#include "tests/kernels/moment_fixtures.h"

// FP8 optimizer states on every other device against the CPU. Storing a moment is defined operation by operation
// (ops/optimizer/adamw.h, kernels/cpu/math/log2_exp2.h): bits are equal. Reading one back takes a root, good to
// decode_error(). So a step from a state of zeros gives the CPU's bits; later ones are near them, and are made of
// the same parts, which test_adamw.cpp checks on every device. Without another device there is nothing to compare.
using namespace parka;
using namespace parka::test;

namespace {

const std::vector<int64_t> kSizes = {1, 3, 127, 128, 129, 1000, 4096, 100003};

// The moments in fp8, without and with range expansion.
const std::vector<std::pair<MomentStorage, MomentStorage>> kMoments = {
    {{DType::kE4M3, false}, {DType::kE4M3, false}}, {{DType::kE4M3, true}, {DType::kE4M3, true}}};

std::vector<Storage> float8_storages() {
  std::vector<Storage> storages;
  for (const MasterForm master : kMasterForms) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) {
      for (const auto& [exp_avg, exp_avg_sq] : kMoments)
        storages.push_back({master, exp_avg, exp_avg_sq, gradient});
    }
  }
  return storages;
}

std::string describe(const MomentStorage& s) {
  return std::string(name_of(s.format)) + (s.expanded ? " expanded" : "");
}
std::string describe(const Storage& s) {
  return "master form " + std::to_string(static_cast<int>(s.master)) + ", m " + describe(s.exp_avg) + ", v " +
         describe(s.exp_avg_sq) + ", gradient " + std::string(name_of(s.gradient));
}

// Gradients of many magnitudes, with groups of zeros, of one magnitude, and of tiny numbers, as bf16.
std::vector<float> varied_gradient(int64_t count, int64_t t) {
  std::vector<float> g = gradient_at(count, t);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = i / kMomentGroup % 8;
    if (kind == 2) g[i] = 0;
    if (kind == 4) g[i] = i % 2 == 0 ? 0.0078125f : -0.0078125f;
    if (kind == 5) g[i] = std::ldexp(g[i], -60);
    if (kind == 6) g[i] = std::ldexp(g[i], static_cast<int>(i % 59) - 40);
    if (kind == 7 && i % kMomentGroup != 5) g[i] = 0;  // one member alone
    g[i] = decode_bf16(encode_bf16(g[i]));
  }
  return g;
}

std::string first_difference(const std::string& name, const TestMoment& got, const TestMoment& want) {
  if (!got.guard_intact()) return name + ": written outside";
  std::string difference = first_difference("amax of " + name, got.amax, want.amax);
  if (difference.empty()) difference = first_difference("exponent of " + name, got.exponent, want.exponent);
  return difference.empty() ? first_difference(name, got.values, want.values) : difference;
}

std::string first_difference(const TestParameter& got, const TestParameter& want) {
  if (!got.guard_intact()) return "written outside";
  std::string difference = first_difference("exp_avg", got.exp_avg, want.exp_avg);
  if (difference.empty()) difference = first_difference("exp_avg_sq", got.exp_avg_sq, want.exp_avg_sq);
  if (difference.empty() && got.master) difference = first_difference("master", *got.master, *want.master);
  return difference.empty() ? first_difference("weight", got.weight, want.weight) : difference;
}

// Makes the state of a parameter that of another on any device.
void copy_state(const TestParameter& from, Device& device, const TestParameter& to) {
  copy_bits(from.weight, device, to.weight);
  if (from.master) copy_bits(*from.master, device, *to.master);
  for (const auto& [a, b] : {std::pair{&from.exp_avg, &to.exp_avg}, {&from.exp_avg_sq, &to.exp_avg_sq}}) {
    copy_bits(a->values, device, b->values);
    copy_bits(a->amax, device, b->amax);
    copy_bits(a->exponent, device, b->exponent);
  }
}

// The contents that a group is stored from: what a hazard is made of, ragged tails, and ordinary numbers.
std::vector<std::vector<float>> moment_contents() {
  std::vector<std::vector<float>> contents;
  for (const int64_t N : kSizes) contents.push_back(log_uniform(N, 1e-9, 300.0, 301));
  for (const double ratio : {1.0, 1.0000002, 1.2, 2.0, 8.0, 100.0, 3e4, 1e9, 1e30}) {
    contents.push_back(log_uniform(40 * kMomentGroup + 17, 1e-12, ratio, 302));
  }
  for (const double smallest : {1e-45, 1e-40, 1e-36, 1e-33, 1e-30, 1e-28, 1e20, 1e36}) {
    contents.push_back(log_uniform(3 * kMomentGroup + 1, smallest, 90.0, 303));
  }
  contents.push_back(std::vector<float>(300));
  contents.push_back(std::vector<float>(300, -0.0f));
  contents.push_back({0.0f, -0.0f, 1.0f, -0.5f, -1e-20f, std::numeric_limits<float>::denorm_min()});
  std::vector<float> sparse = log_uniform(9 * kMomentGroup, 1e-8, 1e3, 304);
  for (size_t i = 0; i < sparse.size(); ++i)
    sparse[i] = philox4x32(305, 0, i)[0] % (1 + i / kMomentGroup) ? 0 : sparse[i];
  contents.push_back(sparse);
  contents.push_back(random_normal(100 * kMomentGroup, 306, 1e-4f));
  return contents;
}

// A decoded moment on two devices: the first element that is further apart than reading may be.
std::string first_far(const std::vector<float>& got, const std::vector<float>& want, double relative) {
  for (size_t i = 0; i < want.size(); ++i) {
    const bool is_near = std::abs(double{got[i]} - want[i]) <= relative * std::abs(double{want[i]});
    if (is_near && std::signbit(got[i]) == std::signbit(want[i])) continue;
    return "element " + std::to_string(i) + " decodes to " + std::to_string(got[i]) + " (" +
           hexadecimal(reinterpret_cast<const std::byte*>(&got[i]), 4) + "), not " + std::to_string(want[i]) +
           " (" + hexadecimal(reinterpret_cast<const std::byte*>(&want[i]), 4) + ")";
  }
  return "";
}

}  // namespace

TEST_CASE("another device stores fp8 moments with the CPU's bits and reads them", "[kernels][moments][devices]") {
  for (Device* device : other_devices()) {
    const std::vector<std::vector<float>> all = moment_contents();
    for (size_t content = 0; content < all.size(); ++content) {
      for (const MomentStorage& storage : kFloat8Storages) {
        for (const bool is_second : {false, true}) {
          const auto N = static_cast<int64_t>(all[content].size());
          const std::vector<float> x = is_second ? all[content] : with_random_signs(all[content], 307);
          const TestMoment want(cpu_device(), storage, N), got(*device, storage, N);
          const TestTensor x_here(cpu_device(), DType::kF32, {N}, x), x_there(*device, DType::kF32, {N}, x);
          moment_encode(cpu_device(), {x_here, want.view(), is_second});
          moment_encode(*device, {x_there, got.view(), is_second});
          CAPTURE(content, N, describe(storage), is_second);
          CHECK(first_difference("moment", got, want) == "");

          // Read from the CPU's bits, so that one error is not shown twice.
          const TestTensor values(cpu_device(), DType::kF32, {N}), values_there(*device, DType::kF32, {N});
          copy_bits(want.values, *device, got.values);
          copy_bits(want.amax, *device, got.amax);
          if (storage.expanded) copy_bits(want.exponent, *device, got.exponent);
          moment_decode(cpu_device(), {want.view(), values});
          moment_decode(*device, {got.view(), values_there});
          CHECK(first_far(values_there.host(), values.host(), decode_error(*device)) == "");
          CHECK((values_there.guard_intact() && x_there.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("another device finds the CPU's exponents of range expansion", "[kernels][moments][devices]") {
  // Groups of two magnitudes: the exponent is a step function of their ratio, and the ratios lie close to its
  // steps, too: 2^(16 log2(R) / e) for whole e, and the next numbers.
  for (Device* device : other_devices()) {
    constexpr double kRange = 448.0 * 448.0 / 2;
    std::vector<float> x;
    for (int exponent = 16; exponent <= 256; ++exponent) {
      const auto ratio = static_cast<float>(std::pow(kRange, 16.0 / exponent));
      for (const float r :
           {std::nextafter(ratio, 0.0f), ratio, std::nextafter(ratio, INFINITY), ratio * 1.00001f}) {
        for (int64_t i = 0; i < kMomentGroup; ++i) x.push_back(i % 3 == 1 ? 1.7e-5f : 1.7e-5f * r);
      }
    }
    const StoredMoment want = store_and_read(cpu_device(), x, {DType::kE4M3, true}, false);
    const StoredMoment got = store_and_read(*device, x, {DType::kE4M3, true}, false);
    int64_t wrong = 0;
    for (size_t g = 0; g < want.exponent.size(); ++g) {
      if (got.exponent[g] == want.exponent[g]) continue;
      if (wrong++ == 0) {
        UNSCOPED_INFO("group " << g << " of ratio " << x[g * kMomentGroup] / x[g * kMomentGroup + 1] << ": "
                               << int{got.exponent[g]} << ", not " << int{want.exponent[g]});
      }
    }
    CHECK(wrong == 0);
    CHECK(got.codes == want.codes);
  }
}

TEST_CASE("another device's first step with fp8 states gives the CPU's bits", "[kernels][adamw][devices]") {
  constexpr uint64_t kFirst = (uint64_t{1} << 34) + 256;
  for (Device* device : other_devices()) {
    for (const int64_t N : kSizes) {
      const std::vector<float> initial = random_normal(N, 311, 0.02f);
      for (const Storage& storage : float8_storages()) {
        TestParameter want(cpu_device(), storage, initial), got(*device, storage, initial),
            again(*device, storage, initial);
        for (TestParameter* parameter : {&want, &got, &again}) {
          parameter->step(varied_gradient(N, 1), {}, 1, 0.37f, kFirst);
        }
        CAPTURE(N, describe(storage));
        CHECK(first_difference(got, want) == "");
        CHECK(first_difference(again, got) == "");
      }
    }
  }
}

namespace {

// How far two stored moments may be apart, decoded, if what they were stored from differs in the last bits: by one
// code. They are 1/8 of the lower apart, or a smallest code near zero. A bf16 moment is read
// exactly, and has the same bits.
struct MomentDistance {
  int64_t far = 0, different = 0;  // elements

  MomentDistance(const TestMoment& got, const TestMoment& want, const MomentStorage& storage) {
    const int64_t N = want.values.view().numel();
    const TestMoment got_here(cpu_device(), storage, N);
    copy_bits(got.values, cpu_device(), got_here.values);
    copy_bits(got.amax, cpu_device(), got_here.amax);
    copy_bits(got.exponent, cpu_device(), got_here.exponent);
    const TestTensor a(cpu_device(), DType::kF32, {N}), b(cpu_device(), DType::kF32, {N});
    moment_decode(cpu_device(), {got_here.view(), a});
    moment_decode(cpu_device(), {want.view(), b});
    const std::vector<float> x = a.host(), y = b.host(), amax = want.amax.host();
    if (!is_float8(storage.format)) {
      for (size_t i = 0; i < x.size(); ++i) far += std::bit_cast<uint32_t>(x[i]) != std::bit_cast<uint32_t>(y[i]);
      return;
    }
    const Float8Traits& traits = float8_traits(storage.format);
    for (int64_t i = 0; i < N; ++i) {
      const double difference = std::abs(double{x[i]} - y[i]);
      const double magnitude = std::max(std::abs(double{x[i]}), std::abs(double{y[i]}));
      const double smallest = double{amax[i / kMomentGroup]} * traits.min_subnormal / traits.max;
      far += !(difference <= std::ldexp(1.01 * magnitude, -traits.mantissa_bits) + 1.01 * smallest);
      different += !(difference <= 0x1p-14 * magnitude);
    }
  }
};

}  // namespace

TEST_CASE("another device's later steps with fp8 states stay near the CPU's", "[kernels][adamw][devices]") {
  for (Device* device : other_devices()) {
    for (const int64_t N : {1, 129, 1000, 20000}) {
      const std::vector<float> initial = random_normal(N, 312, 0.02f);
      for (const Storage& storage : float8_storages()) {
        TestParameter want(cpu_device(), storage, initial), got(*device, storage, initial);
        for (int64_t t = 1; t <= 5; ++t) {
          // Each step from the state that the device has: codes that differ once would differ from then on.
          copy_state(got, cpu_device(), want);
          want.step(varied_gradient(N, t), {}, t);
          got.step(varied_gradient(N, t), {}, t);
          const std::vector<float> w = got.master_values(), want_w = want.master_values();
          int64_t far = 0;
          for (int64_t i = 0; i < N; ++i) {
            // An update is about lr; it is off by the errors of m and of the root of v. Rounding by a
            // draw or a phase may then fall on the other side.
            const double place = storage.master == MasterForm::kBf16Sr      ? 0x1p-7
                                 : storage.master == MasterForm::kFp24Split ? 0x1p-15
                                                                            : 0.0;
            const double bound = 4e-3 * 8 * decode_error(*device) + (0x1p-22 + place) * std::abs(want_w[i]);
            far += !(std::abs(double{w[i]} - want_w[i]) <= bound);
          }
          const MomentDistance m(got.exp_avg, want.exp_avg, storage.exp_avg);
          const MomentDistance v(got.exp_avg_sq, want.exp_avg_sq, storage.exp_avg_sq);
          CAPTURE(N, t, describe(storage), far, m.far, m.different, v.far, v.different);
          CHECK((far == 0 && m.far == 0 && v.far == 0));
          // Codes change where a value lies within the error of reading of the middle between two: 2^-18 of 2^-4;
          // or, for a whole group, where the exponent does.
          CHECK((m.different <= 2 * kMomentGroup + N / 100 && v.different <= 2 * kMomentGroup + N / 100));
          CHECK(got.guard_intact());
        }
      }
    }
  }
}

TEST_CASE("another device steps ranges of fp8 states as it steps the whole", "[kernels][adamw][devices]") {
  const int64_t N = 128 * 9 + 53;
  const std::vector<float> initial = random_bf16(N, 313, 0.02f);
  for (Device* device : other_devices()) {
    for (const Storage& storage : float8_storages()) {
      TestParameter whole(*device, storage, initial), parts(*device, storage, initial);
      for (int64_t t = 1; t <= 3; ++t) {
        const TestTensor gradient(*device, storage.gradient, {N}, varied_gradient(N, t));
        whole.step_range(gradient, {}, t, 0, N);
        parts.step_range(gradient, {}, t, 384, N);
        parts.step_range(gradient, {}, t, 0, 384);
      }
      CAPTURE(describe(storage));
      CHECK(first_difference(parts, whole) == "");
    }
  }
}

TEST_CASE("another device leaves fp8 states alone where grad_scale is not finite", "[kernels][adamw][devices]") {
  const int64_t N = 300;
  const std::vector<float> initial = random_normal(N, 314, 0.02f);
  for (Device* device : other_devices()) {
    for (const Storage& storage : float8_storages()) {
      for (const float bad : {NAN, INFINITY}) {
        TestParameter stepped(*device, storage, initial), stopped(*device, storage, initial);
        stepped.step(varied_gradient(N, 1), {}, 1);
        stopped.step(varied_gradient(N, 1), {}, 1);
        std::vector<float> gradient = varied_gradient(N, 2);
        gradient[200] = bad;
        stepped.step(gradient, {}, 2, bad);
        CAPTURE(describe(storage), bad);
        CHECK(first_difference(stepped, stopped) == "");
      }
    }
  }
}
