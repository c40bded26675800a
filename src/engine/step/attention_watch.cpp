#include "engine/step/attention_watch.h"

#include <fmt/format.h>

#include "engine/step/telemetry.h"

namespace parka {

AttentionWatch::AttentionWatch(const Config& config)
    : AttentionWatch(config.model.qk_norm == QkNormKind::kNone ? 0.01 : 0.1) {}

std::optional<AttentionWatch::Change> AttentionWatch::add(const std::vector<AttentionTotals>& blocks) {
  Change largest = {!raised_, -1, -1.0, limit_};
  for (size_t block = 0; block < blocks.size(); ++block) {
    const double of_block = imbalance(blocks[block]);
    if (of_block > largest.imbalance) largest = {!raised_, static_cast<int64_t>(block), of_block, limit_};
  }
  if (largest.block < 0) return std::nullopt;
  const bool speaks_for = raised_ ? largest.imbalance < limit_ / 2 : largest.imbalance > limit_;
  in_a_row_ = speaks_for ? in_a_row_ + 1 : 0;
  if (in_a_row_ < kReports) return std::nullopt;
  in_a_row_ = 0;
  raised_ = !raised_;
  return largest;
}

nlohmann::ordered_json warning_record(const AttentionWatch::Change& change, int64_t step) {
  return {{"kind", "warning"},       {"step", step},          {"about", "attention"},
          {"raised", change.raised}, {"block", change.block}, {"imbalance", change.imbalance},
          {"limit", change.limit}};
}

std::string warning_line(const AttentionWatch::Change& change, int64_t step) {
  if (!change.raised) {
    return fmt::format(
        "step {}: the gradients of attention's scores add up to zero again: imbalance {:.3g} in block {}", step,
        change.imbalance, change.block);
  }
  return fmt::format(
      "step {}: the gradients of attention's scores do not add up to zero: imbalance {:.3g} in block {} "
      "(more than {:g}); such a run may follow a good one for long and then diverge: see "
      "docs/telemetry.md",
      step, change.imbalance, change.block, change.limit);
}

}  // namespace parka
