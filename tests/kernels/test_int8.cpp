#include "kernels/ops/gemm/int8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <vector>

#include "tests/kernels/exact_products.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

TestMatrix int8_matrix(Device& device, int64_t rows, int64_t cols) {
  return TestMatrix(device, DType::kI8, rows, cols, Scaling::kGroup, cols);
}

// What the CPU makes of rows of K numbers.
std::unique_ptr<TestMatrix> quantized(DType dtype, int64_t K, const std::vector<float>& values) {
  const int64_t rows = static_cast<int64_t>(values.size()) / K;
  const TestTensor x(cpu_device(), dtype, {rows, K}, values);
  std::unique_ptr<TestMatrix> q(new TestMatrix(int8_matrix(cpu_device(), rows, K)));
  quantize_int8(cpu_device(), {.x = x, .out = *q});
  CHECK((q->guard_intact() && x.guard_intact()));
  return q;
}

const int8_t* codes_of(const TestMatrix& m) { return m.data.view().as<int8_t>(); }
const float* scales_of(const TestMatrix& m) { return m.scale->view().as<float>(); }

// Rows times Sylvester's Hadamard matrices, whose element (i, j) has the sign of the parity of i & j.
std::vector<double> rotated(const std::vector<double>& x, int64_t cols) {
  const auto width = static_cast<size_t>(rotation_width(cols));
  std::vector<double> h(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < width; ++j) h[i] += (std::popcount(i & j) % 2 ? -1 : 1) * x[i / width * width + j];
    h[i] /= std::sqrt(static_cast<double>(width));
  }
  return h;
}

// Codes of all magnitudes, with `largest` beside rows of the largest one alone. The fourth scale is NaN.
std::unique_ptr<TestMatrix> random_int8(int64_t rows, int64_t cols, uint64_t seed, bool largest) {
  std::unique_ptr<TestMatrix> m(new TestMatrix(int8_matrix(cpu_device(), rows, cols)));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t kind = largest ? i / cols % 3 : 2;
    const int any = static_cast<int>(philox4x32(seed, 1, static_cast<uint64_t>(i))[0] % 255) - 127;
    m->data.view().as<int8_t>()[i] = static_cast<int8_t>(kind == 0 ? 127 : kind == 1 ? -127 : any);
  }
  const std::vector<float> scales = random_normal(rows, seed, 0.01f);
  for (int64_t i = 0; i < rows; ++i) m->scale->view().as<float>()[i] = i == 3 ? NAN : std::abs(scales[i]);
  return m;
}

}  // namespace

TEST_CASE("rotation_width is the largest power of two up to 64 that divides", "[kernels][int8]") {
  const int64_t widths[][2] = {{1, 1},   {6, 2},   {16, 16},  {24, 8},    {48, 16},
                               {64, 64}, {96, 32}, {576, 64}, {4096, 64}, {11008, 64}};
  for (const auto& [cols, width] : widths) CHECK(rotation_width(cols) == width);
}

TEST_CASE("quantize_int8 rounds rotated rows to nearest", "[kernels][int8]") {
  const int64_t K = GENERATE(1, 6, 24, 48, 64, 96, 576, 4096);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  std::vector<float> values = random_values(dtype, 4 * K, 1);
  values[K / 2] *= 32;
  const auto q = quantized(dtype, K, values);
  const std::vector<double> h = rotated({values.begin(), values.end()}, K);
  const int8_t* const codes = codes_of(*q);
  const float* const scales = scales_of(*q);
  std::vector<double> decoded;
  int64_t wrong = 0;
  for (int64_t i = 0; i < 4 * K; ++i) {
    double absmax = 0;
    for (int64_t k = 0; k < K; ++k) absmax = std::max(absmax, std::abs(h[i / K * K + k]));
    wrong += !(std::abs(codes[i] - h[i] * 127 / absmax) <= 0.501);
    wrong += !(std::abs(scales[i / K] * 127 / absmax - 1) <= 1e-6);
    decoded.push_back(codes[i] * double{scales[i / K]});
  }
  // The matrix is its own inverse. A number may have W errors of half a code, divided by sqrt(W).
  const std::vector<double> back = rotated(decoded, K);
  const double bound = 0.501 * std::sqrt(static_cast<double>(rotation_width(K)));
  for (int64_t i = 0; i < 4 * K; ++i) wrong += !(std::abs(back[i] - values[i]) <= bound * scales[i / K]);
  CAPTURE(K, name_of(dtype));
  CHECK(wrong == 0);
}

TEST_CASE("quantize_int8 rounds ties to even", "[kernels][int8]") {
  const auto q = quantized(DType::kF32, 9, {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -126.5f, 3, -2});
  CHECK(std::vector<int>(codes_of(*q), codes_of(*q) + 9) == std::vector<int>{127, 0, 2, 2, 0, -2, -126, 3, -2});
  CHECK(scales_of(*q)[0] == 1);
}

