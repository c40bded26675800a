#include "kernels/ops/moe/routing.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

// E experts, k of them for each token.
void check_sizes(std::string_view op, int64_t E, int64_t k) {
  if (E < 1 || E > kMostExperts) throw_internal("{}: {} experts, wanted 1 to {}", op, E, kMostExperts);
  if (k < 1 || k > std::min(E, kMostChosen)) {
    throw_internal("{}: {} experts chosen of {}, wanted 1 to {}", op, k, E, std::min(E, kMostChosen));
  }
}

void check_rule(std::string_view op, const RouterRule& rule, int64_t E, int64_t k) {
  const int64_t groups = rule.groups, kept = rule.groups_kept;
  if (groups < 1 || groups > kMostExpertGroups || E % groups != 0 || (groups > 1 && E / groups < 2)) {
    throw_internal("{}: {} groups of {} experts, wanted 1 to {} equal ones of two or more", op, groups, E,
                   kMostExpertGroups);
  }
  if (kept < 1 || kept > groups || kept * (E / groups) < k) {
    throw_internal("{}: groups_kept is {} of {} groups of {} experts, wanted enough for {}", op, kept, groups,
                   E / groups, k);
  }
}

void check_rows(std::string_view op, std::string_view name, int64_t rows, int64_t num_slots, int64_t E) {
  if (rows == expert_rows(num_slots, E) && rows <= INT32_MAX) return;
  throw_internal("{}: {} has {} rows, wanted {} for {} slots and {} experts", op, name, rows,
                 expert_rows(num_slots, E), num_slots, E);
}

}  // namespace

void route(Device& device, const Route& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1], k = a.experts.dim[1];
  check_tensor("route", "logits", a.logits, {T, E}, {DType::kF32});
  check_tensor("route", "experts", a.experts, {T, k}, {DType::kI32});
  check_tensor("route", "weights", a.weights, {T, k}, {DType::kF32});
  if (!a.bias.empty()) check_tensor("route", "bias", a.bias, {E}, {DType::kF32});
  check_sizes("route", E, k);
  check_rule("route", a.rule, E, k);
  if (T == 0) return;
  PARKA_DISPATCH(route, device, a);
}

// Without tokens, too: its outputs say that no expert has rows.
void sort_by_expert(Device& device, const SortByExpert& a) {
  const int64_t T = a.experts.dim[0], k = a.experts.dim[1], E = a.counts.dim[0], R = a.slot_of_row.dim[0];
  check_tensor("sort_by_expert", "experts", a.experts, {T, k}, {DType::kI32});
  check_tensor("sort_by_expert", "weights", a.weights, {T, k}, {DType::kF32});
  check_tensor("sort_by_expert", "counts", a.counts, {E}, {DType::kI32});
  check_tensor("sort_by_expert", "offsets", a.offsets, {E + 1}, {DType::kI32});
  check_tensor("sort_by_expert", "row_of_slot", a.row_of_slot, {T, k}, {DType::kI32});
  check_tensor("sort_by_expert", "slot_of_row", a.slot_of_row, {R}, {DType::kI32});
  check_tensor("sort_by_expert", "row_weights", a.row_weights, {R}, {DType::kF32});
  const bool has_all = a.first_expert == SortByExpert::kAllExperts;
  check_sizes("sort_by_expert", has_all ? E : std::max(E, k), k);
  check_rows("sort_by_expert", "slot_of_row", R, T * std::min(k, E), E);
  PARKA_DISPATCH(sort_by_expert, device, a);
}

void gather_tokens(Device& device, const GatherTokens& a) {
  const int64_t R = a.slot_of_row.dim[0], k = a.slots_per_token;
  check_tensor("gather_tokens", "slot_of_row", a.slot_of_row, {R}, {DType::kI32});
  if (k < 1 || k > kMostChosen) {
    throw_internal("gather_tokens: slots_per_token is {}, wanted 1 to {}", k, kMostChosen);
  }
  if (a.out.empty() && a.out_t.empty() && R > 0) throw_internal("gather_tokens: neither out nor out_t is given");
  if (!a.out.empty()) {
    const int64_t T = a.x.dim[0], d = a.x.dim[1];
    check_tensor("gather_tokens", "x", a.x, {T, d}, {DType::kF32, DType::kBF16, DType::kE4M3, DType::kE5M2});
    check_tensor("gather_tokens", "out", a.out, {R, d}, {a.x.dtype});
  }
  if (!a.out_t.empty()) {
    const int64_t d = a.x_t.dim[0], T = a.x_t.dim[1];
    check_tensor("gather_tokens", "x_t", a.x_t, {d, T}, {DType::kE4M3, DType::kE5M2});
    check_tensor("gather_tokens", "out_t", a.out_t, {d, R}, {a.x_t.dtype});
  }
  if (a.out.numel() == 0 && a.out_t.numel() == 0) return;
  PARKA_DISPATCH(gather_tokens, device, a);
}

