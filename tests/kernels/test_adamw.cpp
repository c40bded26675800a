#include <functional>
#include <limits>

#include "core/error.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// Every master form with fp32 and bf16 moments, and both kinds of fp8 moments.
std::vector<Storage> all_storages() {
  std::vector<Storage> storages;
  for (MasterForm master : kMasterForms) {
    storages.push_back({master, {DType::kF32}, {DType::kF32}});
    storages.push_back({master, {DType::kBF16}, {DType::kBF16}, DType::kBF16});
    storages.push_back({master, {DType::kE4M3, false}, {DType::kE4M3, false}});
    storages.push_back({master, {DType::kE4M3, true}, {DType::kE4M3, true}, DType::kBF16});
  }
  return storages;
}

// Every kind of kernel that a device may have: both gradients, moments with and without expansion.
std::vector<Storage> storages_of_all_kernels() {
  const std::vector<std::pair<MomentStorage, MomentStorage>> moments = {
      {{DType::kF32}, {DType::kF32}},
      {{DType::kBF16}, {DType::kBF16}},
      {{DType::kE4M3, false}, {DType::kE4M3, false}},
      {{DType::kE4M3, true}, {DType::kE4M3, true}}};
  std::vector<Storage> storages;
  for (const MasterForm master : kMasterForms) {
    for (const DType gradient : {DType::kF32, DType::kBF16}) {
      for (const auto& [exp_avg, exp_avg_sq] : moments) storages.push_back({master, exp_avg, exp_avg_sq, gradient});
    }
  }
  return storages;
}

// The largest magnitude of elements [begin, N) of the weights as they are stored. NaN is less than nothing.
float largest_weight(const TestParameter& parameter, int64_t begin = 0) {
  float largest = 0;
  const std::vector<float> weights = parameter.weight.host();
  for (size_t i = static_cast<size_t>(begin); i < weights.size(); ++i) {
    largest = std::max(largest, std::abs(weights[i]));
  }
  return largest;
}

void set_weight_amax(Device& device, TestParameter& parameter, float value) {
  parameter.weight_amax =
      std::make_unique<TestTensor>(device, DType::kF32, std::initializer_list<int64_t>{1}, std::vector{value});
}

// torch.optim.AdamW's single-tensor update, in double.
struct ReferenceAdamw {
  std::vector<double> w, m, v;

  explicit ReferenceAdamw(const std::vector<float>& initial)
      : w(initial.begin(), initial.end()), m(initial.size()), v(initial.size()) {}

  void step(const std::vector<float>& gradient, const Hyperparameters& h, int64_t t) {
    const double bias1 = 1 - std::pow(h.beta1, static_cast<double>(t));
    const double bias2 = 1 - std::pow(h.beta2, static_cast<double>(t));
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = gradient[i];
      w[i] *= 1 - h.lr * h.weight_decay;
      m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
      v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
      w[i] -= h.lr / bias1 * m[i] / (std::sqrt(v[i]) / std::sqrt(bias2) + h.eps);
    }
  }
};

}  // namespace

TEST_CASE("adamw_step with fp32 states follows AdamW in double for hundreds of steps", "[kernels][adamw]") {
  const auto h =
      GENERATE(Hyperparameters{}, Hyperparameters{.beta2 = 0.999}, Hyperparameters{.eps = 1e-5},
               Hyperparameters{.lr = 3e-2, .weight_decay = 0}, Hyperparameters{.beta1 = 0, .beta2 = 0.5});
  const int64_t N = 300;
  for (Device* device : devices()) {
    const std::vector<float> initial = random_normal(N, 5, 0.02f);
    TestParameter parameter(*device, {}, initial);
    ReferenceAdamw want(initial);
    std::vector<double> largest_w(N);  // rounding errors of w are made at the size that it has at the time
    for (int64_t t = 1; t <= 400; ++t) {
      const std::vector<float> gradient = gradient_at(N, t);
      parameter.step(gradient, h, t);
      want.step(gradient, h, t);
      for (int64_t i = 0; i < N; ++i) largest_w[i] = std::max(largest_w[i], std::abs(want.w[i]));
    }
    const std::vector<float> w = parameter.weight.host();
    const std::vector<float> m = parameter.exp_avg.values.host(), v = parameter.exp_avg_sq.values.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < N; ++i) {
      wrong += !(std::abs(w[i] - want.w[i]) <= 2e-6 * largest_w[i]);
      wrong += !(std::abs(m[i] - want.m[i]) <= 5e-7 * std::sqrt(want.v[i]));
      wrong += !(std::abs(v[i] - want.v[i]) <= 2e-6 * want.v[i]);
    }
    CAPTURE(h.lr, h.beta1, h.beta2, h.eps);
    CHECK(wrong == 0);
    CHECK(parameter.guard_intact());
  }
}