TEST_CASE("quantize_int8 takes zeros and tiny rows, and shows bad numbers in their row alone", "[kernels][int8]") {
  const int64_t K = GENERATE(7, 48, 192);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  std::vector<float> values = random_values(dtype, 8 * K, 2);
  for (int64_t k = 0; k < K; ++k) {
    values[k] = k % 2 == 0 ? 0.0f : -0.0f;
    values[K + k] *= 1e-38f;
    values[2 * K + k] = 1e-45f;
    values[7 * K + k] = 0x1p127f;
  }
  values[3 * K + K / 2] = NAN;
  values[4 * K] = INFINITY;
  values[6 * K - 1] = -INFINITY;
  const auto q = quantized(dtype, K, values);
  const int8_t* const codes = codes_of(*q);
  const float* const scales = scales_of(*q);
  CAPTURE(K, name_of(dtype));
  CHECK(std::all_of(codes, codes + 3 * K, [](int code) { return code == 0; }));
  CHECK((scales[0] == 0 && scales[1] >= 0 && scales[1] < 1e-37f && scales[2] >= 0 && scales[2] < 1e-37f));
  CHECK((std::isnan(scales[3]) && std::isnan(scales[4]) && std::isnan(scales[5])));
  CHECK((scales[6] > 0 && scales[6] < 1));
  if (K != 7) CHECK(!std::isfinite(scales[7]));  // sums of the largest numbers overflow
}

TEST_CASE("products of rows in int8 are near those of the rows", "[kernels][int8]") {
  for (const int64_t K : {24, 48, 96, 576, 2048, 11008}) {
    std::vector<float> x = random_normal(K, 3), y = random_normal(K, 4, 0.02f);
    x[11] = 50;
    const auto a = quantized(DType::kF32, K, x), b = quantized(DType::kF32, K, y);
    const TestTensor out(cpu_device(), DType::kF32, {1, 1});
    gemm_int8(cpu_device(), {.a = *a, .b = *b, .out = out});
    const float a_scale = *scales_of(*a), b_scale = *scales_of(*b);
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < K; ++k) {
      sum += double{x[k]} * y[k];
      squares += std::pow(b_scale * x[k], 2) + std::pow(a_scale * y[k], 2);
    }
    CAPTURE(K);
    CHECK(std::abs(out.host()[0] - sum) <= 1.5 * std::sqrt(squares));  // errors have a deviation of 0.29 codes
  }
}

TEST_CASE("gemm_int8 scales and rounds the exact sum", "[kernels][int8]") {
  const int64_t draw = GENERATE(range(0, 12));
  const auto r = philox4x32(5, 3, static_cast<uint64_t>(draw));
  const int64_t M = draw < 4 ? 4 - draw : 1 + r[0] % 80, N = draw < 4 ? 4 + draw : 1 + r[1] % 80;
  const int64_t K = draw == 0 ? kMostInt8Terms : draw == 1 ? 1 : 1 + r[2] % 600;
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool largest = GENERATE(false, true), accumulate = GENERATE(false, true);
  const auto a = random_int8(M, K, 5, largest), b = random_int8(N, K, 6, largest);
  const std::vector<float> before = random_values(dtype, M * N, 7);
  const TestTensor out(cpu_device(), dtype, {M, N}, before);
  gemm_int8(cpu_device(), {.a = *a, .b = *b, .out = out, .accumulate = accumulate});
  const auto round = [&](float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; };
  const int8_t *const x = codes_of(*a), *const y = codes_of(*b);
  std::vector<float> want;
  for (int64_t i = 0; i < M * N; ++i) {
    int64_t sum = 0;
    for (int64_t k = 0; k < K; ++k) sum += x[i / N * K + k] * y[i % N * K + k];
    const float value = round(static_cast<float>(sum) * scales_of(*a)[i / N] * scales_of(*b)[i % N]);
    want.push_back(accumulate ? round(before[i] + value) : value);
  }
  CAPTURE(largest, accumulate);
  CHECK(first_difference("out", out, TestTensor(cpu_device(), dtype, {M, N}, want)) == "");
  CHECK(out.guard_intact());
}

TEST_CASE("quantize_int8 on another device gives the CPU's bits", "[kernels][int8][devices][slow]") {
  const int64_t R = GENERATE(1, 3, 127, 300);
  const int64_t K = GENERATE(16, 48, 64, 576, 4096, 11008, 28672);
  constexpr float kBad[] = {NAN, INFINITY, -INFINITY, 0x1p127f};
  for (Device* device : other_devices()) {
    static const std::vector<float> normals = random_normal(65521, 10);
    std::vector<float> values(static_cast<size_t>(R * K));
    for (int64_t i = 0; i < R * K; ++i) {
      const int64_t row = i / K, kind = row % 13;
      float& value = values[i] = normals[static_cast<size_t>(i) % normals.size()];
      if (kind == 1) value = std::copysign(0.0f, value);
      if (kind == 2) value = std::ldexp(value, -124 - static_cast<int>(row % 25));  // subnormal ones, too
      if (kind == 3) value = std::ldexp(value, 125);                                // some sums overflow
      if (kind >= 9 && i % K == row * 31 % K) value = kBad[kind - 9];
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const TestTensor x(cpu_device(), dtype, {R, K}, values), x_there(*device, dtype, {R, K}, values);
      const TestMatrix want = int8_matrix(cpu_device(), R, K), got = int8_matrix(*device, R, K);
      quantize_int8(cpu_device(), {.x = x, .out = want});
      quantize_int8(*device, {.x = x_there, .out = got});
      CAPTURE(R, K, name_of(dtype));
      CHECK(first_difference("quantized", got, want) == "");
    }
  }
}

