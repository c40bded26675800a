#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/elementwise/cross_entropy.h"
#include "kernels/ops/optimizer/grad_norm.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

// Optimizer, gradient norm and loss of every other device against the CPU's, at sizes that fit no vector, warp or
// block. Where there is no other device these have nothing to do.
using namespace parka;
using namespace parka::test;

namespace {

const std::vector<int64_t> kSizes = {1, 127, 128, 129, 1000, 4096, 100003};

std::vector<Device*> other_devices() {
  const std::vector<Device*> all = devices();
  return {all.begin() + 1, all.end()};
}

// ---- AdamW and moments ----

// Every master form with fp32 and bf16 moments and both kinds of gradient.
std::vector<Storage> plain_storages() {
  std::vector<Storage> storages;
  for (MasterForm master : kMasterForms) {
    for (DType gradient : {DType::kF32, DType::kBF16}) {
      for (DType states : {DType::kF32, DType::kBF16}) storages.push_back({master, {states}, {states}, gradient});
    }
  }
  return storages;
}

std::string describe(const Storage& s) {
  return "master form " + std::to_string(static_cast<int>(s.master)) + ", moments " +
         std::string(name_of(s.exp_avg.format)) + ", gradient " + std::string(name_of(s.gradient));
}

// Gradients from subnormal ones to those whose squares overflow are all a GPU's business too.
std::vector<float> wide_gradient(int64_t count, int64_t t) {
  std::vector<float> g = gradient_at(count, t);
  for (int64_t i = 0; i < count; ++i) {
    if (i % 5 == 3) g[i] = std::ldexp(g[i], static_cast<int>(i % 59) - 50);
  }
  for (float& x : g) x = decode_bf16(encode_bf16(x));
  return g;
}

TEST_CASE("another device's adamw_step gives the CPU's bits", "[kernels][adamw][devices]") {
  constexpr uint64_t kFirst = (uint64_t{1} << 34) + 256;
  for (Device* device : other_devices()) {
    for (int64_t N : kSizes) {
      const std::vector<float> initial = random_normal(N, 21, 0.02f);
      const std::vector<std::vector<float>> gradients = {wide_gradient(N, 1), wide_gradient(N, 2),
                                                         wide_gradient(N, 3)};
      for (const Storage& storage : plain_storages()) {
        TestParameter want(cpu_device(), storage, initial), got(*device, storage, initial),
            again(*device, storage, initial);
        for (int64_t t = 1; t <= 3; ++t) {
          for (TestParameter* parameter : {&want, &got, &again}) {
            parameter->step(gradients[t - 1], {}, t, 0.37f, kFirst);
          }
        }
        CAPTURE(N, describe(storage));
        CHECK(got.same_bits(want));
        CHECK(got.same_bits(again));
        CHECK(got.guard_intact());
      }
    }
  }
}

TEST_CASE("another device's fp32 masters in two parts are fp32 weights bit for bit", "[kernels][adamw][devices]") {
  for (Device* device : other_devices()) {
    for (int64_t N : kSizes) {
      const std::vector<float> initial = random_normal(N, 22, 0.02f);
      for (DType states : {DType::kF32, DType::kBF16}) {
        TestParameter split(*device, {MasterForm::kFp32, {states}, {states}}, initial);
        TestParameter fp32(*device, {MasterForm::kNone, {states}, {states}}, initial);
        for (int64_t t = 1; t <= 4; ++t) {
          for (TestParameter* parameter : {&split, &fp32}) parameter->step(wide_gradient(N, t), {}, t);
        }
        CAPTURE(N, name_of(states));
        CHECK(same_bits(split.master_values(), fp32.master_values()));
      }
    }
  }
}

TEST_CASE("another device steps views that are not aligned as the CPU does", "[kernels][adamw][devices]") {
  const int64_t N = 1001;
  const std::vector<float> initial = random_normal(N, 23, 0.02f);
  for (Device* device : other_devices()) {
    for (const Storage& storage : plain_storages()) {
      TestParameter want(cpu_device(), storage, initial), got(*device, storage, initial);
      for (int64_t t = 1; t <= 2; ++t) {
        const TestTensor want_gradient(cpu_device(), storage.gradient, {N}, gradient_at(N, t));
        const TestTensor gradient(*device, storage.gradient, {N}, gradient_at(N, t));
        // Element 1 is number 128 of the flat space.
        want.step_range(want_gradient, {}, t, 1, N, 1.0f, 127);
        got.step_range(gradient, {}, t, 1, N, 1.0f, 127);
      }
      CAPTURE(describe(storage));
      CHECK(got.same_bits(want));
      CHECK(got.guard_intact());
    }
  }
}

TEST_CASE("another device encodes and decodes plain moments as the CPU does", "[kernels][moments][devices]") {
  for (Device* device : other_devices()) {
    for (int64_t N : kSizes) {
      const std::vector<float> x = random_normal(N, 24);
      for (DType format : {DType::kF32, DType::kBF16}) {
        const StoredMoment want = store_and_read(cpu_device(), x, {format}, true);
        const StoredMoment got = store_and_read(*device, x, {format}, true);
        CAPTURE(N, name_of(format));
        CHECK(got.codes == want.codes);
        CHECK(same_bits(got.values, want.values));
        CHECK(got.guard_intact);
      }
    }
  }
}

// ---- Gradient norm ----

// The same tensors on two devices.
struct Parts {
  std::vector<std::unique_ptr<TestTensor>> tensors;
  std::vector<TensorView> views;