TEST_CASE("a BF16 gradient gives what the same values in fp32 give", "[kernels][adamw][hazards]") {
  const std::vector<float> initial = random_normal(257, 5, 0.02f);
  for (Device* device : devices()) {
    TestParameter fp32(*device, {.gradient = DType::kF32}, initial),
        bf16(*device, {.gradient = DType::kBF16}, initial);
    for (int64_t t = 1; t <= 3; ++t) {
      fp32.step(gradient_at(257, t), {}, t);
      bf16.step(gradient_at(257, t), {}, t);
    }
    CHECK(fp32.same_bits(bf16));
  }
}

TEST_CASE("an fp32 master in two parts trains bit for bit as fp32 weights do", "[kernels][adamw]") {
  const int64_t N = 1000;
  const std::vector<float> initial = random_normal(N, 6, 0.02f);
  for (Device* device : devices()) {
    for (const MomentStorage& storage : {MomentStorage{DType::kF32}, MomentStorage{DType::kE4M3, true}}) {
      TestParameter split(*device, {MasterForm::kFp32, storage, storage}, initial);
      TestParameter fp32(*device, {MasterForm::kNone, storage, storage}, initial);
      int64_t wrong = 0;
      for (int64_t t = 1; t <= 150; ++t) {
        for (TestParameter* parameter : {&split, &fp32}) parameter->step(gradient_at(N, t), {}, t);
        wrong += !same_bits(split.master_values(), fp32.master_values());
      }
      const std::vector<float> master = split.master_values(), weight = split.weight.host();
      for (int64_t i = 0; i < N; ++i) wrong += weight[i] != decode_bf16(split_float(master[i]).weight);
      CHECK(wrong == 0);
      CHECK(!same_bits(master, initial));
    }
  }
}

