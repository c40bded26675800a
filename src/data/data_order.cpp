#include "data/data_order.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

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

SampleOrder::SampleOrder(int64_t num_sequences, int64_t seed, bool shuffle)
    : num_sequences_(num_sequences), seed_(seed), shuffle_(shuffle) {
  if (seed < 0) throw_bad_input("data.seed is {}; give a non-negative number", seed);
  if (num_sequences > int64_t{1} << 32) {
    throw_bad_input("the data has {} sequences, more than the 2^32 that an epoch can hold; list fewer token files",
                    num_sequences);
  }
}

std::vector<uint32_t> SampleOrder::epoch(int64_t epoch) const {
  PARKA_REQUIRE(epoch >= 0);
  std::vector<uint32_t> order(static_cast<size_t>(num_sequences_));
  std::iota(order.begin(), order.end(), 0u);
  if (shuffle_) NumpyGenerator(static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch)).shuffle(order);
  return order;
}

DataPosition SampleOrder::batch_start(DataPosition position, int64_t global_batch) const {
  PARKA_REQUIRE(global_batch > 0);
  if (num_sequences_ < global_batch) {
    throw_bad_input(
        "the data has {} sequences, fewer than one global batch of {}; give more data or lower "
        "training.global_batch_size",
        num_sequences_, global_batch);
  }
  if (position.epoch < 0 || position.consumed < 0 || position.consumed > num_sequences_) {
    throw_bad_input(
        "cannot continue at sequence {} of epoch {}: the data has {} sequences; resume with the data that "
        "the checkpoint was trained on",
        position.consumed, position.epoch, num_sequences_);
  }
  if (num_sequences_ - position.consumed >= global_batch) return position;
  return {.epoch = position.epoch + 1, .consumed = 0};
}

namespace {

// numpy.random.SeedSequence(seed), after O'Neill's seed_seq_fe: hashes the words of the seed into a pool of four,
// stirs it, and hashes it out again. The constants are numpy's.
class SeedSequence {
 public:
  explicit SeedSequence(uint64_t seed)
      : pool_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0} {
    uint32_t constant = 0x43b0d7e5u;
    const auto hash = [&constant](uint32_t value) {
      value ^= constant;
      constant *= 0x931e8875u;
      value *= constant;
      return value ^ (value >> 16);
    };
    for (uint32_t& word : pool_) word = hash(word);
    for (size_t source = 0; source < pool_.size(); ++source) {
      for (size_t target = 0; target < pool_.size(); ++target) {
        if (source != target) pool_[target] = mix(pool_[target], hash(pool_[source]));
      }
    }
  }

  // generate_state(4, uint64)
  std::array<uint64_t, 4> generate() const {
    std::array<uint64_t, 4> state{};
    uint32_t constant = 0x8b51f9ddu;
    for (size_t i = 0; i < 2 * state.size(); ++i) {
      uint32_t value = pool_[i % pool_.size()] ^ constant;
      constant *= 0x58f38dedu;
      value *= constant;
      value ^= value >> 16;
      state[i / 2] |= uint64_t{value} << (i % 2 == 0 ? 0 : 32);
    }
    return state;
  }

 private:
  static uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t result = 0xca01f9ddu * x - 0x4973f715u * y;
    return result ^ (result >> 16);
  }

  std::array<uint32_t, 4> pool_;
};

}  // namespace

NumpyGenerator::NumpyGenerator(uint64_t seed) {
  const std::array<uint64_t, 4> words = SeedSequence(seed).generate();
  const Uint128 initial_state = Uint128{words[0]} << 64 | words[1];
  const Uint128 stream = Uint128{words[2]} << 64 | words[3];
  increment_ = stream << 1 | 1u;
  advance();
  state_ += initial_state;
  advance();
}

void NumpyGenerator::advance() {
  constexpr Uint128 kMultiplier = Uint128{0x2360ed051fc65da4u} << 64 | 0x4385df649fccf645u;
  state_ = state_ * kMultiplier + increment_;
}

uint64_t NumpyGenerator::next_uint64() {
  advance();
  const auto high = static_cast<uint64_t>(state_ >> 64), low = static_cast<uint64_t>(state_);
  return std::rotr(high ^ low, static_cast<int>(high >> 58));
}

uint32_t NumpyGenerator::next_uint32() {
  if (std::exchange(has_spare_, false)) return spare_;
  const uint64_t draw = next_uint64();
  spare_ = static_cast<uint32_t>(draw >> 32);
  has_spare_ = true;
  return static_cast<uint32_t>(draw);
}

uint32_t NumpyGenerator::interval(uint32_t max) {
  if (max == 0) return 0;  // numpy draws nothing here
  const uint32_t mask = std::numeric_limits<uint32_t>::max() >> std::countl_zero(max);
  uint32_t value = 0;
  do {
    value = next_uint32() & mask;
  } while (value > max);
  return value;
}

void NumpyGenerator::shuffle(std::span<uint32_t> values) {
  PARKA_REQUIRE(values.size() <= size_t{1} << 32);
  for (size_t i = values.size(); i-- > 1;) std::swap(values[i], values[interval(static_cast<uint32_t>(i))]);
}

namespace {

constexpr int kShift = 62;
__extension__ using Uint128 = unsigned __int128;  // not ISO C++, but known to every compiler of 64-bit targets

// round(take * n); grows by 0 or 1 from one n to the next.
int64_t taken(uint64_t take, int64_t n) {
  const Uint128 product = Uint128{take} * static_cast<uint64_t>(n);
  return static_cast<int64_t>((product + (Uint128{1} << (kShift - 1))) >> kShift);
}

}  // namespace

Mixture::Mixture(const std::vector<double>& weights) : takes_(weights.size()) {
  if (weights.empty()) throw_bad_input("data.weights is empty; give a weight for each entry of data.train");
  double rest = 0;  // of this source and those behind it
  for (size_t i = weights.size(); i-- > 0;) {
    if (!(weights[i] > 0) || !std::isfinite(weights[i])) {
      throw_bad_input("data.weights: {} is not a positive number; remove the sources that you do not want",
                      weights[i]);
    }
    rest += weights[i];
    takes_[i] = static_cast<uint64_t>(std::ldexp(weights[i] / rest, kShift));
  }
}

std::vector<double> Mixture::parts() const {
  std::vector<double> all;
  // Exact: what was rounded down to an integer had the 53 digits of a double.
  for (const uint64_t take : takes_) all.push_back(std::ldexp(static_cast<double>(take), -kShift));
  return all;
}

Mixture::Draw Mixture::at(int64_t n) const {
  PARKA_REQUIRE(n >= 0);
  for (size_t i = 0;; ++i) {
    const int64_t before = taken(takes_[i], n);
    if (taken(takes_[i], n + 1) > before) return {i, before};
    n -= before;
  }
}

std::vector<int64_t> Mixture::counts(int64_t n) const {
  PARKA_REQUIRE(n >= 0);
  std::vector<int64_t> all;
  for (const uint64_t take : takes_) {
    all.push_back(taken(take, n));
    n -= all.back();
  }
  return all;
}

}  // namespace parka
