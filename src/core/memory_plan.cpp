#include "core/memory_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace parka {

TensorId MemoryPlan::add(std::string category, std::string name, DType dtype, std::vector<int64_t> shape,
                         PhaseMask phases) {
  PARKA_REQUIRE(!finished());
  PARKA_REQUIRE(!shape.empty() && shape.size() <= TensorView::kMaxRank);
  const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  PARKA_REQUIRE(numel >= 0);
  const int64_t bytes = ceil_div(numel * size_of(dtype), kAlignment) * kAlignment;
  entries_.push_back({std::move(category), std::move(name), dtype, std::move(shape), bytes, phases, -1});
  return {static_cast<int>(entries_.size()) - 1};
}

void MemoryPlan::finish() {
  PARKA_REQUIRE(!finished());
  int64_t offset = 0;
  std::vector<Entry*> transient;
  for (Entry& entry : entries_) {
    if (entry.phases == kAllPhases) {
      entry.offset = offset;
      offset += entry.bytes;
    } else {
      transient.push_back(&entry);
    }
  }
  persistent_bytes_ = total_bytes_ = offset;

  // Largest first leaves the small ones to fill the gaps.
  std::stable_sort(transient.begin(), transient.end(), [](const Entry* a, const Entry* b) { return a->bytes > b->bytes; });
  std::vector<const Entry*> placed;  // by offset
  for (Entry* entry : transient) {
    int64_t candidate = persistent_bytes_;
    for (const Entry* other : placed) {
      if ((other->phases & entry->phases) == 0) continue;
      if (candidate + entry->bytes <= other->offset) break;
      candidate = std::max(candidate, other->offset + other->bytes);
    }
    entry->offset = candidate;
    placed.insert(std::upper_bound(placed.begin(), placed.end(), candidate,
                                   [](int64_t value, const Entry* e) { return value < e->offset; }),
                  entry);
    total_bytes_ = std::max(total_bytes_, candidate + entry->bytes);
  }
}

int64_t MemoryPlan::total_bytes() const {
  PARKA_REQUIRE(finished());
  return total_bytes_;
}

std::vector<MemoryPlan::CategoryTotal> MemoryPlan::summary() const {
  PARKA_REQUIRE(finished());
  std::vector<CategoryTotal> totals;
  CategoryTotal workspace{"workspace", total_bytes_ - persistent_bytes_, 0};
  for (const Entry& entry : entries_) {
    if (entry.phases != kAllPhases) {
      ++workspace.num_tensors;
      continue;
    }
    auto total = std::find_if(totals.begin(), totals.end(), [&](const auto& t) { return t.category == entry.category; });
    if (total == totals.end()) total = totals.insert(totals.end(), {entry.category, 0, 0});
    total->bytes += entry.bytes;
    ++total->num_tensors;
  }
  if (workspace.num_tensors > 0) totals.push_back(workspace);
  return totals;
}

}  // namespace parka