TEST_CASE("gemm_int8 on another device gives the CPU's bits", "[kernels][int8][devices][slow]") {
  const uint64_t draw = GENERATE(range(0, 18));
  const std::vector<std::array<int64_t, 3>> given = {{1, 8, 16},      {128, 128, 128}, {700, 1496, 4992},
                                                     {257, 264, 144}, {5, 24, 11008},  {4, 8, kMostInt8Terms}};
  const auto r = philox4x32(11, 3, draw);
  const std::array<int64_t, 3> random = {1 + r[0] % 700, 8 * (1 + r[1] % 187), 16 * (1 + r[2] % 312)};
  const auto [M, N, K] = draw < given.size() ? given[draw] : random;
  for (Device* device : other_devices()) {
    if (!is_hopper(*device)) continue;
    const auto a = random_int8(M, K, 2 * draw, draw == 5), b = random_int8(N, K, 2 * draw + 1, draw == 5);
    const auto a_there = copy_on(*device, *a), b_there = copy_on(*device, *b);
    const std::vector<float> before = random_bf16(M * N, 14);
    for (const bool accumulate : {false, true}) {
      const TestTensor want(cpu_device(), DType::kBF16, {M, N}, before), got(*device, DType::kBF16, {M, N}, before);
      gemm_int8(cpu_device(), {.a = *a, .b = *b, .out = want, .accumulate = accumulate});
      gemm_int8(*device, {.a = *a_there, .b = *b_there, .out = got, .accumulate = accumulate});
      CAPTURE(M, N, K, accumulate);
      CHECK(first_difference("out", got, want) == "");
      CHECK(got.guard_intact());
    }
  }
}

TEST_CASE("int8 ops refuse shapes and formats that do not fit", "[kernels][int8]") {
  for (Device* device : devices()) {
    const auto tensor = [&](DType dtype, int64_t rows, int64_t cols) {
      return std::make_unique<TestTensor>(*device, dtype, std::initializer_list<int64_t>{rows, cols});
    };
    const auto check_refused = [&](const ScaledView& data, const ScaledView& weight, const TensorView& out) {
      CHECK_THROWS_AS(gemm_int8(*device, {.a = data, .b = weight, .out = out}), Error);
    };
    const TestMatrix a = int8_matrix(*device, 16, 64), b = int8_matrix(*device, 24, 64);
    const TestMatrix narrow = int8_matrix(*device, 24, 48), wide = int8_matrix(*device, 8, kMostInt8Terms + 16);
    const auto x = tensor(DType::kBF16, 16, 64), out = tensor(DType::kBF16, 16, 24),
               bytes = tensor(DType::kU8, 16, 64), few = tensor(DType::kF32, 15, 1),
               two = tensor(DType::kF32, 16, 2), bf16 = tensor(DType::kBF16, 16, 1);
    std::vector<ScaledView> wrong = {*x, a.data, {*bytes, *a.scale, Scaling::kGroup, 64}};
    wrong.emplace_back(a.data, *two, Scaling::kGroup, 32);
    for (const auto* scale : {&few, &two, &bf16}) wrong.emplace_back(a.data, **scale, Scaling::kGroup, 64);
    for (const ScaledView& view : wrong) {
      CAPTURE(device->name(), describe(view));
      CHECK_THROWS_AS(quantize_int8(*device, {.x = *x, .out = view}), Error);
      check_refused(view, b, *out);
    }
    CHECK_THROWS_AS(quantize_int8(*device, {.x = *x, .out = b}), Error);
    CHECK_THROWS_AS(quantize_int8(*device, {.x = *tensor(DType::kBF16, 16, 48), .out = a}), Error);
    CHECK_THROWS_AS(quantize_int8(*device, {.x = *tensor(DType::kI32, 16, 64), .out = a}), Error);
    check_refused(a, narrow, *out);
    check_refused(b, a, *out);
    check_refused(a, b, *tensor(DType::kI32, 16, 24));
    check_refused(wide, wide, *tensor(DType::kBF16, 8, 8));
    if (device->kind() == DeviceKind::kCpu) continue;
    check_refused(int8_matrix(*device, 8, 24), int8_matrix(*device, 8, 24), *tensor(DType::kBF16, 8, 8));
    check_refused(a, int8_matrix(*device, 4, 64), *tensor(DType::kBF16, 16, 4));
    check_refused(a, b, *tensor(DType::kF32, 16, 24));
  }
}