void combine_rows(Device& device, const CombineRows& a) {
  const int64_t R = a.rows.dim[0], d = a.rows.dim[1], T = a.out.dim[0], k = a.row_of_slot.dim[1];
  check_tensor("combine_rows", "rows", a.rows, {R, d}, {DType::kF32, DType::kBF16});
  check_tensor("combine_rows", "row_of_slot", a.row_of_slot, {T, k}, {DType::kI32});
  check_tensor("combine_rows", "out", a.out, {T, d}, {DType::kF32, DType::kBF16});
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(combine_rows, device, a);
}

// Without tokens, too: the sums are zeros.
void router_load(Device& device, const RouterLoad& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1], k = a.experts.dim[1];
  check_tensor("router_load", "logits", a.logits, {T, E}, {DType::kF32});
  check_tensor("router_load", "experts", a.experts, {T, k}, {DType::kI32});
  check_tensor("router_load", "load", a.load, {2 * E + 1}, {DType::kF32});
  check_sizes("router_load", E, k);
  PARKA_DISPATCH(router_load, device, a);
}

void route_backward(Device& device, const RouteBackward& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1], k = a.experts.dim[1], R = a.d_row_weights.dim[0];
  check_tensor("route_backward", "logits", a.logits, {T, E}, {DType::kF32});
  check_tensor("route_backward", "experts", a.experts, {T, k}, {DType::kI32});
  const bool is_by_slot = a.row_of_slot.empty();
  if (!is_by_slot) check_tensor("route_backward", "row_of_slot", a.row_of_slot, {T, k}, {DType::kI32});
  check_tensor("route_backward", "d_row_weights", a.d_row_weights, {is_by_slot ? T * k : R}, {DType::kF32});
  check_tensor("route_backward", "d_logits", a.d_logits, {T, E}, {DType::kF32, DType::kBF16});
  check_sizes("route_backward", E, k);
  if (!is_by_slot) check_rows("route_backward", "d_row_weights", R, T * k, E);
  if (!a.load.empty()) {
    check_tensor("route_backward", "load", a.load, {std::max(E, a.load.dim[0])}, {DType::kF32});
  } else if (a.balance_factor != 0) {
    throw_internal("route_backward: balance_factor is {}, and no load is given", a.balance_factor);
  }
  if (T == 0) return;
  PARKA_DISPATCH(route_backward, device, a);
}

OpCost cost_of(const Route& a) { return moved(all_bytes(a.logits, a.bias, a.experts, a.weights), a.logits); }

OpCost cost_of(const SortByExpert& a) {
  return moved(all_bytes(a.experts, a.weights, a.offsets, a.counts, a.row_of_slot, a.slot_of_row, a.row_weights),
               a.experts);
}
int64_t workspace_of(const SortByExpert& a) {
  return cuda::sort_by_expert_workspace_bytes(a.experts.numel(), a.counts.dim[0]);
}

OpCost cost_of(const GatherTokens& a) {
  const double by_row = a.out.empty() ? 0.0 : all_bytes(a.x, a.out);
  const double by_column = a.out_t.empty() ? 0.0 : all_bytes(a.x_t, a.out_t);
  return moved(bytes_of(a.slot_of_row) + by_row + by_column, a.out.empty() ? a.out_t : a.out);
}

// Rows of no slot are not read.
OpCost cost_of(const CombineRows& a) {
  const double row_bytes = static_cast<double>(a.rows.dim[1] * size_of(a.rows.dtype));
  return moved(static_cast<double>(a.row_of_slot.numel()) * row_bytes + bytes_of(a.row_of_slot) +
                   (a.accumulate ? 2 : 1) * bytes_of(a.out),
               a.out);
}

OpCost cost_of(const RouterLoad& a) { return moved(all_bytes(a.logits, a.experts, a.load), a.logits); }
int64_t workspace_of(const RouterLoad& a) {
  return cuda::router_load_workspace_bytes(a.logits.dim[0], a.logits.dim[1]);
}

OpCost cost_of(const RouteBackward& a) {
  const double weights = static_cast<double>(a.experts.numel() * size_of(a.d_row_weights.dtype));
  return moved(all_bytes(a.logits, a.experts, a.row_of_slot, a.d_logits) + weights, a.logits);
}

}  // namespace parka
