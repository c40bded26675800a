#include "core/memory/memory_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <random>
#include <utility>

namespace parka {
namespace {

// Far above any machine's memory and low enough that a sum over all tensors of a model fits in an int64.
constexpr double kMaxTensorBytes = 0x1p48;

using Entry = MemoryPlan::Entry;

// How often the search for an order restarts, and how many orders each restart tries.
constexpr int kPlacementStarts = 10, kPlacementAttempts = 2000;

// Bytes alive in the largest phase: no placement needs less.
int64_t fullest_phase(const std::vector<Entry*>& entries) {
  int64_t fullest = 0;
  for (PhaseMask phase = 1; phase != 0; phase <<= 1) {
    int64_t alive = 0;
    for (const Entry* entry : entries) alive += (entry->phases & phase) != 0 ? entry->bytes : 0;
    fullest = std::max(fullest, alive);
  }
  return fullest;
}

// Places entries one after another, each at the lowest free offset. Returns the end of the highest one.
int64_t place(const std::vector<Entry*>& order) {
  int64_t end = 0;
  std::vector<const Entry*> placed;  // by offset
  for (Entry* entry : order) {
    entry->offset = 0;
    for (const Entry* other : placed) {
      if ((other->phases & entry->phases) == 0) continue;
      if (entry->offset + entry->bytes <= other->offset) break;
      entry->offset = std::max(entry->offset, other->offset + other->bytes);
    }
    placed.insert(std::ranges::upper_bound(placed, entry->offset, {}, &Entry::offset), entry);
    end = std::max(end, entry->offset + entry->bytes);
  }
  return end;
}

// A neighbouring order: one entry moved, or two swapped.
std::vector<Entry*> change(std::vector<Entry*> order, std::mt19937_64& random) {
  const size_t from = random() % order.size(), to = random() % order.size();
  if (random() % 2 == 0) {
    std::swap(order[from], order[to]);
  } else {
    Entry* const moved = order[from];
    order.erase(order.begin() + static_cast<std::ptrdiff_t>(from));
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(to), moved);
  }
  return order;
}

// Packs entries closely, from offset 0, and returns the end of the highest one. Below `enough` it seeks no better.
int64_t place_well(std::vector<Entry*> order, int64_t enough = 0) {
  enough = std::max(enough, fullest_phase(order));
  // The start: large and long-lived ones first, so that the others fill the gaps. Then simulated annealing: changes
  // that are a little worse are accepted too, fewer and fewer of them, because improvements alone seldom reach the
  // best order. The random generator is the same everywhere, and so is the plan.
  std::ranges::stable_sort(order, [](const Entry* a, const Entry* b) {
    return a->bytes * std::popcount(a->phases) > b->bytes * std::popcount(b->phases);
  });
  constexpr double kWorse = 0.03;  // accepted loss at the start
  std::mt19937_64 random;
  std::vector<Entry*> best = order;
  int64_t best_bytes = place(order);
  for (int start = 0; start < kPlacementStarts; ++start) {
    std::vector<Entry*> at = order;
    for (int i = 0; i < kPlacementAttempts && best_bytes > enough; ++i) {
      std::vector<Entry*> other = change(at, random);
      const int64_t bytes = place(other);
      const double worse = kWorse * (kPlacementAttempts - i) / kPlacementAttempts;
      if (static_cast<double>(bytes) > static_cast<double>(best_bytes) * (1 + worse)) continue;
      at = std::move(other);
      if (bytes >= best_bytes) continue;
      best_bytes = bytes;
      best = at;
    }
  }
  return place(best);
}

// Makes `growing`, one of `entries`, as large as it may be below `end`, where all are placed. Most often the
// fullest phase is another one, and what that takes is free in those of `growing`.
void grow(Entry& growing, const std::vector<Entry*>& entries, int64_t end) {
  std::vector<int64_t> offsets(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) offsets[i] = entries[i]->offset;
  const int64_t bytes = growing.bytes;
  for (size_t i = growing.larger.size(); i-- > 0 && growing.larger[i] > bytes;) {
    growing.bytes = growing.larger[i];
    if (fullest_phase(entries) <= end && place_well(entries, end) <= end) {
      growing.shape = {growing.bytes};
      return;
    }
  }
  growing.bytes = bytes;
  for (size_t i = 0; i < entries.size(); ++i) entries[i]->offset = offsets[i];
}

// The total of a category, which is put at the end if it is a new one.
size_t total_of(const std::string& category, std::vector<MemoryPlan::CategoryTotal>& totals) {
  for (size_t i = 0; i < totals.size(); ++i) {
    if (totals[i].category == category) return i;
  }
  totals.push_back({category, 0, 0});
  return totals.size() - 1;
}

}  // namespace

