#include "kernels/ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/number_formats.h"
#include "kernels/ops/attention/rope.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace parka::test {

std::ostream& operator<<(std::ostream& out, const AttentionShape& s) {
  return out << "B " << s.B << " S " << s.S << " H " << s.H << " Hkv " << s.Hkv << " D " << s.D
             << (s.causal ? "" : " not causal");
}

}  // namespace parka::test

namespace {

// One key, primes, several tiles with a short last one; each head with keys of its own, shared by some, by all.
const std::vector<AttentionShape> kShapes = {{1, 1, 1, 1, 1},   {3, 1, 2, 2, 4},   {2, 7, 2, 2, 5},
                                             {1, 64, 4, 2, 8},  {3, 13, 6, 2, 16}, {1, 67, 4, 1, 32},
                                             {2, 131, 2, 1, 7}, {1, 65, 3, 3, 64}};
// The same over all keys, with the heads of vision towers.
const std::vector<AttentionShape> kShapesOverAllKeys = {
    {1, 1, 1, 1, 1, false},   {3, 2, 2, 2, 4, false},   {2, 7, 4, 2, 5, false},   {1, 64, 2, 2, 64, false},
    {1, 65, 3, 3, 64, false}, {2, 131, 2, 1, 7, false}, {1, 130, 2, 1, 72, false}};

// The tensors of one call of forward and one of backward.
struct Attention {
  AttentionShape s;
  DType dtype;
  float scale;
  std::vector<float> x, d_y;
  TestTensor qkv, out, lse, d_out, d_qkv;
  Device& device;

  Attention(Device& device_, const AttentionShape& s_, DType dtype_, const std::vector<float>& x_,
            const std::vector<float>& d_y_, float scale_)
      : s(s_),
        dtype(dtype_),
        scale(scale_),
        x(x_),
        d_y(d_y_),
        qkv(device_, dtype, {s.T(), s.width()}, x),
        out(device_, dtype, {s.T(), s.out_width()}),
        lse(device_, DType::kF32, {s.B, s.H, s.S}),
        d_out(device_, dtype, {s.T(), s.out_width()}, d_y),
        d_qkv(device_, dtype, {s.T(), s.width()}),
        device(device_) {}
  Attention(Device& device_, const AttentionShape& s_, DType dtype_, uint64_t seed = 1)
      : Attention(device_, s_, dtype_, random_values(dtype_, s_.T() * s_.width(), seed),
                  random_values(dtype_, s_.T() * s_.out_width(), seed + 1),
                  1.0f / std::sqrt(static_cast<float>(s_.D))) {}

