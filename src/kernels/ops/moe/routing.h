#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Ops that bring tokens to experts and their outputs back: T tokens, E experts, k of them chosen for each token.
// A "slot" is one choice of one token; slot t * k + j is the j-th choice of token t. Slots are sorted by expert,
// and each expert's rows begin at a multiple of kExpertRows, so R = expert_rows(T * min(k, E), E) rows are enough
// for any choices: memory depends on no routing. Rows of no slot are zeros in every tensor of R rows.

// Tiles of the grouped products, which read the rows of one expert alone.
inline constexpr int64_t kExpertRows = 128;
inline int64_t expert_rows(int64_t num_slots, int64_t num_experts) {
  return (num_slots + num_experts * (kExpertRows - 1)) / kExpertRows * kExpertRows;
}

enum class RouterScore : uint8_t {
  kSoftmax,  // p = softmax(l), over all experts
  kSigmoid,  // p = 1 / (1 + exp(-l))
};

// How a router chooses experts and weighs them.
struct RouterRule {
  RouterScore score = RouterScore::kSoftmax;
  bool normalize = false;  // divide the weights of a token by their sum (+ 1e-20)
  float scaling = 1;       // multiplies them after that
  // Experts in `groups` equal groups: only those of the `groups_kept` best are chosen among. A group's score is the
  // sum of its two largest p + bias (DeepSeek-V3).
  int64_t groups = 1, groups_kept = 1;
};

inline constexpr int64_t kMostExperts = 512, kMostChosen = 32, kMostExpertGroups = 32;

// Chooses the k experts of the largest p + bias of each token, the larger value first and, of equal ones, the lower
// expert first; NaN counts as minus infinity. Their weights are p without the bias, normalized and scaled by
// `rule`. All in fp32.
struct Route {
  TensorView logits;     // [T, E] fp32, in
  TensorView bias = {};  // [E] fp32, in: decides the choice alone; empty: zeros
  RouterRule rule = {};
  TensorView experts;  // [T, k] int32, out
  TensorView weights;  // [T, k] fp32, out
};
PARKA_OP(route, Route);

// Sorts slots by expert, and those of one expert by slot: a counting sort, in which no order depends on time.
struct SortByExpert {
  TensorView experts;  // [T, k] int32, in
  TensorView weights;  // [T, k] fp32, in
  TensorView offsets;  // [E + 1] int32, out: the first row of each expert, and the end of the last; multiples of
                       // kExpertRows
  TensorView counts;   // [E] int32, out: the rows of each that are of a slot, before those of padding
  TensorView row_of_slot;  // [T, k] int32, out
  TensorView slot_of_row;  // [R] int32, out; -1: of no slot
  TensorView row_weights;  // [R] fp32, out; 0 in rows of no slot
  // Other than kAllExperts: the E experts are this one of more and those after it, which other ranks have. Slots of
  // others have row -1. A token has at most min(k, E) rows.
  static constexpr int64_t kAllExperts = -1;
  int64_t first_expert = kAllExperts;
};
PARKA_OP(sort_by_expert, SortByExpert);
int64_t workspace_of(const SortByExpert& a);

// Copies each token's row to the rows of its slots: out[r] = x[slot_of_row[r] / k], as the numbers or codes are.
// Zeros in rows of no slot. FP8 has one scale, which the caller shares between x and out.
struct GatherTokens {
  TensorView slot_of_row;  // [R] int32, in
  int64_t slots_per_token = 1;
  TensorView x = {};      // [T, d] fp32, bf16 or fp8 codes, in; empty: only out_t is wanted
  TensorView out = {};    // [R, d] of x's format, out
  TensorView x_t = {};    // [d, T] fp8 codes of x transposed, in; empty: not wanted
  TensorView out_t = {};  // [d, R] of x_t's format, out
};
PARKA_OP(gather_tokens, GatherTokens);

// out[t] = (accumulate ? out[t] : 0) + (sum over j in order of rows[row_of_slot[t, j]]), summed in fp32 and rounded
// once; row -1 adds nothing. Forward: of the experts' outputs, whose weights are in the rows. Backward: of the
// gradients of their inputs.
struct CombineRows {
  TensorView rows;         // [R, d] fp32 or bf16, in
  TensorView row_of_slot;  // [T, k] int32, in
  TensorView out;          // [T, d] fp32 or bf16, in and out
  bool accumulate = false;
};
PARKA_OP(combine_rows, CombineRows);

// What a router did in a micro-batch, for its losses and for whoever watches it:
//   load[e]           the number of slots of expert e
//   load[E + e]       the sum over tokens of p_e; a sigmoid's is divided by its sum over all experts first
//   load[2 E]         the sum over tokens of logsumexp(l)^2
// Tokens are summed in a fixed order.
struct RouterLoad {
  TensorView logits;   // [T, E] fp32, in
  TensorView experts;  // [T, k] int32, in
  RouterScore score = RouterScore::kSoftmax;
  TensorView load;  // [2 E + 1] fp32, out
};
PARKA_OP(router_load, RouterLoad);
int64_t workspace_of(const RouterLoad& a);

// The gradient of the logits, through the weights of the chosen (whose sum over a normalization is differentiated,
// the choice itself is not), the balance loss and the z-loss:
//   softmax:  dl = p (dp - sum p dp);   sigmoid: dl = dp p (1 - p)
//   dp        from d_row_weights of the token's slots, through scaling and normalization; 0 for experts not chosen
//   balance:  d(balance) / d(p_e, as RouterLoad sums it) = balance_factor * load[e] is added for all experts
//   z-loss:   2 z_factor * logsumexp(l) * softmax(l) is added to dl
struct RouteBackward {
  TensorView logits;         // [T, E] fp32, in
  TensorView experts;        // [T, k] int32, in
  TensorView row_of_slot;    // [T, k] int32, in; empty: row t * k + j is that of slot t * k + j
  TensorView d_row_weights;  // [R] fp32, in
  TensorView load = {};      // [>= E] fp32, in: load[e] of the balance loss; empty: none
  RouterRule rule = {};
  float balance_factor = 0, z_factor = 0;
  TensorView d_logits;  // [T, E] fp32 or bf16, out
};
PARKA_OP(route_backward, RouteBackward);

}  // namespace parka
