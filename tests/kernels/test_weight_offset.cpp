// Norms with an offset of their weights against norms whose weights have it already, bit for bit, on every device.
#include <algorithm>
#include <cmath>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/norm/qk_norm.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};
const Format kTensor{DType::kE4M3, Scaling::kTensor};

// Multiples of 1 / 128 around 0: bf16 holds them, and holds them with 1 added.
std::vector<float> offsets_of_weights(int64_t count, uint64_t seed) {
  std::vector<float> w = random_normal(count, seed, 0.3f);
  for (float& v : w) v = std::round(std::clamp(v, -0.9f, 0.9f) * 128) / 128;
  return w;
}

std::vector<float> plus_one(std::vector<float> w) {
  for (float& v : w) v += 1;
  return w;
}

// What all three ops leave, with one form of the weight.
std::vector<std::vector<std::byte>> run_norms(Device& device, DType dtype, const Format* x_format,
                                              const Format& y_format, int64_t rows, int64_t cols,
                                              const std::vector<float>& weights, float offset) {
  const TestTensor residual(device, dtype, {rows, cols}, random_bf16(rows * cols, 1));
  const TestTensor weight(device, dtype, {cols}, weights), sum(device, dtype, {rows, cols});
  const TestTensor rstd(device, DType::kF32, {rows}), d_out(device, dtype, {rows, cols});
  const TestTensor d_y(device, dtype, {rows, cols}, random_bf16(rows * cols, 2));
  const TestTensor d_weight(device, DType::kF32, {cols}, std::vector<float>(static_cast<size_t>(cols)));
  const TestMatrix x = (x_format ? *x_format : kGroup16).make(device, rows, cols);
  const TestMatrix y = y_format.make(device, rows, cols), again = y_format.make(device, rows, cols);
  norm_forward(device, {.kind = NormKind::kRmsNorm,
                        .eps = 1e-3f,
                        .residual = residual,
                        .weight = weight,
                        .residual_out = sum,
                        .x = x_format ? x.view() : ScaledView(),
                        .y = y,
                        .rstd = rstd,
                        .weight_offset = offset});
  const ScaledView read = x_format ? x.view() : ScaledView(sum);
  ScaledView again_view = again;
  if (y_format.scaling == Scaling::kTensor) again_view.scale = y.scale->view();
  norm_recompute(device, {.kind = NormKind::kRmsNorm,
                          .x = read,
                          .weight = weight,
                          .rstd = rstd,
                          .y = again_view,
                          .weight_offset = offset});
  CHECK((again.data.bytes() == y.data.bytes()));
  norm_backward(device, {.kind = NormKind::kRmsNorm,
                         .x = read,
                         .weight = weight,
                         .rstd = rstd,
                         .d_y = d_y,
                         .d_residual_out = d_out,
                         .d_weight = d_weight,
                         .weight_offset = offset});
  return {y.data.bytes(), d_out.bytes(), d_weight.bytes()};
}

std::vector<std::vector<std::byte>> run_qk_norm(Device& device, QkNormKind kind, DType dtype, int64_t D,
                                                const std::vector<float>& q, const std::vector<float>& k,
                                                float offset) {
  constexpr int64_t kTokens = 37, kHeads = 4, kKvHeads = 2;
  const int64_t width = (kHeads + 2 * kKvHeads) * D, groups = qk_norm_groups(kind, kHeads, kKvHeads);
  const auto q_cols = static_cast<int64_t>(q.size()), k_cols = static_cast<int64_t>(k.size());
  const TestTensor x(device, dtype, {kTokens, width}, random_bf16(kTokens * width, 3));
  const TestTensor q_weight(device, dtype, {q_cols}, q), k_weight(device, dtype, {k_cols}, k);
  const TestTensor out(device, dtype, {kTokens, width}), rstd(device, DType::kF32, {kTokens, groups});
  const TestTensor d_qkv(device, dtype, {kTokens, width}, random_bf16(kTokens * width, 4));
  const TestTensor d_q(device, DType::kF32, {q_cols}, std::vector<float>(q.size()));
  const TestTensor d_k(device, DType::kF32, {k_cols}, std::vector<float>(k.size()));
  const TestTensor cos_sin(device, DType::kF32, {kTokens, D}, rope_table(kTokens, D, 100.0));
  qk_norm_rope_forward(device, {.kind = kind,
                                .x = x,
                                .q_weight = q_weight,
                                .k_weight = k_weight,
                                .cos_sin = cos_sin,
                                .num_heads = kHeads,
                                .num_kv_heads = kKvHeads,
                                .eps = 1e-3f,
                                .saved = {},
                                .out = out,
                                .rstd = rstd,
                                .weight_offset = offset});
  qk_norm_backward(device, {.kind = kind,
                            .x = x,
                            .rstd = rstd,
                            .q_weight = q_weight,
                            .k_weight = k_weight,
                            .d_qkv = d_qkv,
                            .d_q_weight = d_q,
                            .d_k_weight = d_k,
                            .num_heads = kHeads,
                            .num_kv_heads = kKvHeads,
                            .weight_offset = offset});
  return {out.bytes(), d_qkv.bytes(), d_q.bytes(), d_k.bytes()};
}

}  // namespace

TEST_CASE("an offset of a norm's weight is as if the weight had it", "[kernels][norm]") {
  const auto [rows, cols] = GENERATE(table<int64_t, int64_t>({{3, 7}, {33, 48}, {130, 768}, {5, 11008}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const std::vector<float> weights = offsets_of_weights(cols, 5);
  for (Device* device : devices()) {
    for (const Format* x_format : {static_cast<const Format*>(nullptr), &kGroup16}) {
      for (const Format& y_format : {Format{dtype}, kTensor, kGroup16}) {
        CAPTURE(device->name(), rows, cols, name_of(dtype), x_format != nullptr, int(y_format.scaling));
        const auto with = run_norms(*device, dtype, x_format, y_format, rows, cols, weights, 1);
        CHECK(with == run_norms(*device, dtype, x_format, y_format, rows, cols, plus_one(weights), 0));
        CHECK(with != run_norms(*device, dtype, x_format, y_format, rows, cols, weights, 0));
      }
    }
  }
}

TEST_CASE("an offset of the weights of queries' and keys' norms is as if they had it", "[kernels][qk_norm]") {
  const QkNormKind kind = GENERATE(QkNormKind::kPerHead, QkNormKind::kFull);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const int64_t D : {6, 64, 256, 1024}) {
    const bool full = kind == QkNormKind::kFull;
    const std::vector<float> q = offsets_of_weights(full ? 4 * D : D, 6),
                             k = offsets_of_weights(full ? 2 * D : D, 7);
    for (Device* device : devices()) {
      CAPTURE(device->name(), int(kind), name_of(dtype), D);
      const auto with = run_qk_norm(*device, kind, dtype, D, q, k, 1);
      CHECK(with == run_qk_norm(*device, kind, dtype, D, plus_one(q), plus_one(k), 0));
      CHECK(with != run_qk_norm(*device, kind, dtype, D, q, k, 0));
    }
  }
}
