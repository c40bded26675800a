#include "data/data_order.h"

#include <numeric>

#include "core/error.h"

namespace parka {

DataOrder::DataOrder(const std::vector<int64_t>& source_sequences, int64_t seed, bool shuffle,
                     const std::vector<double>& weights) {
  if (weights.empty()) {
    const int64_t all = std::accumulate(source_sequences.begin(), source_sequences.end(), int64_t{0});
    sources_.push_back({SampleOrder(all, seed, shuffle), 0, all});
    return;
  }
  if (weights.size() != source_sequences.size()) {
    throw_bad_input("data.weights has {} numbers, but data.train has {} entries; give one for each", weights.size(),
                    source_sequences.size());
  }
  mixture_.emplace(weights);
  int64_t first = 0;
  for (const int64_t count : source_sequences) {
    const int64_t number = static_cast<int64_t>(sources_.size());
    // SampleOrder refuses a negative seed by the number that it is given.
    const int64_t own_seed = seed < 0 ? seed : seed + (number << 32);
    sources_.push_back({SampleOrder(count, own_seed, shuffle), first, count});
    first += count;
  }
}

DataPosition DataOrder::batch_start(DataPosition position, int64_t global_batch) const {
  if (!mixture_) return sources_.front().order.batch_start(position, global_batch);
  PARKA_REQUIRE(global_batch > 0);
  if (position.epoch != 0 || position.consumed < 0) {
    throw_bad_input(
        "cannot continue at sequence {} of epoch {} of a mixture; resume with the data.weights that the checkpoint "
        "was trained with",
        position.consumed, position.epoch);
  }
  return position;
}

int64_t DataOrder::sequence(DataPosition start, int64_t entry) {
  if (!mixture_) return sources_.front().at(start.epoch, start.consumed + entry);
  const Mixture::Draw draw = mixture_->at(start.consumed + entry);
  Source& source = sources_[draw.source];
  return source.at(draw.index / source.num_sequences, draw.index % source.num_sequences);
}

int64_t DataOrder::Source::at(int64_t wanted_epoch, int64_t index) {
  if (epoch != wanted_epoch) {
    of_epoch = std::vector<uint32_t>();  // freed first: two orders of a large corpus are gigabytes
    const bool is_made = of_next_epoch.valid() && epoch + 1 == wanted_epoch;
    of_epoch = is_made ? of_next_epoch.get() : order.epoch(wanted_epoch);
    of_next_epoch = {};
    epoch = wanted_epoch;
  }
  // Below the least a thread costs more than it saves.
  constexpr int64_t kLeast = int64_t{1} << 16, kMost = int64_t{1} << 28;
  const bool makes_ahead = num_sequences >= kLeast && num_sequences <= kMost;
  if (makes_ahead && !of_next_epoch.valid() && index >= num_sequences / 4 * 3) {
    // Deferred where the system allows no further thread.
    of_next_epoch = std::async(std::launch::async | std::launch::deferred,
                               [of_source = order, next = epoch + 1] { return of_source.epoch(next); });
  }
  return first_sequence + of_epoch[static_cast<size_t>(index)];
}

}  // namespace parka
