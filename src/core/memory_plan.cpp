#include "core/memory_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace parka {
namespace {

// Far above any machine's memory and low enough that a sum over all tensors of a model fits in an int64.
constexpr double kMaxTensorBytes = 0x1p48;

}  // namespace

TensorId MemoryPlan::add(std::string category, std::string name, DType dtype, std::vector<int64_t> shape,
                         PhaseMask phases) {
  PARKA_REQUIRE(!finished());
  PARKA_REQUIRE(!shape.empty() && shape.size() <= TensorView::kMaxRank);
  PARKA_REQUIRE(phases != 0);
  double bytes = static_cast<double>(size_of(dtype));  // exact up to the limit, and cannot overflow
  for (int64_t extent : shape) {
    PARKA_REQUIRE(extent >= 0);
    bytes *= static_cast<double>(extent);
  }
  if (bytes > kMaxTensorBytes) {
    throw_bad_input("tensor {} ({}) of shape [{}] would take {:.1e} bytes: make the model or the batch smaller",
                    name, category, fmt::join(shape, ", "), bytes);
  }
  const int64_t aligned_bytes = ceil_div(static_cast<int64_t>(bytes), kAlignment) * kAlignment;
  entries_.push_back({std::move(category), std::move(name), dtype, std::move(shape), aligned_bytes, phases, -1});
  return {static_cast<int>(entries_.size()) - 1};
}

void MemoryPlan::finish() {
  PARKA_REQUIRE(!finished());
  int64_t persistent_bytes = 0;
  std::vector<Entry*> transient;
  for (Entry& entry : entries_) {
    if (entry.phases == kAllPhases) {
      entry.offset = persistent_bytes;
      persistent_bytes += entry.bytes;
    } else {
      transient.push_back(&entry);
    }
  }
  total_bytes_ = persistent_bytes;

  // Largest first leaves the small ones to fill the gaps.
  std::stable_sort(transient.begin(), transient.end(),
                   [](const Entry* a, const Entry* b) { return a->bytes > b->bytes; });
  std::vector<const Entry*> placed;  // by offset
  for (Entry* entry : transient) {
    int64_t candidate = persistent_bytes;
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
  const auto total_of = [&](const std::string& category) -> size_t {
    for (size_t i = 0; i < totals.size(); ++i) {
      if (totals[i].category == category) return i;
    }
    totals.push_back({category, 0, 0});
    return totals.size() - 1;
  };
  // Between two neighbouring edges of tensors every byte has the same users: give them to the first category.
  std::vector<int64_t> edges;
  std::vector<size_t> category_of;
  for (const Entry& entry : entries_) {
    category_of.push_back(total_of(entry.category));
    ++totals[category_of.back()].num_tensors;
    edges.push_back(entry.offset);
    edges.push_back(entry.offset + entry.bytes);
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  constexpr size_t kUnused = ~size_t{0};
  std::vector<size_t> user(edges.size(), kUnused);
  for (size_t e = 0; e < entries_.size(); ++e) {
    const auto begin = std::lower_bound(edges.begin(), edges.end(), entries_[e].offset) - edges.begin();
    for (auto i = static_cast<size_t>(begin); edges[i] < entries_[e].offset + entries_[e].bytes; ++i) {
      user[i] = std::min(user[i], category_of[e]);
    }
  }
  int64_t gaps = total_bytes_;
  for (size_t i = 0; i + 1 < edges.size(); ++i) {
    if (user[i] == kUnused) continue;
    totals[user[i]].bytes += edges[i + 1] - edges[i];
    gaps -= edges[i + 1] - edges[i];
  }
  if (gaps > 0) totals.push_back({"unused between tensors", gaps, 0});
  return totals;
}

}  // namespace parka
