#include "kernels/op_cost.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parka {
namespace {

double bytes_of(const TensorView& t) { return t.empty() ? 0.0 : static_cast<double>(t.bytes()); }
double bytes_of(const ScaledView& t) { return bytes_of(t.data) + bytes_of(t.scale); }
double bytes_of(const MomentView& m) { return bytes_of(m.values) + bytes_of(m.amax) + bytes_of(m.exponent); }

template <typename... Tensors>
double all_bytes(const Tensors&... tensors) {
  return (bytes_of(tensors) + ...);
}

std::string shape_of(const TensorView& t) {
  return fmt::format("{}", fmt::join(t.dim.begin(), t.dim.begin() + t.rank, " x "));
}

// A tensor-wide scale is known only when every number has been seen, so what the codes are made of is read again.
bool read_twice(const ScaledView& out, const ScaledView& out_t = {}) {
  return (out.empty() ? out_t : out).scaling == Scaling::kTensor;
}

OpCost moved(double bytes, const TensorView& shape) { return {bytes, 0.0, shape_of(shape)}; }

// The part of a fused QKV buffer that rope turns: all but the value heads.
double turned_bytes(const TensorView& qkv, int64_t heads, int64_t kv_heads) {
  return bytes_of(qkv) * static_cast<double>(heads + kv_heads) / static_cast<double>(heads + 2 * kv_heads);
}

// FLOP of q k^T and p v over the causal half.
double attention_flop(const TensorView& out, int64_t sequence_length) {
  return 2.0 * static_cast<double>(out.numel()) * static_cast<double>(sequence_length);
}

}  // namespace

OpCost cost_of(const EmbeddingForward& a) { return moved(bytes_of(a.ids) + 2 * bytes_of(a.out), a.out); }

// Every row of d_out may have an id of its own, whose row of d_table is then read and written.
OpCost cost_of(const EmbeddingBackward& a) {
  const double rows = static_cast<double>(std::min(a.d_out.dim[0], a.d_table.dim[0]));
  const double row_bytes = static_cast<double>(a.d_table.dim[1] * size_of(a.d_table.dtype));
  return moved(all_bytes(a.order, a.d_out) + 2 * rows * row_bytes, a.d_out);
}

OpCost cost_of(const NormForward& a) {
  const bool adds = !a.branch.empty() || a.residual_out.data != a.residual.data;
  const double again = a.x.empty() ? bytes_of(a.residual_out) : bytes_of(a.x);
  return moved(all_bytes(a.residual, a.branch, a.weight, a.x, a.y, a.y_t, a.mean, a.rstd) +
                   (adds ? bytes_of(a.residual_out) : 0.0) + (read_twice(a.y) ? again : 0.0),
               a.residual);
}

OpCost cost_of(const NormRecompute& a) {
  return moved(all_bytes(a.x, a.weight, a.mean, a.rstd, a.y, a.y_t), a.x.data);
}

OpCost cost_of(const NormBackward& a) {
  return moved(all_bytes(a.x, a.weight, a.mean, a.rstd, a.d_y, a.d_residual, a.d_residual_out, a.d_quantized,
                         a.d_quantized_t) +
                   2 * bytes_of(a.d_weight) +
                   (read_twice(a.d_quantized, a.d_quantized_t) ? bytes_of(a.d_residual_out) : 0.0),
               a.x.data);
}

OpCost cost_of(const Gemm& a) {
  const int64_t M = a.out.dim[0], N = a.out.dim[1], K = a.a.data.dim[a.a_transposed ? 0 : 1];
  return {all_bytes(a.a, a.b) + (a.accumulate ? 2 : 1) * bytes_of(a.out),
          2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
          fmt::format("{} x {} x {} {}{}{} {}{}", M, N, K, name_of(a.a.data.dtype), a.a_transposed ? " T" : " N",
                      a.b_transposed ? "T" : "N", name_of(a.out.dtype), a.accumulate ? " +=" : "")};
}

OpCost cost_of(const RopeForward& a) {
  // What is saved is all of qkv, and all of it becomes what the codes decode to.
  if (!a.saved.empty()) return moved(2 * bytes_of(a.qkv) + bytes_of(a.saved), a.qkv);
  return moved(2 * turned_bytes(a.qkv, a.num_heads, a.num_kv_heads), a.qkv);
}