  Parts(Device& device, int64_t count) {
    const std::vector<int64_t> sizes = {1, 0, 7, 127, 16383, 16384, 16385, 1000, 70001, 0};
    for (int64_t p = 0; p < count; ++p) {
      const DType dtype = p % 3 == 0 ? DType::kF32 : DType::kBF16;
      const int64_t numel = sizes[static_cast<size_t>(p) % sizes.size()], skipped = p % 2;
      const auto seed = static_cast<uint64_t>(p);
      tensors.push_back(std::make_unique<TestTensor>(device, dtype, std::initializer_list<int64_t>{numel + skipped},
                                                     random_values(dtype, numel + skipped, seed)));
      views.push_back(tensors.back()->view().rows(skipped, numel));  // every other one is not aligned
    }
  }
};

TEST_CASE("another device's sum_of_squares agrees with the CPU's", "[kernels][grad_norm][devices]") {
  for (Device* device : other_devices()) {
    for (int64_t count : {0, 1, 2, 10, 159, 160, 161, 333}) {  // 160 go into one launch
      const Parts want_parts(cpu_device(), count), parts(*device, count);
      const TestTensor want_partial(cpu_device(), DType::kF32, {count}),
          want_result(cpu_device(), DType::kF32, {1});
      const TestTensor partial(*device, DType::kF32, {count}), result(*device, DType::kF32, {1});
      const TestTensor partial_again(*device, DType::kF32, {count}), again(*device, DType::kF32, {1});
      sum_of_squares(cpu_device(), {want_parts.views, want_partial, want_result});
      sum_of_squares(*device, {parts.views, partial, result});
      sum_of_squares(*device, {parts.views, partial_again, again});
      const std::vector<float> want = want_partial.host(), got = partial.host();
      int wrong = 0;
      for (size_t p = 0; p < want.size(); ++p) wrong += !(std::abs(got[p] - want[p]) <= 0x1p-23f * want[p]);
      CAPTURE(count);
      CHECK(wrong == 0);
      CHECK(std::abs(result.host()[0] - want_result.host()[0]) <= 0x1p-23f * want_result.host()[0]);
      CHECK((partial.bytes() == partial_again.bytes() && result.bytes() == again.bytes()));
      CHECK((partial.guard_intact() && result.guard_intact()));
    }
  }
}

TEST_CASE("another device's clip_coefficient gives the CPU's bits", "[kernels][grad_norm][devices]") {
  for (Device* device : other_devices()) {
    const auto coefficient = [](Device& where, float squares, float max_norm) {
      const TestTensor s(where, DType::kF32, {1}, {squares}), loss(where, DType::kF32, {1}, {1.0f});
      const TestTensor out(where, DType::kF32, {1});
      clip_coefficient(where, {.sum_of_squares = s, .loss = loss, .max_norm = max_norm, .coefficient = out});
      return out.host()[0];
    };
    const auto of_other_norm = [](Device& where, float squares, float clipped) {
      const TestTensor s(where, DType::kF32, {1}, {squares}), loss(where, DType::kF32, {1}, {1.0f});
      const TestTensor c(where, DType::kF32, {1}, {clipped}), out(where, DType::kF32, {1});
      clip_coefficient(
          where, {.sum_of_squares = s, .loss = loss, .max_norm = 0.3f, .coefficient = out, .clipped_squares = c});
      return out.host()[0];
    };
    int wrong = 0;
    for (float squares : log_uniform(200, 1e-20, 1e40, 25)) {
      for (float max_norm : {1.0f, 0.3f}) {
        wrong += coefficient(*device, squares, max_norm) != coefficient(cpu_device(), squares, max_norm);
      }
      const float other = of_other_norm(*device, 4.0f, squares);
      wrong += other != of_other_norm(cpu_device(), 4.0f, squares);
      wrong += !std::isnan(of_other_norm(*device, std::numeric_limits<float>::infinity(), squares));
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("another device's add_sum agrees with the CPU's", "[kernels][grad_norm][devices]") {
  for (Device* device : other_devices()) {
    for (int64_t N : kSizes) {
      const std::vector<float> x = random_normal(N, 26);
      const auto total = [&](Device& where) {
        const TestTensor values(where, DType::kF32, {N}, x), sum(where, DType::kF32, {1}, {3.0f});
        add_sum(where, {values, sum});
        CHECK((values.guard_intact() && sum.guard_intact()));
        return sum.host()[0];
      };
      const float want = total(cpu_device()), got = total(*device);
      CAPTURE(N, want, got);
      CHECK(std::abs(got - want) <= 0x1p-23f * std::abs(want) + 1e-9f);
      CHECK(got == total(*device));
    }
  }
}

// ---- Cross-entropy ----

// The tensors of one call, on one device.
struct Loss {
  TestTensor logits, targets, loss, z_loss_value;

  Loss(Device& device, DType dtype, int64_t T, int64_t V, const std::vector<float>& x,
       const std::vector<float>& target)
      : logits(device, dtype, {T, V}, x),
        targets(device, DType::kI32, {T}, target),
        loss(device, DType::kF32, {T}),
        z_loss_value(device, DType::kF32, {T}),
        device_(device) {}

  void run(float z_loss, float grad_scale, bool write_gradient = true) const {
    cross_entropy(device_, {logits, targets, loss, z_loss_value, z_loss, grad_scale, write_gradient});
  }
  bool guard_intact() const {
    return logits.guard_intact() && targets.guard_intact() && loss.guard_intact() && z_loss_value.guard_intact();
  }
  bool same_bits(const Loss& other) const {
    return logits.bytes() == other.logits.bytes() && loss.bytes() == other.loss.bytes() &&
           z_loss_value.bytes() == other.z_loss_value.bytes();
  }

 private:
  Device& device_;
};

// First, last and random columns, and rows to ignore.
std::vector<float> some_targets(int64_t T, int64_t V) {
  std::vector<float> targets;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t random = philox4x32(27, 0, static_cast<uint64_t>(t))[0] % V;
    targets.push_back(static_cast<float>(t % 7 == 2   ? int64_t{kIgnoreTarget}
                                         : t % 7 == 0 ? V - 1
                                         : t % 7 == 1 ? 0
                                                      : random));
  }
  return targets;
}

// Elements that two fp32 computations and one rounding each to `dtype` cannot explain. Sums of 50000 exponentials
// and the exponentials themselves are good to a few 1e-6.
int count_unlike(const std::vector<float>& got, const std::vector<float>& want, double scale, DType dtype) {
  const double relative = 1e-5 + (dtype == DType::kBF16 ? 0x1p-7 : 0.0);
  int unlike = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    unlike += !(std::abs(double{got[i]} - want[i]) <= relative * std::abs(want[i]) + 1e-6 * scale);
  }
  return unlike;
}

TEST_CASE("another device's cross_entropy agrees with the CPU's", "[kernels][cross_entropy][devices]") {
  constexpr float kZLoss = 1e-3f, kGradScale = 0.25f;
  struct Shape {
    int64_t T, V;
  };
  std::vector<Shape> shapes = {{1500, 1000}, {1500, 257}, {300, 50305}};  // several rows for each block of a GPU
  for (int64_t V : {1, 2, 7, 256, 1000, 32000, 50304, 50305, 120001}) {   // the last fit no shared memory
    for (int64_t T : {1, 3, 33}) shapes.push_back({T, V});
  }
  for (Device* device : other_devices()) {
    for (const auto& [T, V] : shapes) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        const std::vector<float> x = random_values(dtype, T * V, 28, 3.0f), targets = some_targets(T, V);
        const Loss want(cpu_device(), dtype, T, V, x, targets), got(*device, dtype, T, V, x, targets);
        const Loss again(*device, dtype, T, V, x, targets), forward(*device, dtype, T, V, x, targets);
        const std::vector<std::byte> untouched = forward.logits.bytes();
        for (const Loss* call : {&want, &got, &again}) call->run(kZLoss, kGradScale);
        forward.run(kZLoss, kGradScale, /*write_gradient=*/false);

        CAPTURE(T, V, name_of(dtype));
        CHECK(count_unlike(got.loss.host(), want.loss.host(), 1.0, DType::kF32) == 0);
        CHECK(count_unlike(got.z_loss_value.host(), want.z_loss_value.host(), kZLoss, DType::kF32) == 0);
        CHECK(count_unlike(got.logits.host(), want.logits.host(), kGradScale, dtype) == 0);
        CHECK(got.same_bits(again));
        CHECK(forward.loss.bytes() == got.loss.bytes());
        CHECK(forward.logits.bytes() == untouched);
        CHECK((got.guard_intact() && forward.guard_intact()));
      }
    }
  }
}