TensorId MemoryPlan::add(std::string category, std::string name, DType dtype, std::vector<int64_t> shape,
                         PhaseMask phases, MemoryPlace place) {
  PARKA_REQUIRE(!finished());
  PARKA_REQUIRE(!shape.empty() && shape.size() <= TensorView::kMaxRank);
  PARKA_REQUIRE(phases != 0 && (place == MemoryPlace::kDevice || phases == kAllPhases));
  double bytes = static_cast<double>(size_of(dtype));  // exact up to the limit, and cannot overflow
  for (int64_t extent : shape) {
    PARKA_REQUIRE(extent >= 0);
    bytes *= static_cast<double>(extent);
  }
  if (bytes > kMaxTensorBytes) {
    throw_bad_input("tensor {} ({}) of shape [{}] would take {:.1e} bytes: make the model or the batch smaller",
                    name, category, fmt::join(shape, ", "), bytes);
  }
  entries_.push_back({std::move(category), std::move(name), dtype, std::move(shape),
                      aligned(static_cast<int64_t>(bytes)), phases, place});
  return {static_cast<int>(entries_.size()) - 1};
}

TensorId MemoryPlan::add_growing(std::string category, std::string name, int64_t bytes, std::vector<int64_t> larger,
                                 PhaseMask phases) {
  PARKA_REQUIRE(phases != kAllPhases && std::ranges::is_sorted(larger));
  const TensorId id = add(std::move(category), std::move(name), DType::kU8, {bytes}, phases);
  for (int64_t& size : larger) size = aligned(size);
  entries_.back().larger = std::move(larger);
  return id;
}

int64_t MemoryPlan::aligned(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

void MemoryPlan::finish() {
  PARKA_REQUIRE(!finished());
  // Tensors of all phases lie one after another. Then, likewise, those with the longest life among the others,
  // hundreds of them with little to gain: saved activations. The rest is packed by search.
  PhaseMask longest = 0;
  for (const Entry& entry : entries_) {
    if (entry.phases != kAllPhases && std::popcount(entry.phases) > std::popcount(longest)) longest = entry.phases;
  }
  const auto lies_with_longest = [&](const Entry& entry) {
    return entry.phases == longest && entry.larger.empty();
  };
  std::vector<Entry*> transient;
  int64_t persistent_bytes = 0, longest_bytes = 0;
  for (Entry& entry : entries_) {
    if (entry.place == MemoryPlace::kHost) {
      entry.offset = total_host_bytes_;
      total_host_bytes_ += entry.bytes;
    } else if (entry.phases == kAllPhases) {
      entry.offset = persistent_bytes;
      persistent_bytes += entry.bytes;
    } else if (lies_with_longest(entry)) {
      entry.offset = longest_bytes;
      longest_bytes += entry.bytes;
    } else {
      transient.push_back(&entry);
    }
  }
  Entry kept{};
  kept.bytes = longest_bytes;
  kept.phases = longest;
  transient.push_back(&kept);
  const int64_t transient_bytes = place_well(transient);
  for (Entry& entry : entries_) {
    if (!entry.larger.empty()) grow(entry, transient, transient_bytes);
  }
  total_bytes_ = persistent_bytes + transient_bytes;
  for (Entry& entry : entries_) {
    if (entry.phases != kAllPhases) entry.offset += persistent_bytes + (lies_with_longest(entry) ? kept.offset : 0);
  }
}

int64_t MemoryPlan::total_bytes() const {
  PARKA_REQUIRE(finished());
  return total_bytes_;
}

int64_t MemoryPlan::total_host_bytes() const {
  PARKA_REQUIRE(finished());
  return total_host_bytes_;
}

std::vector<MemoryPlan::CategoryTotal> MemoryPlan::host_summary() const {
  PARKA_REQUIRE(finished());
  std::vector<CategoryTotal> totals;
  for (const Entry& entry : entries_) {
    if (entry.place != MemoryPlace::kHost) continue;
    CategoryTotal& total = totals[total_of(entry.category, totals)];
    total.bytes += entry.bytes;
    ++total.num_tensors;
  }
  return totals;
}

std::vector<MemoryPlan::CategoryTotal> MemoryPlan::summary() const {
  PARKA_REQUIRE(finished());
  std::vector<CategoryTotal> totals;
  // Between two neighbouring edges of tensors every byte has the same users: give them to the first category.
  std::vector<int64_t> edges;
  std::vector<const Entry*> entries;
  std::vector<size_t> category_of;
  for (const Entry& entry : entries_) {
    if (entry.place != MemoryPlace::kDevice) continue;
    entries.push_back(&entry);
    category_of.push_back(total_of(entry.category, totals));
    ++totals[category_of.back()].num_tensors;
    edges.push_back(entry.offset);
    edges.push_back(entry.offset + entry.bytes);
  }
  std::ranges::sort(edges);
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  constexpr size_t kUnused = ~size_t{0};
  std::vector<size_t> user(edges.size(), kUnused);
  for (size_t e = 0; e < entries.size(); ++e) {
    const auto begin = std::ranges::lower_bound(edges, entries[e]->offset) - edges.begin();
    for (auto i = static_cast<size_t>(begin); edges[i] < entries[e]->offset + entries[e]->bytes; ++i) {
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
