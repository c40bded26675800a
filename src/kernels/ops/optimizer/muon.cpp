#include "kernels/ops/optimizer/muon.h"

#include <algorithm>

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"
#include "kernels/ops/optimizer/step_tensors.h"

namespace parka {

std::span<const NewtonSchulzStep> newton_schulz_steps(Orthogonalization orthogonalization) {
  static constexpr NewtonSchulzStep kStep{3.4445f, -4.7750f, 2.0315f};
  static constexpr NewtonSchulzStep kEqualSteps[] = {kStep, kStep, kStep, kStep, kStep};
  // For singular values from 1e-3 on, with a cushion of 2 and X below 1 by 2 %, as nanochat has them.
  static constexpr NewtonSchulzStep kPolarSteps[] = {
      {8.156554524902461f, -22.48329292557795f, 15.878769915207462f},
      {4.042929935166739f, -2.808917465908714f, 0.5000178451051316f},
      {3.8916678022926607f, -2.772484153217685f, 0.5060648178503393f},
      {3.285753657755655f, -2.3681294933425376f, 0.46449024233003106f},
      {2.3465413258596377f, -1.7097828382687081f, 0.42323551169305323f}};
  if (orthogonalization == Orthogonalization::kPolarExpress) return kPolarSteps;
  return kEqualSteps;
}

float orthogonalization_safety(Orthogonalization orthogonalization) {
  return orthogonalization == Orthogonalization::kPolarExpress ? 1.02f : 1.0f;
}

void muon_momentum(Device& device, const MuonMomentum& a) {
  const int64_t N = a.gradient.numel();
  check_tensor("muon_momentum", "gradient", a.gradient, {N}, {DType::kF32, DType::kBF16});
  check_moment("muon_momentum", "momentum", a.momentum, N);
  check_tensor("muon_momentum", "grad_scale", a.grad_scale, {1}, {DType::kF32});
  check_tensor("muon_momentum", "direction", a.direction, {N}, {DType::kBF16});
  if (N == 0) return;
  PARKA_DISPATCH(muon_momentum, device, a);
}

void orthogonalize(Device& device, const Orthogonalize& a) {
  const int64_t B = a.matrices.dim[0], m = a.matrices.dim[1], n = a.matrices.dim[2], r = std::min(m, n);
  check_tensor("orthogonalize", "matrices", a.matrices, {B, m, n}, {DType::kBF16});
  check_tensor("orthogonalize", "other", a.other, {B, m, n}, {DType::kBF16});
  check_tensor("orthogonalize", "gram", a.gram, {B, r, r}, {DType::kBF16});
  check_tensor("orthogonalize", "polynomial", a.polynomial, {B, r, r}, {DType::kBF16});
  PARKA_REQUIRE(!a.steps.empty() && a.safety >= 1);
  if (a.matrices.numel() == 0) return;
  PARKA_DISPATCH(orthogonalize, device, a);
}

void muon_step(Device& device, const MuonStep& a) {
  const int64_t N = a.weight.numel();
  check_weights("muon_step", SteppedWeights(a), N);
  check_tensor("muon_step", "direction", a.direction, {N}, {DType::kBF16});
  check_tensor("muon_step", "grad_scale", a.grad_scale, {1}, {DType::kF32});
  if (N == 0) return;
  PARKA_DISPATCH(muon_step, device, a);
}

OpCost cost_of(const MuonMomentum& a) {
  return moved(all_bytes(a.gradient, a.direction) + 2 * bytes_of(a.momentum), a.gradient);
}

OpCost cost_of(const Orthogonalize& a) {
  const auto m = static_cast<double>(a.matrices.dim[1]), n = static_cast<double>(a.matrices.dim[2]);
  const double r = std::min(m, n), s = std::max(m, n);
  const double flop = 4 * r * r * s + 2 * r * r * r;  // of a step
  const double steps = static_cast<double>(a.matrices.dim[0]) * static_cast<double>(a.steps.size());
  return {2 * bytes_of(a.matrices), steps * flop, shape_of(a.matrices), Products::kGemm};
}

OpCost cost_of(const MuonStep& a) {
  return moved(2 * all_bytes(a.weight, a.master) + bytes_of(a.direction), a.weight);
}

int64_t workspace_of(const Orthogonalize& a) {
  return cuda::orthogonalize_workspace_bytes(a.matrices.dim[0], a.matrices.dim[1] * a.matrices.dim[2]);
}

}  // namespace parka
