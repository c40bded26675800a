#include "engine/planning/memory_fit.h"

#include <algorithm>
#include <queue>
#include <tuple>

namespace parka {
namespace {

using Results = MemoryChange::Results;

MemoryAdvice advice_of(const ChosenChanges& chosen, const FitRequest& request) {
  return {.changes = chosen.changes(), .num_gpus = request.num_gpus, .planned = *chosen.planned()};
}

// Goes through sets of changes from the cheapest on by the sum of what each costs alone, and leaves out what cannot
// fit any more.
class FitSearch {
 public:
  FitSearch(const FitRequest& request, std::vector<MemoryChange> allowed)
      : request_(request), tried_(request.config, std::move(allowed), request.num_gpus) {
    const std::optional<double> unchanged = seconds_with(Set());
    if (!unchanged) return;
    for (size_t i = 0; i < tried_.possible().size(); ++i) add(i, *unchanged);
    // What saves most of a key comes last in it. Dear keys first: a set that cannot do without them ends early.
    std::stable_sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
      return a.options.back().seconds > b.options.back().seconds;
    });
    // How many blocks keep copies depends on all else.
    std::stable_partition(keys_.begin(), keys_.end(), [](const Key& key) { return key.name != kWeightCopiesKey; });
  }

  std::optional<MemoryAdvice> cheapest() {
    constexpr size_t kCompared = 4;  // the sums are near what sets take, but for what changes do to each other
    std::optional<Set> best;
    double least = 0;
    size_t compared = 0;
    open_.push({});
    while (!open_.empty() && compared < kCompared) {
      const Set set = open_.top();
      open_.pop();
      if (set.decided < keys_.size()) {
        if (may_fit(set)) branch(set);
        continue;
      }
      if (!fits(set) || !needs_all(set)) continue;
      const std::optional<double> seconds = seconds_with(set);
      if (!seconds) continue;
      if (!best || *seconds < least) best = set, least = *seconds;
      ++compared;
    }
    if (!best) return std::nullopt;
    choose(*best);
    return advice_of(tried_, request_);
  }

 private:
  struct Option {
    size_t change;  // of possible()
    double seconds;
  };
  struct Key {
    std::string_view name;
    std::vector<Option> options;
  };
  // Keys are decided in their order.
  struct Set {
    double seconds = 0;
    size_t decided = 0;
    std::vector<size_t> changes = {};
    int64_t kept_blocks = 0;  // ChosenChanges::keep_copies()

    bool operator<(const Set& other) const {  // std::priority_queue has the largest on top
      return std::tuple(other.seconds, other.changes.size(), decided) <
             std::tuple(seconds, changes.size(), other.decided);
    }
  };

  void choose(const Set& set) {
    tried_.clear();
    for (const size_t i : set.changes) tried_.choose(i);
    tried_.keep_copies(set.kept_blocks);
  }

  bool fits(const Set& set) {
    choose(set);
    return tried_.fit(request_.limit);
  }

  bool needs_all(const Set& set) {
    for (size_t left_out = 0; left_out < set.changes.size(); ++left_out) {
      Set others = set;
      others.changes.erase(others.changes.begin() + static_cast<std::ptrdiff_t>(left_out));
      if (fits(others)) return false;
    }
    return true;
  }

  std::optional<double> seconds_with(const Set& set) {
    choose(set);
    return tried_.planned() ? request_.seconds(*tried_.config()) : std::nullopt;
  }
  std::optional<double> seconds_with(std::vector<size_t> changes) {
    return seconds_with(Set{.changes = std::move(changes)});
  }

  // Without an expectation a change is left out.
  void add(size_t i, double unchanged) {
    const std::optional<double> seconds = seconds_alone(i, unchanged);
    if (!seconds) return;
    const std::string_view name = tried_.possible()[i].key();
    const auto key = std::find_if(keys_.begin(), keys_.end(), [&](const Key& k) { return k.name == name; });
    const Option option = {i, std::max(0.0, *seconds)};
    if (key != keys_.end()) key->options.push_back(option);
    if (key == keys_.end()) keys_.push_back({name, {option}});
  }

  std::optional<double> seconds_alone(size_t i, double unchanged) {
    if (const std::optional<double> seconds = seconds_with(std::vector{i})) return *seconds - unchanged;
    for (size_t j = 0; j < i; ++j) {  // it may need another change
      if (tried_.possible()[i].key() == tried_.possible()[j].key()) continue;
      const std::optional<double> both = seconds_with(std::vector{j, i}), other = seconds_with(std::vector{j});
      if (both && other) return *both - *other;
    }
    return std::nullopt;
  }

  // Whether the set fits with what saves most of all that is not decided. What contradicts itself may.
  bool may_fit(const Set& set) {
    choose(set);
    std::vector<size_t> undecided;
    for (size_t k = set.decided; k < keys_.size(); ++k) undecided.push_back(keys_[k].options.back().change);
    return tried_.come_within(request_.limit, undecided);
  }

  void branch(const Set& set) {
    Set next = set;
    ++next.decided;
    open_.push(next);
    const Key& key = keys_[set.decided];
    double before = 0;  // of the option before
    for (const Option& option : key.options) {
      Set with = next;
      with.seconds += option.seconds;
      with.changes.push_back(option.change);
      if (key.name == kWeightCopiesKey) keep_copies(with, option.seconds - before);
      before = option.seconds;
      open_.push(std::move(with));
    }
  }

  // `more`: what the change costs for all blocks, which have the one before it if they are left out.
  void keep_copies(Set& set, double more) {
    if (more < 0 || !fits(set)) return;
    set.kept_blocks = tried_.keep_copies_within(request_.limit);
    const int64_t num_blocks = tried_.num_blocks();
    set.seconds -= more * static_cast<double>(set.kept_blocks) / static_cast<double>(num_blocks);
  }

  const FitRequest& request_;
  ChosenChanges tried_;
  std::vector<Key> keys_;
  std::priority_queue<Set> open_;
};

// Those that a fit may make: all with the same bits, and of the others as many as it takes.
std::vector<MemoryChange> allowed_changes(std::vector<MemoryChange> changes, const ChosenChanges& first_fit) {
  size_t needed = 0;
  for (size_t i = 0; i < changes.size(); ++i) {
    if (first_fit.has(i) || changes[i].taken_among() == Results::kSameBits) needed = i + 1;
  }
  changes.resize(needed);
  return changes;
}

}  // namespace

std::optional<MemoryAdvice> cheapest_fit(const FitRequest& request) {
  std::vector<MemoryChange> changes = memory_changes(request.config.with({}), request.num_gpus);
  if (!request.any_results) {
    std::stable_sort(changes.begin(), changes.end(), [](const MemoryChange& a, const MemoryChange& b) {
      return a.taken_among() < b.taken_among();
    });
  }
  ChosenChanges chosen(request.config, changes, request.num_gpus);
  if (!chosen.add_until(request.limit)) return std::nullopt;
  if (request.seconds && !chosen.changes().empty()) {
    if (!request.any_results) changes = allowed_changes(std::move(changes), chosen);
    if (auto fastest = FitSearch(request, std::move(changes)).cheapest()) return fastest;
  }
  chosen.take_back(request.limit);
  chosen.keep_copies_within(request.limit);
  return advice_of(chosen, request);
}

}  // namespace parka
