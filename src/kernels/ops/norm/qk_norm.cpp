#include "kernels/ops/norm/qk_norm.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

// A plain matrix, or one in FP8 with a scale per group.
void check_input(std::string_view op, const ScaledView& x, int64_t rows, int64_t cols) {
  if (x.scaling == Scaling::kNone) {
    check_tensor(op, "x", x.data, {rows, cols}, {DType::kF32, DType::kBF16});
    return;
  }
  check_matrix(op, "x", x, rows, cols);
  if (x.scaling != Scaling::kGroup)
    throw_internal("{}: x is {}, wanted it plain or with a scale per group", op, describe(x));
}

// Checks the tensors of both ops: x, rstd and the weights. Returns the columns of a head.
template <typename Args>
int64_t check_common(std::string_view op, const Args& a) {
  if (a.kind == QkNormKind::kNone) throw_internal("{}: kind is none, wanted per_head or full", op);
  if (a.num_heads <= 0 || a.num_kv_heads <= 0 || a.num_heads % a.num_kv_heads != 0) {
    throw_internal("{}: {} query heads do not share {} key/value heads evenly", op, a.num_heads, a.num_kv_heads);
  }
  const int64_t heads = a.num_heads + 2 * a.num_kv_heads, T = a.x.num_rows(), D = a.x.num_cols() / heads;
  check_input(op, a.x, T, heads * D);
  const int64_t groups = qk_norm_groups(a.kind, a.num_heads, a.num_kv_heads);
  check_tensor(op, "rstd", a.rstd, {T, groups}, {DType::kF32});
  const bool full = a.kind == QkNormKind::kFull;
  check_tensor(op, "q_weight", a.q_weight, {full ? a.num_heads * D : D}, {DType::kF32, DType::kBF16});
  check_tensor(op, "k_weight", a.k_weight, {full ? a.num_kv_heads * D : D}, {a.q_weight.dtype});
  return D;
}

// The columns of queries and keys, of all.
double normalized_share(int64_t num_heads, int64_t num_kv_heads) {
  return static_cast<double>(num_heads + num_kv_heads) / static_cast<double>(num_heads + 2 * num_kv_heads);
}

}  // namespace

int64_t qk_norm_groups(QkNormKind kind, int64_t num_heads, int64_t num_kv_heads) {
  return kind == QkNormKind::kPerHead ? num_heads + num_kv_heads : 2;
}

void qk_norm_rope_forward(Device& device, const QkNormRopeForward& a) {
  constexpr std::string_view kOp = "qk_norm_rope_forward";
  const int64_t D = check_common(kOp, a), T = a.x.num_rows(), S = a.cos_sin.dim[0];
  check_tensor(kOp, "cos_sin", a.cos_sin, {S, D}, {DType::kF32});
  if (D % 2 != 0 || (S == 0 && T > 0)) {
    throw_internal("{}: cos_sin is {}, wanted at least one row and an even width", kOp, describe(a.cos_sin));
  }
  check_tensor(kOp, "out", a.out, {T, a.x.num_cols()}, {DType::kF32, DType::kBF16});
  if (a.x.scaling == Scaling::kNone && a.out.dtype != a.x.data.dtype) {
    throw_internal("{}: out is {}, wanted the format of x", kOp, describe(a.out));
  }
  if (!a.saved.empty()) {
    check_matrix(kOp, "saved", a.saved, T, a.x.num_cols());
    if (a.saved.scaling != Scaling::kGroup || a.x.scaling != Scaling::kNone) {
      throw_internal("{}: x is {} and saved {}, wanted x plain and saved in fp8 with a scale per group", kOp,
                     describe(a.x), describe(a.saved));
    }
  }
  if (a.x.data.numel() == 0) return;
  PARKA_DISPATCH(qk_norm_rope_forward, device, a);
}

void qk_norm_backward(Device& device, const QkNormBackward& a) {
  constexpr std::string_view kOp = "qk_norm_backward";
  check_common(kOp, a);
  check_tensor(kOp, "d_qkv", a.d_qkv, {a.x.num_rows(), a.x.num_cols()}, {DType::kF32, DType::kBF16});
  if (a.x.scaling == Scaling::kNone && a.d_qkv.dtype != a.x.data.dtype) {
    throw_internal("{}: d_qkv is {}, wanted the format of x", kOp, describe(a.d_qkv));
  }
  if (!a.d_q_weight.empty()) {
    check_tensor(kOp, "d_q_weight", a.d_q_weight, {a.q_weight.dim[0]}, {DType::kF32, DType::kBF16});
  }
  if (!a.d_k_weight.empty()) {
    check_tensor(kOp, "d_k_weight", a.d_k_weight, {a.k_weight.dim[0]}, {DType::kF32, DType::kBF16});
  }
  if (!a.d_q_weight.empty() && !a.d_k_weight.empty()) {
    check_tensor(kOp, "d_k_weight", a.d_k_weight, {a.k_weight.dim[0]}, {a.d_q_weight.dtype});
  }
  if (!a.d_qkv_amax.empty()) check_tensor(kOp, "d_qkv_amax", a.d_qkv_amax, {1}, {DType::kF32});
  if (a.x.data.numel() == 0) return;
  PARKA_DISPATCH(qk_norm_backward, device, a);
}

OpCost cost_of(const QkNormRopeForward& a) {
  return moved(bytes_of(a.x) + bytes_of(a.saved) + all_bytes(a.out, a.q_weight, a.k_weight, a.rstd), a.out);
}

OpCost cost_of(const QkNormBackward& a) {
  const double share = normalized_share(a.num_heads, a.num_kv_heads);
  const double values = a.d_qkv_amax.empty() ? 0.0 : (1 - share) * bytes_of(a.d_qkv);  // only read
  return moved(share * (bytes_of(a.x) + 2 * bytes_of(a.d_qkv)) + values +
                   all_bytes(a.rstd, a.q_weight, a.k_weight, a.d_qkv_amax) +
                   2 * all_bytes(a.d_q_weight, a.d_k_weight),
               a.d_qkv);
}
int64_t workspace_of(const QkNormBackward& a) {
  return cuda::norm_backward_workspace_bytes(a.q_weight.dim[0] + a.k_weight.dim[0]);
}

}  // namespace parka
