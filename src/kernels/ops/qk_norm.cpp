#include "kernels/ops/qk_norm.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

// What both ops have: x, rstd and the weights.
template <typename Args>
void check_common(std::string_view op, const Args& a) {
  if (a.kind == QkNormKind::kNone) throw_internal("{}: kind is none, wanted per_head or full", op);
  if (a.num_heads <= 0 || a.num_kv_heads <= 0 || a.num_heads % a.num_kv_heads != 0) {
    throw_internal("{}: {} query heads do not share {} key/value heads evenly", op, a.num_heads, a.num_kv_heads);
  }
  const int64_t heads = a.num_heads + 2 * a.num_kv_heads, T = a.x.dim[0], D = a.x.dim[1] / heads;
  check_tensor(op, "x", a.x, {T, heads * D}, {DType::kF32, DType::kBF16});
  const int64_t groups = qk_norm_groups(a.kind, a.num_heads, a.num_kv_heads);
  check_tensor(op, "rstd", a.rstd, {T, groups}, {DType::kF32});
  const bool full = a.kind == QkNormKind::kFull;
  check_tensor(op, "q_weight", a.q_weight, {full ? a.num_heads * D : D}, {DType::kF32, DType::kBF16});
  check_tensor(op, "k_weight", a.k_weight, {full ? a.num_kv_heads * D : D}, {a.q_weight.dtype});
}

// The columns of queries and keys, of all.
double normalized_share(int64_t num_heads, int64_t num_kv_heads) {
  return static_cast<double>(num_heads + num_kv_heads) / static_cast<double>(num_heads + 2 * num_kv_heads);
}

}  // namespace

int64_t qk_norm_groups(QkNormKind kind, int64_t num_heads, int64_t num_kv_heads) {
  return kind == QkNormKind::kPerHead ? num_heads + num_kv_heads : 2;
}

void qk_norm_forward(Device& device, const QkNormForward& a) {
  constexpr std::string_view kOp = "qk_norm_forward";
  check_common(kOp, a);
  check_tensor(kOp, "out", a.out, {a.x.dim[0], a.x.dim[1]}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  if (a.out.data == a.x.data) throw_internal("{}: out is the memory of x, wanted other memory", kOp);
  PARKA_DISPATCH(qk_norm_forward, device, a);
}

void qk_norm_backward(Device& device, const QkNormBackward& a) {
  constexpr std::string_view kOp = "qk_norm_backward";
  check_common(kOp, a);
  check_tensor(kOp, "d_qkv", a.d_qkv, {a.x.dim[0], a.x.dim[1]}, {a.x.dtype});
  check_tensor(kOp, "d_q_weight", a.d_q_weight, {a.q_weight.dim[0]}, {DType::kF32, DType::kBF16});
  check_tensor(kOp, "d_k_weight", a.d_k_weight, {a.k_weight.dim[0]}, {a.d_q_weight.dtype});
  if (!a.d_qkv_amax.empty()) check_tensor(kOp, "d_qkv_amax", a.d_qkv_amax, {1}, {DType::kF32});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(qk_norm_backward, device, a);
}

OpCost cost_of(const QkNormForward& a) { return moved(all_bytes(a.x, a.out, a.q_weight, a.k_weight, a.rstd), a.x); }
TensorView output_of(const QkNormForward& a) { return a.out; }

OpCost cost_of(const QkNormBackward& a) {
  const double share = normalized_share(a.num_heads, a.num_kv_heads);
  const double values = a.d_qkv_amax.empty() ? 0.0 : (1 - share) * bytes_of(a.d_qkv);  // only read
  return moved(share * (bytes_of(a.x) + 2 * bytes_of(a.d_qkv)) + values +
                   all_bytes(a.rstd, a.q_weight, a.k_weight, a.d_qkv_amax) +
                   2 * all_bytes(a.d_q_weight, a.d_k_weight),
               a.x);
}
TensorView output_of(const QkNormBackward& a) { return a.d_qkv; }
int64_t workspace_of(const QkNormBackward& a) {
  return cuda::norm_backward_workspace_bytes(a.q_weight.dim[0] + a.k_weight.dim[0]);
}

}  // namespace parka