TEST_CASE("bf16_sr rounds with the draw of the element's place in the flat parameter space", "[kernels][adamw]") {
  const int64_t N = 301;
  const uint64_t first_element = (uint64_t{1} << 33) + 640;
  const std::vector<float> initial = random_bf16(N, 7, 0.02f);
  for (Device* device : devices()) {
    TestParameter rounded(*device, {MasterForm::kBf16Sr}, initial), exact(*device, {MasterForm::kNone}, initial);
    const int64_t t = (int64_t{1} << 40) + 3;
    rounded.step(gradient_at(N, 1), {}, t, 1.0f, first_element);
    exact.step(gradient_at(N, 1), {}, t, 1.0f, first_element);
    const std::vector<float> got = rounded.weight.host(), target = exact.weight.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < N; ++i) {
      const uint64_t e = first_element + static_cast<uint64_t>(i);
      const uint32_t random = philox4x32(77, static_cast<uint64_t>(t), e / 4)[e % 4];
      wrong += got[i] != decode_bf16(encode_bf16_stochastic(target[i], random));
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("bf16_sr follows the fp32 weight where rounding to nearest would stand still", "[kernels][adamw]") {
  const int64_t N = 2000, steps = 300;
  const std::vector<float> initial(N, 1.0f);
  // lr = 1e-4 is 1/39 of a bfloat16 step below 1, and every update is a full lr.
  const Hyperparameters h{.lr = 1e-4, .weight_decay = 0};
  TestParameter parameter(*devices().front(), {MasterForm::kBf16Sr}, initial);
  for (int64_t t = 1; t <= steps; ++t) parameter.step(std::vector<float>(N, 0.5f), h, t);
  double mean = 0;
  for (float w : parameter.weight.host()) mean += w / static_cast<double>(N);
  // Standard error of the mean: sqrt(300 * 1e-4 * 2^-8 / 2000) = 2.4e-4.
  CHECK(std::abs(mean - (1 - 1e-4 * steps)) < 1e-3);
}

TEST_CASE("fp24_split masters are the fp32 update, rounded by the step and the element's place",
          "[kernels][adamw]") {
  for (Device* device : devices()) {
    for (const MomentStorage& storage : {MomentStorage{DType::kF32}, MomentStorage{DType::kE4M3, true}}) {
      for (const int64_t N : {1, 127, 128, 301, 1000}) {
        const uint64_t first_element = (uint64_t{1} << 33) + 128 * static_cast<uint64_t>(N);
        TestParameter rounded(*device, {MasterForm::kFp24Split, storage, storage}, random_normal(N, 17, 0.02f));
        int64_t wrong = 0;
        for (const int64_t t : {int64_t{1}, int64_t{2}, (int64_t{1} << 40) + 3}) {
          TestParameter exact(*device, {MasterForm::kNone, storage, storage}, rounded.master_values());
          exact.exp_avg.copy_from(*device, rounded.exp_avg);
          exact.exp_avg_sq.copy_from(*device, rounded.exp_avg_sq);
          for (TestParameter* parameter : {&rounded, &exact}) {
            parameter->step(gradient_at(N, t), {}, t, 1.0f, first_element);
          }
          const std::vector<float> got = rounded.master_values(), weight = rounded.weight.host();
          const std::vector<float> target = exact.weight.host();
          for (int64_t i = 0; i < N; ++i) {
            const uint64_t e = first_element + static_cast<uint64_t>(i);
            const uint64_t phase = (0x9e3779b9u * static_cast<uint64_t>(t) + 0x91e10da5u * e) % (uint64_t{1} << 32);
            const uint64_t units = (std::bit_cast<uint32_t>(target[i]) + phase / (1 << 24)) / 256;
            wrong += got[i] != std::bit_cast<float>(static_cast<uint32_t>(256 * units));
            wrong += weight[i] != decode_bf16(split_float(got[i]).weight);
          }
          wrong += !rounded.exp_avg.same_bits(exact.exp_avg) || !rounded.exp_avg_sq.same_bits(exact.exp_avg_sq);
        }
        CAPTURE(device->name(), name_of(storage.format), N);
        CHECK(wrong == 0);
        CHECK(rounded.guard_intact());
      }
    }
  }
}

// Decay alone, by 1e-5 of the weight in each step: between a third and two thirds of the last place of fp24.
TEST_CASE("fp24_split follows small updates that rounding to nearest would lose", "[kernels][adamw]") {
  constexpr int64_t N = 500, kSteps = 10000;
  const Hyperparameters h{.lr = 1e-4, .weight_decay = 0.1};
  const std::vector<float> initial = random_normal(N, 18, 0.02f), no_gradient(N);
  TestParameter parameter(*devices().front(), {MasterForm::kFp24Split}, initial);
  const std::vector<float> start = parameter.master_values();
  std::vector<float> nearest = start;
  for (int64_t t = 1; t <= kSteps; ++t) {
    parameter.step(no_gradient, h, t);
    for (float& w : nearest) w = round_to_float24(w - 1e-5f * w, kNearestPhase);
  }
  const std::vector<float> end = parameter.master_values();
  const double decay = std::pow(1 - 1e-5, kSteps);
  double error = 0, nearest_error = 0;  // of the change, which is 9.5 % of a weight
  int64_t still = 0;
  for (int64_t i = 0; i < N; ++i) {
    const double change = start[i] * (decay - 1);
    error = std::max(error, std::abs((double{end[i]} - start[i]) / change - 1));
    nearest_error += std::abs((double{nearest[i]} - start[i]) / change - 1) / N;
    still += nearest[i] == start[i];
  }
  CAPTURE(error, nearest_error, still);
  CHECK(error < 0.002);
  CHECK(nearest_error > 0.5);
  CHECK(still > N / 2);
}

TEST_CASE("fp8 and bf16 states are decoded, updated as fp32 and encoded again", "[kernels][adamw]") {
  const int64_t N = 400;
  const std::vector<float> initial = random_normal(N, 8, 0.02f);
  for (Device* device : devices()) {
    for (const Storage& storage : all_storages()) {
      if (storage.master != MasterForm::kNone) continue;
      TestParameter parameter(*device, storage, initial);
      for (int64_t t = 1; t <= 5; ++t) {
        // The same step on an fp32 copy of the state.
        const TestTensor m(*device, DType::kF32, {N}), v(*device, DType::kF32, {N});
        moment_decode(*device, {parameter.exp_avg.view(), m});
        moment_decode(*device, {parameter.exp_avg_sq.view(), v});
        TestParameter fp32(*device, {}, parameter.weight.host());
        device->copy(fp32.exp_avg.values.view().data, m.view().data, m.view().bytes());
        device->copy(fp32.exp_avg_sq.values.view().data, v.view().data, v.view().bytes());

        parameter.step(gradient_at(N, t), {}, t);
        fp32.step(gradient_at(N, t), {}, t);
        const TestMoment want_m(*device, storage.exp_avg, N, true), want_v(*device, storage.exp_avg_sq, N, true);
        moment_encode(*device, {fp32.exp_avg.values, want_m.view(), false});
        moment_encode(*device, {fp32.exp_avg_sq.values, want_v.view(), true});
        CAPTURE(device->name(), name_of(storage.exp_avg.format), name_of(storage.exp_avg_sq.format), t);
        CHECK(parameter.weight.bytes() == fp32.weight.bytes());
        CHECK(parameter.exp_avg.same_bits(want_m));
        CHECK(parameter.exp_avg_sq.same_bits(want_v));
      }
    }
  }
}

TEST_CASE("a range that begins at a multiple of 128 steps as it does within the whole", "[kernels][adamw]") {
  const int64_t N = 128 * 7 + 53;
  const std::vector<float> initial = random_bf16(N, 9, 0.02f);
  for (Device* device : devices()) {
    for (const Storage& storage : all_storages()) {
      for (int64_t split : {128, 384, 896}) {
        TestParameter whole(*device, storage, initial), parts(*device, storage, initial);
        for (int64_t t = 1; t <= 4; ++t) {
          const TestTensor gradient(*device, storage.gradient, {N}, gradient_at(N, t));
          whole.step_range(gradient, {}, t, 0, N);
          parts.step_range(gradient, {}, t, split, N);
          parts.step_range(gradient, {}, t, 0, split);
        }
        CHECK(whole.same_bits(parts));
      }
    }
  }
}

TEST_CASE("the same steps give the same bits, and no element outside is touched", "[kernels][adamw]") {
  for (Device* device : devices()) {
    for (const Storage& storage : all_storages()) {
      for (int64_t N : {0, 1, 127, 129, 20000}) {
        const std::vector<float> initial = random_bf16(N, 10, 0.02f);
        TestParameter first(*device, storage, initial), second(*device, storage, initial);
        for (int64_t t = 1; t <= 2; ++t) {
          first.step(gradient_at(N, t), {}, t);
          second.step(gradient_at(N, t), {}, t);
        }
        CAPTURE(N);
        CHECK(first.same_bits(second));
        CHECK(first.guard_intact());
      }
    }
  }
}

TEST_CASE("grad_scale multiplies the gradient", "[kernels][adamw]") {
  const std::vector<float> initial = random_normal(200, 11, 0.02f);
  for (Device* device : devices()) {
    TestParameter scaled(*device, {}, initial), plain(*device, {}, initial);
    std::vector<float> half = gradient_at(200, 1);
    for (float& g : half) g *= 0.5f;
    scaled.step(gradient_at(200, 1), {}, 1, 0.5f);
    plain.step(half, {}, 1);
    CHECK(scaled.same_bits(plain));
  }
}

TEST_CASE("adamw_step changes no bit where grad_scale is not finite", "[kernels][adamw]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity());
  const int64_t N = 300;
  CAPTURE(bad);
  for (Device* device : devices()) {
    for (const Storage& storage : all_storages()) {
      const std::vector<float> initial = random_normal(N, 12, 0.02f);
      TestParameter skipped(*device, storage, initial), stopped(*device, storage, initial);
      skipped.step(gradient_at(N, 1), {}, 1);
      stopped.step(gradient_at(N, 1), {}, 1);
      // Gradients that are not finite are what it is for.
      std::vector<float> gradient = gradient_at(N, 2);
      gradient[7] = bad;
      skipped.step(gradient, {}, 2, bad);
      CHECK(skipped.same_bits(stopped));
      CHECK(skipped.guard_intact());
    }
  }
}

TEST_CASE("adamw_step raises weight_amax to the weights as they are stored", "[kernels][adamw][slow]") {
  constexpr float kLarge = 1000.0f, kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Storage> storages = storages_of_all_kernels();
  for (Device* device : devices()) {
    for (const int64_t N : {1, 3, 127, 129, 8192, 20011}) {
      for (size_t s = 0; s < storages.size(); ++s) {
        std::vector<float> initial = random_normal(N, 13, 0.02f);
        const auto place = static_cast<size_t>(philox4x32(14, s, static_cast<uint64_t>(N))[0] % N);
        initial[place] = s % 2 == 0 ? -0.7f : 0.7f;
        TestParameter parameter(*device, storages[s], initial), plain(*device, storages[s], initial);
        const auto check_step = [&](float before, int64_t t, float grad_scale) {
          set_weight_amax(*device, parameter, before);
          parameter.step(gradient_at(N, t), {}, t, grad_scale);
          const float amax = parameter.weight_amax->host()[0];
          CAPTURE(device->name(), N, s, place, before, t, grad_scale);
          CHECK(amax == std::max(before, largest_weight(parameter)));
          CHECK((parameter.weight_amax->guard_intact() && parameter.guard_intact()));
        };
        check_step(0.0f, 1, 1.0f);
        check_step(kLarge, 2, 1.0f);
        check_step(0.0f, 3, kNan);  // where nothing is changed, too
        check_step(kLarge, 3, kNan);
        check_step(0.001f, 3, 1.0f);
        // Asking for it changes nothing else.
        for (int64_t t = 1; t <= 3; ++t) plain.step(gradient_at(N, t), {}, t);
        CHECK(parameter.same_bits(plain));
      }
    }
  }
}

TEST_CASE("weight_amax is of the elements that are stepped, aligned or not", "[kernels][adamw]") {
  constexpr int64_t N = 8192 * 2 + 301;
  std::vector<float> initial = random_normal(N, 15, 0.02f);
  initial[0] = 3.0f;
  for (Device* device : devices()) {
    for (const Storage& storage : storages_of_all_kernels()) {
      const bool is_fp8 = is_float8(storage.exp_avg.format);
      for (const float grad_scale : {1.0f, std::numeric_limits<float>::infinity()}) {
        const int64_t begin = is_fp8 ? 128 : 1;  // element 1 is number 128 of the flat space
        TestParameter parameter(*device, storage, initial);
        set_weight_amax(*device, parameter, 0.0f);
        const TestTensor gradient(*device, storage.gradient, {N}, gradient_at(N, 1));
        parameter.step_range(gradient, {}, 1, begin, N, grad_scale, static_cast<uint64_t>(128 - begin));
        CHECK(parameter.weight_amax->host()[0] == largest_weight(parameter, begin));
        CHECK(parameter.weight_amax->host()[0] < 1.0f);
      }
    }
  }
}

TEST_CASE("weight_amax skips NaN and takes an infinity", "[kernels][adamw]") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  for (Device* device : devices()) {
    for (const Storage& storage : storages_of_all_kernels()) {
      for (const float extreme : {kNan, -kInfinity}) {
        for (const float grad_scale : {1.0f, kNan}) {
          std::vector<float> initial = random_normal(300, 16, 0.02f);
          initial[41] = extreme;
          TestParameter parameter(*device, storage, initial);
          set_weight_amax(*device, parameter, 0.0f);
          parameter.step(gradient_at(300, 1), {}, 1, grad_scale);
          const float amax = parameter.weight_amax->host()[0];
          CAPTURE(device->name(), extreme, grad_scale);
          CHECK(amax == largest_weight(parameter));
          // A step makes NaN of an infinity, which it decays.
          CHECK(std::isinf(amax) == (std::isinf(extreme) && std::isnan(grad_scale)));
        }
      }
    }
  }
}

TEST_CASE("hazard: a moment that shares its group with a far larger one gets an exploding update",
          "[kernels][adamw][hazards]") {
  const int64_t N = 128;
  const Hyperparameters h{.lr = 1.0, .eps = 1e-30, .weight_decay = 0};
  for (Device* device : devices()) {
    for (const MomentStorage& moment : kFloat8Storages) {
      TestParameter parameter(*device, {MasterForm::kNone, moment, moment}, std::vector<float>(N));
      double largest_update = 0;
      std::vector<float> before(N);
      for (int64_t t = 1; t <= 20; ++t) {
        std::vector<float> gradient(N);
        // First moments span 2^12 and stay; second moments span 2^24, more than E4M3 has.
        for (int64_t i = 0; i < N; ++i) gradient[i] = std::ldexp(1.0f, -static_cast<int>(i % 13));
        parameter.step(gradient, h, t);
        const std::vector<float> after = parameter.weight.host();
        for (int64_t i = 0; i < N; ++i)
          largest_update = std::max(largest_update, std::abs(double{after[i]} - before[i]));
        before = after;
      }
      CAPTURE(device->name(), name_of(moment.format), moment.expanded, largest_update);
      CHECK(largest_update < 2.0);  // AdamW's own is 1 for a constant gradient
    }
  }
}

TEST_CASE("hazard: adamw_step takes tensors of a wrong shape or dtype without a check",
          "[kernels][adamw][hazards]") {
  Device& device = *devices().front();
  const int64_t N = 130;
  const TestTensor fp32(device, DType::kF32, {N}, std::vector<float>(N)), bf16(device, DType::kBF16, {N});
  const TestTensor u16(device, DType::kU16, {N}), shorter(device, DType::kF32, {N - 1});
  const TestTensor one(device, DType::kF32, {1}, {1.0f});
  const TestMoment m(device, {DType::kE4M3, true}, N, true), v(device, {DType::kE4M3, true}, N, true);
  const AdamwStep good{.weight = bf16,
                       .master = u16,
                       .master_form = MasterForm::kFp32,
                       .gradient = fp32,
                       .exp_avg = m.view(),
                       .exp_avg_sq = v.view(),
                       .lr = 0,
                       .beta1 = 0.9,
                       .beta2 = 0.95,
                       .eps = 1,
                       .weight_decay = 0,
                       .bias_correction1 = 1,
                       .bias_correction2 = 1,
                       .grad_scale = one,
                       .seed = 0,
                       .step = 1,
                       .first_element = 0};
  const auto is_refused = [&](const std::function<void(AdamwStep&)>& change) {
    AdamwStep step = good;
    change(step);
    try {
      adamw_step(device, step);
    } catch (const Error& error) {
      return error.code() == ExitCode::kInternal;
    }
    return false;
  };
  CHECK_FALSE(is_refused([](AdamwStep&) {}));
  CHECK(is_refused([&](AdamwStep& a) { a.weight = fp32; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master = fp32; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master = {}; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master = shorter; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master_form = MasterForm::kFp24Split; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master_form = MasterForm::kBf16Sr; }));
  CHECK(is_refused([&](AdamwStep& a) { a.master_form = MasterForm::kNone; }));
  CHECK(is_refused([&](AdamwStep& a) { a.gradient = u16; }));
  CHECK(is_refused([&](AdamwStep& a) { a.gradient = shorter; }));
  CHECK(is_refused([&](AdamwStep& a) { a.exp_avg.amax = {}; }));
  CHECK(is_refused([&](AdamwStep& a) { a.exp_avg = {.values = fp32}; }));
  CHECK(is_refused([&](AdamwStep& a) { a.exp_avg_sq.exponent = a.exp_avg_sq.amax; }));
  CHECK(is_refused([&](AdamwStep& a) { a.grad_scale = shorter; }));
  CHECK(is_refused([&](AdamwStep& a) { a.grad_scale = {}; }));
  CHECK(is_refused([&](AdamwStep& a) { a.weight_amax = shorter; }));
  CHECK(is_refused([&](AdamwStep& a) { a.first_element = 64; }));
  CHECK(is_refused([&](AdamwStep& a) { a.bias_correction2 = 0; }));
}
