#include "engine/training/attention_watch.h"

#include "engine/step/telemetry.h"

namespace parka {

std::optional<AttentionWatch::Change> AttentionWatch::add(const std::vector<AttentionTotals>& blocks) {
  Change largest = {!raised_, -1, -1.0};
  for (size_t block = 0; block < blocks.size(); ++block) {
    const double of_block = imbalance(blocks[block]);
    if (of_block > largest.imbalance) largest = {!raised_, static_cast<int64_t>(block), of_block};
  }
  if (limit_ == 0 || largest.block < 0) return std::nullopt;
  const bool speaks_for = raised_ ? largest.imbalance < limit_ / 2 : largest.imbalance > limit_;
  in_a_row_ = speaks_for ? in_a_row_ + 1 : 0;
  if (in_a_row_ < kReports) return std::nullopt;
  in_a_row_ = 0;
  raised_ = !raised_;
  return largest;
}

}  // namespace parka
