#include "engine/planning/memory_fit.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "engine/config/config_io.h"

namespace parka {
namespace {

using Results = MemoryChange::Results;

// Goes through sets of changes from the cheapest on by the sum of what each costs alone, and leaves out what cannot
// fit any more.
class FitSearch {
 public:
  FitSearch(const FitRequest& request, std::vector<MemoryChange> allowed)
      : request_(request), tried_(request.config, std::move(allowed), request.num_gpus) {
    const std::optional<double> unchanged = seconds_with({});
    if (!unchanged) return;
    for (size_t i = 0; i < tried_.possible().size(); ++i) add(i, *unchanged);
    // What saves most of a key comes last in it. Dear keys first: a set that cannot do without them ends early.
    std::stable_sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
      return a.options.back().seconds > b.options.back().seconds;
    });
  }

  std::optional<std::vector<size_t>> cheapest() {
    constexpr size_t kCompared = 4;  // the sums are near what sets take, but for what changes do to each other
    std::optional<std::vector<size_t>> best;
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
      if (!fits(set.changes) || !needs_all(set.changes)) continue;
      const std::optional<double> seconds = seconds_with(set.changes);
      if (!seconds) continue;
      if (!best || *seconds < least) best = set.changes, least = *seconds;
      ++compared;
    }
    return best;
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

    bool operator<(const Set& other) const {  // std::priority_queue has the largest on top
      return std::tuple(other.seconds, other.changes.size(), decided) <
             std::tuple(seconds, changes.size(), other.decided);
    }
  };

  void choose(const std::vector<size_t>& changes) {
    tried_.clear();
    for (const size_t i : changes) tried_.choose(i);
  }

  bool fits(const std::vector<size_t>& changes) {
    choose(changes);
    return tried_.fit(request_.limit);
  }

  bool needs_all(const std::vector<size_t>& changes) {
    for (size_t left_out = 0; left_out < changes.size(); ++left_out) {
      std::vector<size_t> others = changes;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(left_out));
      if (fits(others)) return false;
    }
    return true;
  }

  std::optional<double> seconds_with(const std::vector<size_t>& changes) {
    choose(changes);
    return tried_.planned() ? request_.seconds(*tried_.config()) : std::nullopt;
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
    if (const std::optional<double> seconds = seconds_with({i})) return *seconds - unchanged;
    for (size_t j = 0; j < i; ++j) {  // it may need another change
      if (tried_.possible()[i].key() == tried_.possible()[j].key()) continue;
      const std::optional<double> both = seconds_with({j, i}), other = seconds_with({j});
      if (both && other) return *both - *other;
    }
    return std::nullopt;
  }

  // Whether the set fits with what saves most of all that is not decided. What contradicts itself may.
  bool may_fit(const Set& set) {
    choose(set.changes);
    for (size_t k = set.decided; k < keys_.size(); ++k) tried_.choose(keys_[k].options.back().change);
    const std::optional<MemoryBytes> bytes = tried_.planned();
    return !bytes || bytes->gpu <= request_.limit.gpu;
  }

  void branch(const Set& set) {
    Set next = set;
    ++next.decided;
    open_.push(next);
    for (const Option& option : keys_[set.decided].options) {
      Set with = next;
      with.seconds += option.seconds;
      with.changes.push_back(option.change);
      open_.push(std::move(with));
    }
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
    if (first_fit.has(i) || changes[i].results == Results::kSameBits) needed = i + 1;
  }
  changes.resize(needed);
  return changes;
}

}  // namespace

std::optional<MemoryAdvice> cheapest_fit(const FitRequest& request) {
  std::vector<MemoryChange> changes = memory_changes(parse_config(request.config, "config"), request.num_gpus);
  if (!request.any_results) {
    std::stable_sort(changes.begin(), changes.end(),
                     [](const MemoryChange& a, const MemoryChange& b) { return a.results < b.results; });
  }
  ChosenChanges chosen(request.config, changes, request.num_gpus);
  if (!chosen.add_until(request.limit)) return std::nullopt;
  std::optional<std::vector<size_t>> fastest;
  if (request.seconds && !chosen.changes().empty()) {
    if (!request.any_results) changes = allowed_changes(std::move(changes), chosen);
    fastest = FitSearch(request, std::move(changes)).cheapest();
  }
  if (fastest) {
    chosen.clear();
    for (const size_t i : *fastest) chosen.choose(i);
  } else {
    chosen.take_back(request.limit);
  }
  return MemoryAdvice{.changes = chosen.changes(), .num_gpus = request.num_gpus, .planned = *chosen.planned()};
}

}  // namespace parka
