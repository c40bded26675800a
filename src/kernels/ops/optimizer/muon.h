#pragma once
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "kernels/op/op.h"
#include "kernels/ops/optimizer/adamw.h"

// Muon (Jordan 2024): the weights of a matrix move against the orthogonal factor of its momentum. A step is
// muon_momentum of each tensor, orthogonalize of its matrices, muon_step of each tensor.
namespace parka {

// The momentum of a tensor of N elements, and the direction that Nesterov's momentum gives:
//   B = B + (1 - mu) (g - B);  u = g + mu (B - g)
// with g = gradient * grad_scale. u is made of B before B is rounded to its format.
// A range that begins at a multiple of 128 elements can be computed on its own, with the same result.
struct MuonMomentum {
  TensorView gradient;    // [N] fp32 or bf16, in
  MomentView momentum;    // B, in/out: in any format of a first moment, whose values may round to 0
  double mu;              // double, so that 1 - mu can be rounded once
  TensorView grad_scale;  // [1] fp32, in; not finite: the momentum is not changed and the direction is zeros
  TensorView direction;   // [N] bf16, out: u
};
// If grad_scale is finite, the gradient must be finite too: clip_coefficient ensures it. Does nothing for N == 0.
PARKA_OP(muon_momentum, MuonMomentum);

// The factors of one Newton-Schulz iteration: X = a X + (b A + c A A) X with A = X X^T.
struct NewtonSchulzStep {
  float a, b, c;
};

enum class Orthogonalization : uint8_t {
  kNewtonSchulz,  // five equal steps, whose singular values end between 0.7 and 1.2 (Jordan 2024)
  kPolarExpress,  // five steps, each the best for what the ones before leave (Amsel et al., arXiv 2505.16932)
};
std::span<const NewtonSchulzStep> newton_schulz_steps(Orthogonalization orthogonalization);
float orthogonalization_safety(Orthogonalization orthogonalization);  // for Orthogonalize::safety

inline constexpr float kLeastMatrixNorm = 1e-7f;

// Replaces each matrix M by about the orthogonal factor of its polar decomposition. With r = min(m, n):
//   X = M / max(safety * norm(M), kLeastMatrixNorm)     Frobenius norm of the bf16 values, summed in double
//   then for each step:  A = X X^T;  G = b A + c A A;  X = a X + G X
// For m > n it is A = X^T X and X = a X + X G, so that A and G are r x r: the result is that of the transpose,
// transposed, but for the order of sums. X, A and G are rounded to bf16 once each, after sums in fp32, as
// torch.optim.Muon rounds them with addmm. A matrix of zeros stays one. The bits of a result do not depend on how
// many matrices there are.
// A GPU wants all tensors aligned to 16 bytes, or to the largest power of two that divides the bytes of a row, if
// that is less: so is any part of a batch, too.
struct Orthogonalize {
  TensorView matrices;                      // [B, m, n] bf16, in/out
  TensorView other;                         // [B, m, n] bf16, scratch
  TensorView gram, polynomial;              // [B, r, r] bf16, scratch: A and G
  std::span<const NewtonSchulzStep> steps;  // at least one
  float safety = 1;  // from 1 on: how far all singular values are kept below 1 at the beginning
  // On a GPU: of A and G three of four blocks are computed, and the fourth is the mirror image of one of them.
  bool in_halves = false;
};
PARKA_OP(orthogonalize, Orthogonalize);
int64_t workspace_of(const Orthogonalize& a);

// The end of Muon's step of one parameter tensor, with decoupled weight decay:
//   w -= lr * (O + weight_decay * w)
// The fields that AdamwStep has too mean what they mean there.
struct MuonStep {
  TensorView weight;  // [N] fp32 (kNone) or bf16, in/out
  TensorView master;  // [N] uint16 or uint8 (kFp32, kFp24Split), or empty, in/out
  MasterForm master_form;
  TensorView direction;  // [N] bf16, in: O
  float lr;
  float weight_decay;           // 0 for tensors that are not decayed
  TensorView grad_scale;        // [1] fp32, in; not finite: nothing is changed
  TensorView weight_amax = {};  // [1] fp32, in/out, not negative; empty: not wanted
  uint64_t seed;
  uint64_t step;
  uint64_t first_element;  // a multiple of 128
};
// Does nothing for N == 0.
PARKA_OP(muon_step, MuonStep);

}  // namespace parka
