#include "kernels/ops/attention/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/op/define.h"

namespace parka {
namespace {

// How much of a pair's frequency stays as it is; the rest is divided by the factor.
double llama3_share(double frequency, const RopeScaling& scaling) {
  const double low = scaling.low_frequency_factor, high = scaling.high_frequency_factor;
  PARKA_REQUIRE(low < high && scaling.original_length > 0);
  const double turns =
      static_cast<double>(scaling.original_length) * frequency / (2 * std::numbers::pi);  // over that length
  return std::clamp((turns - low) / (high - low), 0.0, 1.0);
}

// The same for YaRN: of each pair.
std::vector<double> yarn_shares(int64_t head_dim, double theta, const RopeScaling& scaling) {
  PARKA_REQUIRE(scaling.beta_slow > 0 && scaling.beta_slow <= scaling.beta_fast && scaling.original_length > 0);
  const double D = static_cast<double>(head_dim), length = static_cast<double>(scaling.original_length);
  const auto pair_of = [&](double turns) {
    return D * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = pair_of(scaling.beta_fast), high = pair_of(scaling.beta_slow);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, D - 1);
  if (low == high) high += 0.001;  // as in transformers
  std::vector<double> shares;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    shares.push_back(1 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0));
  }
  return shares;
}

// Radians per position of each pair.
std::vector<double> frequencies_of(int64_t head_dim, double theta, const RopeScaling& scaling) {
  PARKA_REQUIRE(scaling.kind == RopeScalingKind::kNone || scaling.factor > 0);
  std::vector<double> frequencies, shares;
  if (scaling.kind == RopeScalingKind::kYarn) shares = yarn_shares(head_dim, theta, scaling);
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
    const double frequency = std::pow(theta, exponent);
    double share = 1;
    switch (scaling.kind) {
      case RopeScalingKind::kNone: break;
      case RopeScalingKind::kLlama3: share = llama3_share(frequency, scaling); break;
      case RopeScalingKind::kLinear: share = 0; break;
      case RopeScalingKind::kYarn: share = shares[static_cast<size_t>(i)]; break;
    }
    frequencies.push_back(share == 1 ? frequency : frequency * (share + (1 - share) / scaling.factor));
  }
  return frequencies;
}

// The factor of cosines and sines.
double amplitude_of(const RopeScaling& scaling) {
  if (scaling.kind != RopeScalingKind::kYarn) return 1;
  return scaling.attention_factor > 0 ? scaling.attention_factor
                                      : 0.1 * std::log(std::max(scaling.factor, 1.0)) + 1;
}

// The part of a fused QKV buffer that is rotated: all but the value heads.
double rotated_bytes(const TensorView& qkv, int64_t heads, int64_t kv_heads) {
  return bytes_of(qkv) * static_cast<double>(heads + kv_heads) / static_cast<double>(heads + 2 * kv_heads);
}

}  // namespace

void check_rope_forward(const RopeForward& a) {
  const int64_t T = a.qkv.dim[0], S = a.cos_sin.dim[0], D = a.cos_sin.dim[1];
  if (a.num_heads <= 0 || a.num_kv_heads <= 0 || a.num_heads % a.num_kv_heads != 0) {
    throw_internal("rope_forward: {} query heads do not share {} key/value heads evenly", a.num_heads,
                   a.num_kv_heads);
  }
  check_tensor("rope_forward", "cos_sin", a.cos_sin, {S, D}, {DType::kF32});
  if (D <= 0 || D % 2 != 0 || (S == 0 && T > 0)) {
    throw_internal("rope_forward: cos_sin is {}, wanted at least one row and an even width", describe(a.cos_sin));
  }
  check_tensor("rope_forward", "qkv", a.qkv, {T, (a.num_heads + 2 * a.num_kv_heads) * D},
               {DType::kF32, DType::kBF16});
  if (!a.saved.empty()) {
    check_matrix("rope_forward", "saved", a.saved, a.qkv.dim[0], a.qkv.dim[1]);
    if (a.saved.scaling != Scaling::kGroup) {
      throw_internal("rope_forward: saved is {}, wanted fp8 with a scale per group", describe(a.saved));
    }
  }
}

void rope_forward(Device& device, const RopeForward& a) {
  check_rope_forward(a);
  if (a.qkv.numel() == 0) return;
  PARKA_DISPATCH(rope_forward, device, a);
}

std::vector<float> rope_table(int64_t sequence_length, int64_t head_dim, double theta, const RopeScaling& scaling) {
  PARKA_REQUIRE(sequence_length >= 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0);
  const int64_t half = head_dim / 2;
  const std::vector<double> frequencies = frequencies_of(head_dim, theta, scaling);
  const double amplitude = amplitude_of(scaling);
  std::vector<float> table(static_cast<size_t>(sequence_length * head_dim));
  for (int64_t position = 0; position < sequence_length; ++position) {
    float* row = table.data() + position * head_dim;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      row[i] = static_cast<float>(amplitude * std::cos(angle));
      row[i + half] = static_cast<float>(amplitude * std::sin(angle));
    }
  }
  return table;
}

OpCost cost_of(const RopeForward& a) {
  // All of qkv is saved, and all of it becomes what the codes decode to.
  if (!a.saved.empty()) return moved(2 * bytes_of(a.qkv) + bytes_of(a.saved), a.qkv);
  return moved(2 * rotated_bytes(a.qkv, a.num_heads, a.num_kv_heads), a.qkv);
}

void rope_projection(Device& device, const RopeProjection& a) {
  const TensorView &out = a.projection.out, &qkv = a.rope.qkv;
  if (qkv.empty() || out.data != qkv.data || out.dtype != qkv.dtype || a.projection.accumulate ||
      a.rope.saved.empty()) {
    throw_internal("rope_projection: the projection is to leave its output, {}, for rope to save", describe(out));
  }
  if (!suits_one_kernel(a)) {
    run_as_two(device, a);
    return;
  }
  check_gemm(a.projection);
  check_rope_forward(a.rope);
  if (qkv.numel() == 0) return;
  record_product(device, a.projection);
  PARKA_DISPATCH(rope_projection, device, a);
}

OpCost cost_of(const RopeProjection& a) {
  OpCost cost = cost_of(a.projection);
  // The projection is neither written nor read.
  cost.bytes += cost_of(a.rope).bytes - 2 * bytes_of(a.projection.out);
  return cost;
}
int64_t workspace_of(const RopeProjection& a) { return workspace_of(a.projection); }

bool suits_one_kernel(const RopeProjection& a) {
  const ScaledView& saved = a.rope.saved;
  return suits_float8_tiles(a.projection) && saved.data.dtype == DType::kE4M3 && saved.scaling == Scaling::kGroup;
}

bool runs_as_one(const Device& device, const RopeProjection& a) {
  return suits_one_kernel(a) && device.fuses(RopeProjection::kName, a.projection.out.numel());
}

void run_as_two(Device& device, const RopeProjection& a) {
  gemm(device, a.projection);
  rope_forward(device, a.rope);
}

}  // namespace parka