  void run() {
    attention_forward(device, {.qkv = qkv,
                               .out = out,
                               .lse = lse,
                               .sequence_length = s.S,
                               .num_heads = s.H,
                               .num_kv_heads = s.Hkv,
                               .scale = scale,
                               .causal = s.causal});
    attention_backward(device, backward(d_qkv));
  }
  AttentionBackward backward(const TestTensor& gradient) const {
    return {.qkv = qkv,
            .out = out,
            .d_out = d_out,
            .lse = lse,
            .d_qkv = gradient,
            .sequence_length = s.S,
            .num_heads = s.H,
            .num_kv_heads = s.Hkv,
            .scale = scale,
            .causal = s.causal};
  }
  // Both passes against the reference, outputs and guard bands.
  void check() {
    run();
    const bool tensor_cores = device.kind() == DeviceKind::kCuda && dtype == DType::kBF16;
    const double unit_p = tensor_cores ? 0x1p-8 : 0.0;
    const ForwardReference forward = forward_reference(s, to_doubles(x), scale, unit_p);
    CHECK(count_wrong(out.host(), forward.out, forward.out_bound, dtype) == 0);
    CHECK(count_wrong(lse.host(), forward.lse, forward.lse_bound, DType::kF32) == 0);
    const BackwardReference reference = backward_reference(s, to_doubles(x), to_doubles(out.host()),
                                                           to_doubles(d_y), to_doubles(lse.host()), scale, unit_p);
    CHECK(count_wrong(d_qkv.host(), reference.d_qkv, reference.bound, dtype) == 0);
    CHECK((out.guard_intact() && lse.guard_intact() && d_qkv.guard_intact()));
    check_rotated(reference);
    CHECK((qkv.guard_intact() && d_out.guard_intact() && qkv.host() == x && d_out.host() == d_y));
  }
  // Backward as models call it.
  void check_rotated(BackwardReference reference) {
    if (s.D % 2 != 0) return;
    const std::vector<float> cos_sin = rope_table(s.S, s.D, 100.0);
    const TestTensor table(device, DType::kF32, {s.S, s.D}, cos_sin), amax(device, DType::kF32, {1});
    const TestTensor rotated(device, dtype, {s.T(), s.width()});
    AttentionBackward call = backward(rotated);
    call.cos_sin = table;
    call.d_qkv_amax = amax;
    attention_backward(device, call);
    rotate_back(reference, s, cos_sin);
    CHECK(count_wrong(rotated.host(), reference.d_qkv, reference.bound, dtype) == 0);
    CHECK((rotated.guard_intact() && amax.guard_intact() && table.host() == cos_sin));
  }
};

TEST_CASE("the reference gradient of attention agrees with finite differences", "[kernels][attention]") {
  const AttentionShape s = GENERATE(AttentionShape{2, 3, 2, 2, 3}, AttentionShape{1, 5, 4, 2, 3},
                                    AttentionShape{1, 4, 3, 1, 2}, AttentionShape{2, 3, 2, 1, 3, false});
  CAPTURE(s);
  const double scale = 0.7, step = 1e-4;
  Doubles x = to_doubles(random_normal(s.T() * s.width(), 1));
  const Doubles d_y = to_doubles(random_normal(s.T() * s.out_width(), 2));
  const auto objective = [&] {
    const Doubles out = forward_reference(s, x, scale).out;
    return dot(out.data(), d_y.data(), static_cast<int64_t>(out.size())).value;
  };
  const ForwardReference forward = forward_reference(s, x, scale);
  const Doubles d_x = backward_reference(s, x, forward.out, d_y, forward.lse, scale).d_qkv;
  int wrong = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double middle = x[i];
    x[i] = middle + step;
    const double above = objective();
    x[i] = middle - step;
    const double below = objective();
    x[i] = middle;
    wrong += !(std::abs((above - below) / (2 * step) - d_x[i]) <= 10 * step * step);
  }
  CHECK(wrong == 0);
}

TEST_CASE("attention agrees with the double reference", "[kernels][attention]") {
  const AttentionShape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, name_of(dtype));
  for (Device* device : devices()) Attention(*device, s, dtype).check();
}

TEST_CASE("attention over all keys agrees with the double reference", "[kernels][attention]") {
  const AttentionShape s = GENERATE(from_range(kShapesOverAllKeys));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, name_of(dtype));
  for (Device* device : devices()) Attention(*device, s, dtype).check();
}

TEST_CASE("attention over all keys costs twice what causal attention does", "[kernels][attention]") {
  Device& device = *devices()[0];
  const Attention causal(device, {2, 6, 2, 1, 4}, DType::kF32);
  AttentionBackward call = causal.backward(causal.d_qkv);
  const OpCost half = cost_of(call);
  call.causal = false;
  CHECK(cost_of(call).flop == 2 * half.flop);
  CHECK(cost_of(call).bytes == half.bytes);
  CHECK(cost_of(call).shape != half.shape);
}

TEST_CASE("attention takes large random scores", "[kernels][attention]") {
  const AttentionShape s{1, 67, 4, 2, 16};
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Scores of a few thousand: nearly all probability is on one key, and most other exponentials underflow.
  const auto x = random_values(dtype, s.T() * s.width(), 3, 30.0f),
             d_y = random_values(dtype, s.T() * s.out_width(), 4);
  for (Device* device : devices()) Attention(*device, s, dtype, x, d_y, 1.0f).check();
}