TEST_CASE("another device's cross_entropy does without z_loss_value", "[kernels][cross_entropy][devices]") {
  const int64_t T = 5, V = 1000;
  const std::vector<float> x = random_normal(T * V, 29), targets = some_targets(T, V);
  for (Device* device : other_devices()) {
    const Loss with(*device, DType::kF32, T, V, x, targets), without(*device, DType::kF32, T, V, x, targets);
    with.run(0.0f, 1.0f);
    cross_entropy(*device,
                  {.logits = without.logits, .targets = without.targets, .loss = without.loss, .z_loss_value = {}});
    CHECK(without.logits.bytes() == with.logits.bytes());
    CHECK(without.loss.bytes() == with.loss.bytes());
    CHECK(without.guard_intact());
  }
}

TEST_CASE("another device's cross_entropy counts logits of minus infinity as nothing",
          "[kernels][cross_entropy][devices]") {
  const int64_t T = 3, V = 9001;
  const std::vector<float> targets = {V - 1, V - 1, V - 1};
  std::vector<float> x = random_normal(T * V, 30);
  for (int64_t i = 0; i < T * V; ++i) {
    if (i % V < V - 40) x[i] = -std::numeric_limits<float>::infinity();
  }
  for (Device* device : other_devices()) {
    const Loss want(cpu_device(), DType::kF32, T, V, x, targets), got(*device, DType::kF32, T, V, x, targets);
    for (const Loss* call : {&want, &got}) call->run(0.0f, 1.0f);
    CHECK(count_unlike(got.loss.host(), want.loss.host(), 1.0, DType::kF32) == 0);
    CHECK(count_unlike(got.logits.host(), want.logits.host(), 1.0, DType::kF32) == 0);
  }
}

TEST_CASE("another device shows a target outside the vocabulary as a NaN row",
          "[kernels][cross_entropy][devices]") {
  const int64_t T = 4, V = 301;
  const std::vector<float> x = random_normal(T * V, 31);
  for (Device* device : other_devices()) {
    for (int bad : {-1, -101, 301, 1 << 20}) {
      const Loss call(*device, DType::kF32, T, V, x, {0, 300, static_cast<float>(bad), 1});
      call.run(0.5f, 1.0f);
      const std::vector<float> loss = call.loss.host(), z = call.z_loss_value.host(), gradient = call.logits.host();
      int wrong = 0;
      for (int64_t t = 0; t < T; ++t) wrong += std::isnan(loss[t]) != (t == 2) || std::isnan(z[t]) != (t == 2);
      for (int64_t i = 0; i < T * V; ++i) wrong += std::isnan(gradient[i]) != (i / V == 2);
      CAPTURE(bad);
      CHECK(wrong == 0);
      CHECK(call.guard_intact());
    }
  }
}

}  // namespace