OpCost cost_of(const AttentionForward& a) {
  return {all_bytes(a.qkv, a.out, a.lse), attention_flop(a.out, a.sequence_length), shape_of(a.out)};
}

OpCost cost_of(const AttentionBackward& a) {
  return {all_bytes(a.qkv, a.out, a.d_out, a.lse, a.cos_sin, a.d_qkv),
          2.5 * attention_flop(a.out, a.sequence_length), shape_of(a.out)};
}

OpCost cost_of(const CacheAppend& a) {
  const double heads = static_cast<double>(a.num_heads + 2 * a.num_kv_heads);
  return moved(2 * bytes_of(a.qkv) * 2.0 * static_cast<double>(a.num_kv_heads) / heads, a.qkv);
}

OpCost cost_of(const AttentionDecode& a) {
  const double keys = static_cast<double>(a.max_keys);
  const double key_bytes = static_cast<double>(a.cache.dim[2] * size_of(a.cache.dtype));
  return {2 * bytes_of(a.out) + static_cast<double>(a.qkv.dim[0]) * keys * key_bytes,
          4.0 * static_cast<double>(a.out.numel()) * keys, shape_of(a.out)};
}

OpCost cost_of(const SwigluForward& a) {
  return moved(all_bytes(a.up_gate_plain, a.up_gate, a.silu, a.product, a.product_t) +
                   (read_twice(a.product, a.product_t) ? all_bytes(a.up_gate, a.silu) : 0.0),
               a.product.data);
}

OpCost cost_of(const SwigluBackward& a) {
  return moved(all_bytes(a.up_gate, a.silu, a.d_product, a.d_up_gate, a.d_up_gate_t, a.product, a.product_t) +
                   (read_twice(a.d_up_gate, a.d_up_gate_t) ? all_bytes(a.up_gate, a.silu, a.d_product) : 0.0),
               a.up_gate.data);
}

OpCost cost_of(const Quantize& a) {
  const bool finds_scale = read_twice(a.out, a.out_t) && !a.scale_given && a.amax.empty();
  return moved(all_bytes(a.x, a.out, a.out_t) + (finds_scale ? bytes_of(a.x) : 0.0), a.x.data);
}

OpCost cost_of(const CrossEntropy& a) {
  return moved((a.write_gradient ? 2 : 1) * bytes_of(a.logits) + all_bytes(a.targets, a.loss, a.z_loss_value),
               a.logits);
}

OpCost cost_of(const SumOfSquares& a) {
  OpCost cost;
  for (const TensorView& part : a.parts) cost.bytes += bytes_of(part);
  cost.shape = fmt::format("{} tensors", a.parts.size());
  return cost;
}

OpCost cost_of(const ClipCoefficient& a) { return moved(0.0, a.coefficient); }
OpCost cost_of(const AddSum& a) { return moved(bytes_of(a.x), a.x); }
OpCost cost_of(const Add& a) { return moved(bytes_of(a.x) + 2 * bytes_of(a.total), a.x); }
OpCost cost_of(const Amax& a) { return moved(bytes_of(a.x), a.x); }
OpCost cost_of(const BitHash& a) { return moved(bytes_of(a.x), a.x); }

OpCost cost_of(const AdamwStep& a) {
  // With a master apart, the weight is only written.
  const bool weight_read = a.master_form != MasterForm::kFp32;
  return moved((weight_read ? 2 : 1) * bytes_of(a.weight) + 2 * bytes_of(a.master) + bytes_of(a.gradient) +
                   2 * bytes_of(a.exp_avg) + 2 * bytes_of(a.exp_avg_sq),
               a.weight);
}

OpCost cost_of(const MomentEncode& a) { return moved(bytes_of(a.values) + bytes_of(a.moment), a.values); }
OpCost cost_of(const MomentDecode& a) { return moved(bytes_of(a.values) + bytes_of(a.moment), a.values); }

OpCost cost_of(const QuantizationStatistics& a) {
  const double read = static_cast<double>(a.q.data.numel() * size_of(a.x.dtype));
  return moved(read + all_bytes(a.q, a.totals), a.q.data);
}

OpCost cost_of(const MomentStatistics& a) {
  return moved(all_bytes(a.moment.amax, a.moment.exponent, a.counts, a.amax), a.moment.amax);
}

}  // namespace parka