// As FP8 with one scale for all would hold it.
std::vector<float> rounded_to_e4m3(std::vector<float> x) {
  float amax = 0.0f;
  for (const float value : x) amax = std::max(amax, std::abs(value));
  const float step = amax / 448.0f;
  for (float& value : x) value = decode_e4m3(encode_e4m3(value / step)) * step;
  return x;
}

float largest_query_gradient(const AttentionShape& s, const std::vector<float>& d_qkv) {
  float largest = 0.0f;
  for (int64_t i = 0; i < s.T() * s.width(); ++i) {
    if (i % s.width() < s.H * s.D) largest = std::max(largest, std::abs(d_qkv[static_cast<size_t>(i)]));
  }
  return largest;
}

TEST_CASE("where all keys are equal queries get no gradient, unless the output was rounded to FP8",
          "[kernels][attention]") {
  // Scores of a row are then equal whatever the query is. What d_q is made of, the sum of a row's d_s, is 0 only
  // because delta is taken from the output that forward made: why no recipe keeps that in FP8 (docs/precision.md).
  const AttentionShape s{2, 70, 2, 2, 64};
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  std::vector<float> x = random_values(dtype, s.T() * s.width(), 7);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t i = 0; i < s.S; ++i) {
      for (int64_t h = 0; h < s.H; ++h) std::fill_n(x.begin() + s.k(b, i, h), s.D, 1.0f);
    }
  }
  const auto d_y = random_values(dtype, s.T() * s.out_width(), 8);
  for (Device* device : devices()) {
    Attention exact(*device, s, dtype, x, d_y, 0.125f);
    exact.run();
    const float largest = largest_query_gradient(s, exact.d_qkv.host());
    // d_out . v_j are sums of 64 products of unit variance: about 8, and less than 40.
    CHECK(largest < 0.125f * 40.0f * (dtype == DType::kF32 ? 0x1p-18f : 0x1p-7f));
    const TestTensor rounded(*device, dtype, {s.T(), s.out_width()}, rounded_to_e4m3(exact.out.host()));
    const TestTensor d_qkv(*device, dtype, {s.T(), s.width()});
    attention_backward(*device, {exact.qkv, rounded, exact.d_out, exact.lse, d_qkv, s.S, s.H, s.Hkv, 0.125f});
    CAPTURE(largest, largest_query_gradient(s, d_qkv.host()));
    CHECK(largest_query_gradient(s, d_qkv.host()) > 4 * largest);
  }
}

