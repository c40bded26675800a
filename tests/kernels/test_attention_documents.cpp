#include <algorithm>
#include <cmath>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/attention/attention.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

// Attention that stays within documents, and within windows (first_key).
using namespace parka;
using namespace parka::test;

namespace {

struct Results {
  std::vector<float> out, lse, d_qkv;
};

struct Inputs {
  AttentionShape s;
  DType dtype;
  std::vector<float> qkv, d_out;
  FirstKeys first_keys;
  float scale;
  int64_t window = 0;

  Inputs(const AttentionShape& shape, DType type, uint64_t seed)
      : s(shape),
        dtype(type),
        qkv(random_values(type, s.T() * s.width(), seed)),
        d_out(random_values(type, s.T() * s.out_width(), seed + 1)),
        scale(1.0f / std::sqrt(static_cast<float>(s.D))) {}
};

Results run(Device& device, const Inputs& in) {
  const AttentionShape& s = in.s;
  const TestTensor qkv(device, in.dtype, {s.T(), s.width()}, in.qkv), out(device, in.dtype, {s.T(), s.out_width()});
  const TestTensor d_out(device, in.dtype, {s.T(), s.out_width()}, in.d_out),
      lse(device, DType::kF32, {s.B, s.H, s.S});
  const TestTensor d_qkv(device, in.dtype, {s.T(), s.width()});
  const std::vector<float> keys(in.first_keys.begin(), in.first_keys.end());
  const TestTensor first_key(device, DType::kI32, {s.T()}, keys);
  const TensorView first = in.first_keys.empty() ? TensorView() : first_key.view();
  attention_forward(device, {qkv, out, lse, s.S, s.H, s.Hkv, in.scale, {}, first, in.window});
  attention_backward(device,
                     {qkv, out, d_out, lse, d_qkv, s.S, s.H, s.Hkv, in.scale, first, {}, {}, {}, in.window});
  CHECK((out.guard_intact() && lse.guard_intact() && d_qkv.guard_intact()));
  return {out.host(), lse.host(), d_qkv.host()};
}

// Documents of random lengths, of which about half are shorter than 4.
FirstKeys random_documents(const AttentionShape& s, uint64_t seed) {
  FirstKeys keys;
  for (int64_t row = 0, document = 0; row < s.T(); ++row) {
    const int64_t i = row % s.S;
    const uint32_t draw = philox4x32(seed, 3, static_cast<uint64_t>(row))[0];
    if (i == 0 || draw % (row / 40 % 2 == 0 ? 3 : 50) == 0) document = i;
    keys.push_back(static_cast<int32_t>(document));
  }
  return keys;
}

// Rows [begin, begin + length) of the first sequence as a batch of their own.
Inputs cut(const Inputs& in, int64_t begin, int64_t length) {
  Inputs part = in;
  part.s.B = 1;
  part.s.S = length;
  part.first_keys.clear();
  const auto rows = [&](const std::vector<float>& x, int64_t width) {
    return std::vector<float>(x.begin() + begin * width, x.begin() + (begin + length) * width);
  };
  part.qkv = rows(in.qkv, in.s.width());
  part.d_out = rows(in.d_out, in.s.out_width());
  return part;
}

void check(const Inputs& in) {
  const AttentionShape& s = in.s;
  for (Device* device : devices()) {
    const Results got = run(*device, in);
    const double unit_p = device->kind() == DeviceKind::kCuda && in.dtype == DType::kBF16 ? 0x1p-8 : 0.0;
    const ForwardReference forward = forward_reference(s, to_doubles(in.qkv), in.scale, unit_p, in.first_keys);
    CHECK(count_wrong(got.out, forward.out, forward.out_bound, in.dtype) == 0);
    CHECK(count_wrong(got.lse, forward.lse, forward.lse_bound, DType::kF32) == 0);
    const BackwardReference backward =
        backward_reference(s, to_doubles(in.qkv), to_doubles(got.out), to_doubles(in.d_out), to_doubles(got.lse),
                           in.scale, unit_p, in.first_keys);
    CHECK(count_wrong(got.d_qkv, backward.d_qkv, backward.bound, in.dtype) == 0);
  }
}

TEST_CASE("attention within documents agrees with the double reference", "[kernels][attention]") {
  const AttentionShape s =
      GENERATE(AttentionShape{2, 131, 2, 1, 7}, AttentionShape{3, 67, 4, 2, 16}, AttentionShape{1, 200, 2, 2, 64},
               AttentionShape{1, 150, 4, 2, 128}, AttentionShape{1, 150, 3, 1, 256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const uint64_t seed = GENERATE(uint64_t{1}, uint64_t{20});
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D, name_of(dtype), seed);
  Inputs in(s, dtype, seed);
  in.first_keys = random_documents(s, seed);
  check(in);
}

TEST_CASE("attention through a window agrees with the double reference", "[kernels][attention]") {
  const AttentionShape s = GENERATE(AttentionShape{3, 67, 4, 2, 16}, AttentionShape{1, 200, 2, 2, 64},
                                    AttentionShape{1, 150, 4, 2, 128}, AttentionShape{1, 150, 3, 1, 256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // One key, fewer than a tile has, a tile, more; no more than documents leave.
  const int64_t window = GENERATE(int64_t{1}, int64_t{5}, int64_t{64}, int64_t{100}, int64_t{1000});
  const bool documents = GENERATE(false, true);
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D, name_of(dtype), window, documents);
  Inputs in(s, dtype, 3);
  in.first_keys = windowed(s, window, documents ? random_documents(s, 8) : FirstKeys());
  in.window = window;
  check(in);
}

TEST_CASE("the cost of attention through a window is that of the pairs of its band", "[kernels][attention]") {
  const TestTensor qkv(cpu_device(), DType::kF32, {2 * 24, 3 * 8}), out(cpu_device(), DType::kF32, {2 * 24, 8});
  const TestTensor lse(cpu_device(), DType::kF32, {2, 1, 24}), first(cpu_device(), DType::kI32, {2 * 24});
  const auto forward = [&](int64_t window) {
    return cost_of(AttentionForward{qkv, out, lse, 24, 1, 1, 1.0f, {}, first, window});
  };
  const auto backward = [&](int64_t window) {
    return cost_of(AttentionBackward{qkv, out, out, lse, qkv, 24, 1, 1, 1.0f, first, {}, {}, {}, window});
  };
  const double causal = forward(0).flop;
  CHECK(causal == 2 * 4 * 8 * (24 * 24 / 2));
  CHECK(forward(24).flop == causal);
  CHECK(forward(100).flop == causal);
  CHECK(forward(6).flop == 2 * 4 * 8 * (6 * 24 - 6 * 6 / 2));
  CHECK(backward(6).flop == 2.5 * forward(6).flop);
  CHECK((forward(24).shape == "48 x 8" && forward(6).shape == "48 x 8, window 6"));
}

TEST_CASE("attention within documents is what each document alone gives", "[kernels][attention]") {
  const std::vector<int64_t> lengths = {1, 70, 3, 64, 1, 1, 25};  // 165 rows
  Inputs in({1, 165, 4, 2, 8}, DType::kF32, 5);
  for (const int64_t length : lengths) {
    in.first_keys.insert(in.first_keys.end(), static_cast<size_t>(length),
                         static_cast<int32_t>(in.first_keys.size()));
  }
  const AttentionShape& s = in.s;
  for (Device* device : devices()) {
    const Results packed = run(*device, in);
    double worst = 0;
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      const Results alone = run(*device, cut(in, begin, length));
      const auto compare = [&](const std::vector<float>& a, int64_t offset, const std::vector<float>& b) {
        for (size_t i = 0; i < b.size(); ++i) {
          worst = std::max(worst, std::abs(double{a[static_cast<size_t>(offset) + i]} - b[i]));
        }
      };
      compare(packed.out, begin * s.out_width(), alone.out);
      compare(packed.d_qkv, begin * s.width(), alone.d_qkv);
      begin += length;
    }
    CHECK(worst <= 1e-5);  // sums of up to 70 terms of about 1, in another order
  }
}

TEST_CASE("first keys of 0 change no bit", "[kernels][attention]") {
  Inputs in({2, 131, 4, 2, 16}, DType::kBF16, 7);
  for (Device* device : devices()) {
    in.first_keys.clear();
    const Results without = run(*device, in);
    in.first_keys.assign(static_cast<size_t>(in.s.T()), 0);
    const Results with = run(*device, in);
    // On a GPU with kernels of its own for the case without documents only the CPU's promise is tested.
    if (device->kind() == DeviceKind::kCuda) continue;
    CHECK((with.out == without.out && with.lse == without.lse && with.d_qkv == without.d_qkv));
  }
}

TEST_CASE("first keys that cannot be are refused", "[kernels][attention]") {
  Inputs in({1, 4, 1, 1, 2}, DType::kF32, 9);
  for (const FirstKeys& keys : {FirstKeys{0, 2, 2, 2}, FirstKeys{0, 1, 0, 0}, FirstKeys{-1, 0, 0, 0}}) {
    in.first_keys = keys;
    CHECK_THROWS_AS(run(cpu_device(), in), Error);
  }
  in.first_keys = {0, 1, 1, 3};
  CHECK_NOTHROW(run(cpu_device(), in));
  in.window = 2;
  CHECK_NOTHROW(run(cpu_device(), in));
  in.window = 1;  // the third row sees two keys
  CHECK_THROWS_AS(run(cpu_device(), in), Error);
  in.first_keys.clear();
  CHECK_THROWS_AS(run(cpu_device(), in), Error);
}

}  // namespace