TEST_CASE("attention over scores of +-1e4 is exact where fp32 is", "[kernels][attention]") {
  // Even keys score +9984, odd keys -9984: the even ones share the probability, the odd ones get none.
  const AttentionShape s{1, 70, 1, 1, 2};
  std::vector<float> x = random_bf16(s.T() * s.width(), 5);
  for (int64_t i = 0; i < s.S; ++i) {
    x[s.q(0, i, 0)] = 96;
    x[s.k(0, i, 0)] = i % 2 == 0 ? 104 : -104;
    x[s.q(0, i, 0) + 1] = x[s.k(0, i, 0) + 1] = 0;
  }
  for (Device* device : devices()) {
    Attention a(*device, s, DType::kF32, x, random_normal(s.T() * s.out_width(), 6), 1.0f);
    a.run();
    const std::vector<float> out = a.out.host(), lse = a.lse.host(), d_qkv = a.d_qkv.host();
    int wrong = 0;
    Doubles mean(2), magnitude(2);
    for (int64_t i = 0; i < s.S; ++i) {
      const double keys = static_cast<double>(i / 2 + 1);
      for (int64_t d = 0; d < 2; ++d) {
        if (i % 2 == 0) mean[d] += x[s.v(0, i, 0) + d], magnitude[d] += std::abs(x[s.v(0, i, 0) + d]);
        wrong += !(std::abs(out[s.out(0, i, 0) + d] - mean[d] / keys) <= 80 * 0x1p-24 * magnitude[d] / keys);
        wrong += !std::isfinite(d_qkv[s.q(0, i, 0) + d]) || (i % 2 == 1 && d_qkv[s.v(0, i, 0) + d] != 0);
      }
      wrong += !(std::abs(lse[i] - (9984 + std::log(keys))) <= 1.01 * 0x1p-11);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention of a row with one key copies its value", "[kernels][attention]") {
  const AttentionShape s{3, 66, 4, 2, 6};
  for (Device* device : devices()) {
    Attention a(*device, s, DType::kF32);
    a.run();
    const std::vector<float> out = a.out.host();
    int wrong = 0;
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.H; ++h) {
        for (int64_t d = 0; d < s.D; ++d) wrong += out[s.out(b, 0, h) + d] != a.x[s.v(b, 0, h / s.group()) + d];
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention over equal keys averages the values", "[kernels][attention]") {
  const AttentionShape s{1, 67, 2, 1, 3};
  std::vector<float> x = random_normal(s.T() * s.width(), 7);
  for (int64_t i = 1; i < s.S; ++i) std::copy_n(&x[s.k(0, 0, 0)], s.D, &x[s.k(0, i, 0)]);
  for (Device* device : devices()) {
    Attention a(*device, s, DType::kF32, x, random_normal(s.T() * s.out_width(), 8), 0.5f);
    a.run();
    const std::vector<float> out = a.out.host();
    int wrong = 0;
    Doubles sum(3), magnitude(3);
    for (int64_t i = 0; i < s.S; ++i) {
      for (int64_t d = 0; d < s.D; ++d) {
        sum[d] += x[s.v(0, i, 0) + d];
        magnitude[d] += std::abs(x[s.v(0, i, 0) + d]);
        const double keys = static_cast<double>(i + 1), bound = (2 * keys + 10) * 0x1p-24 * magnitude[d] / keys;
        for (int64_t h = 0; h < s.H; ++h) wrong += !(std::abs(out[s.out(0, i, h) + d] - sum[d] / keys) <= bound);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention does not see later rows or other sequences", "[kernels][attention]") {
  const AttentionShape s{2, 67, 2, 1, 4};
  const int64_t changed = GENERATE(int64_t{1}, int64_t{40}, int64_t{66});  // row of the first sequence
  for (Device* device : devices()) {
    Attention a(*device, s, DType::kF32);
    a.run();
    std::vector<float> x = a.x;
    for (int64_t c = 0; c < s.width(); ++c) x[changed * s.width() + c] += 1.0f;
    Attention b(*device, s, DType::kF32, x, a.d_y, a.scale);
    b.run();
    const std::vector<float> before = a.out.host(), after = b.out.host();
    int wrong = 0;
    for (int64_t i = 0; i < s.T() * s.out_width(); ++i) {
      const int64_t row = i / s.out_width();
      wrong += (before[i] == after[i]) != (row < changed || row >= s.S);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("attention over all keys sees every row of its sequence and no other", "[kernels][attention]") {
  const AttentionShape s{2, 67, 2, 1, 4, false};
  const int64_t changed = GENERATE(int64_t{0}, int64_t{40}, int64_t{66});  // row of the first sequence
  for (Device* device : devices()) {
    Attention a(*device, s, DType::kF32);
    a.run();
    std::vector<float> x = a.x;
    for (int64_t c = 0; c < s.width(); ++c) x[changed * s.width() + c] += 1.0f;
    Attention b(*device, s, DType::kF32, x, a.d_y, a.scale);
    b.run();
    const std::vector<float> before = a.out.host(), after = b.out.host();
    int wrong = 0;
    for (int64_t i = 0; i < s.T() * s.out_width(); ++i) {
      wrong += (before[i] == after[i]) != (i / s.out_width() >= s.S);
    }
    CHECK(wrong == 0);
  }
}

// Rows i of head h of the first sequence that hold a NaN; fails on one in another sequence.
std::vector<bool> nan_rows(const AttentionShape& s, const std::vector<float>& out, int64_t h) {
  std::vector<bool> rows(static_cast<size_t>(s.S));
  for (int64_t i = 0; i < s.T() * s.out_width(); ++i) {
    const int64_t row = i / s.out_width();
    if (!std::isnan(out[i])) continue;
    REQUIRE(row < s.S);
    if (i % s.out_width() / s.D == h) rows[row] = true;
  }
  return rows;
}

TEST_CASE("attention shows a NaN wherever it was read", "[kernels][attention]") {
  const AttentionShape s{2, 67, 4, 2, 4};
  constexpr int64_t kRow = 65;
  const auto nan_from = [&](int64_t begin, int64_t end) {
    std::vector<bool> rows(static_cast<size_t>(s.S));
    std::fill(rows.begin() + begin, rows.begin() + end, true);
    return rows;
  };
  const std::vector<bool> none = nan_from(0, 0);
  for (Device* device : devices()) {
    const std::vector<float> x = random_normal(s.T() * s.width(), 9),
                             d_y = random_normal(s.T() * s.out_width(), 10);
    const auto poisoned = [&](int64_t at) {
      std::vector<float> y = x;
      y[at] = std::nanf("");
      Attention a(*device, s, DType::kF32, y, d_y, 0.5f);
      a.run();
      return std::pair(a.out.host(), a.d_qkv.host());
    };
    // A query spoils its row of its head; a key spoils the rows from it on, of the query heads that read it.
    const auto [q_out, q_grad] = poisoned(s.q(0, kRow, 2) + 1);
    CHECK(nan_rows(s, q_out, 2) == nan_from(kRow, kRow + 1));
    CHECK((nan_rows(s, q_out, 0) == none && nan_rows(s, q_out, 3) == none));
    CHECK((std::isnan(q_grad[s.q(0, kRow, 2)]) && std::isnan(q_grad[s.k(0, 0, 1)]) &&
           std::isnan(q_grad[s.v(0, 0, 1)])));
    const auto [k_out, k_grad] = poisoned(s.k(0, kRow, 1));
    CHECK((nan_rows(s, k_out, 2) == nan_from(kRow, s.S) && nan_rows(s, k_out, 3) == nan_from(kRow, s.S)));
    CHECK((nan_rows(s, k_out, 0) == none && nan_rows(s, k_out, 1) == none));
    CHECK((std::isnan(k_grad[s.q(0, kRow, 3)]) && std::isnan(k_grad[s.k(0, kRow, 1)])));
    const auto [v_out, v_grad] = poisoned(s.v(0, kRow, 0) + 3);
    const std::vector<bool> v_rows = nan_rows(s, v_out, 1);
    CHECK((v_rows[kRow] && v_rows[kRow + 1] && nan_rows(s, v_out, 2) == none));
    CHECK((std::isnan(v_grad[s.q(0, kRow, 1)]) && std::isnan(v_grad[s.k(0, kRow, 0)])));
  }
}

TEST_CASE("attention gives the same bits on any number of threads", "[kernels][attention]") {
  Device& device = *devices()[0];
  CHECK(same_on_one_thread([&] {
    Attention a(device, {3, 67, 4, 2, 16}, DType::kF32);
    a.run();
    std::vector<std::byte> bytes = a.d_qkv.bytes();
    const std::vector<std::byte> out = a.out.bytes();
    bytes.insert(bytes.end(), out.begin(), out.end());
    return bytes;
  }));
}

TEST_CASE("attention accepts no rows and refuses wrong arguments", "[kernels][attention]") {
  Device& device = *devices()[0];
  TestTensor qkv(device, DType::kF32, {6, 16}), out(device, DType::kF32, {6, 8}),
      lse(device, DType::kF32, {2, 2, 3});
  TestTensor half(device, DType::kBF16, {6, 8}), no_lse(device, DType::kF32, {0, 2, 3});
  const TensorView no_qkv = qkv.view().rows(0, 0), no_out = out.view().rows(0, 0);
  const AttentionForward forward{qkv, out, lse, 3, 2, 1, 1.0f};
  const AttentionBackward backward{qkv, out, out, lse, qkv, 3, 2, 1, 1.0f};
  attention_forward(device, {no_qkv, no_out, no_lse, 3, 2, 1, 1.0f});
  attention_backward(device, {no_qkv, no_out, no_out, no_lse, no_qkv, 3, 2, 1, 1.0f});
  CHECK(std::isnan(out.host()[0]));
  const auto refused = [&](auto call, auto change, const std::string& text) {
    change(call);
    const std::string message = internal_error([&] {
      if constexpr (std::is_same_v<decltype(call), AttentionForward>)
        attention_forward(device, call);
      else
        attention_backward(device, call);
    });
    return contains(message, text);
  };
  CHECK(refused(
      forward, [](auto& a) { a.num_kv_heads = 0; }, "attention_forward: 2 query heads"));
  CHECK(refused(
      forward, [](auto& a) { a.num_heads = 3, a.num_kv_heads = 2; }, "attention_forward: 3 query heads"));
  CHECK(refused(
      forward, [](auto& a) { a.num_heads = 3; }, "attention_forward: qkv is fp32 [6, 16]"));
  CHECK(refused(
      forward, [](auto& a) { a.sequence_length = 4; }, "attention_forward: qkv is fp32 [6, 16]"));
  CHECK(refused(
      forward, [](auto& a) { a.sequence_length = 0; }, "attention_forward: qkv is fp32 [6, 16]"));
  CHECK(refused(
      forward, [&](auto& a) { a.out = half; }, "attention_forward: out"));
  CHECK(refused(
      forward, [&](auto& a) { a.lse = out; }, "attention_forward: lse"));
  TestTensor first_key(device, DType::kI32, {6});
  CHECK(refused(
      forward, [&](auto& a) { a.first_key = first_key, a.causal = false; }, "attention_forward: first_key"));
  CHECK(refused(
      backward, [&](auto& a) { a.first_key = first_key, a.causal = false; }, "attention_backward: first_key"));
  CHECK(refused(
      backward, [&](auto& a) { a.qkv = lse; }, "attention_backward: qkv"));
  CHECK(refused(
      backward, [&](auto& a) { a.d_out = half; }, "attention_backward: d_out"));
  CHECK(refused(
      backward, [&](auto& a) { a.d_qkv = out; }, "attention_backward: d_qkv"));
  TestTensor table(device, DType::kF32, {3, 4}), long_table(device, DType::kF32, {6, 4});
  TestTensor odd(device, DType::kF32, {6, 12}), odd_out(device, DType::kF32, {6, 6});
  TestTensor odd_table(device, DType::kF32, {3, 3});
  CHECK(refused(
      backward, [&](auto& a) { a.cos_sin = long_table; }, "attention_backward: cos_sin is fp32 [6, 4]"));
  CHECK(refused(
      backward, [&](auto& a) { a.cos_sin = half; }, "attention_backward: cos_sin"));
  CHECK(refused(
      backward,
      [&](auto& a) {
        a.qkv = a.d_qkv = odd;
        a.out = a.d_out = odd_out;
        a.cos_sin = odd_table;
      },
      "attention_backward: heads of 3 columns"));
  CHECK(refused(
      backward, [&](auto& a) { a.cos_sin = table, a.d_qkv_amax = table; }, "attention_backward: d_qkv_amax"));
}

}  // namespace
