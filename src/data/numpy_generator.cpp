#include "data/numpy_generator.h"

#include <array>
#include <bit>
#include <limits>
#include <utility>

#include "core/error.h"

namespace parka {
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

}  // namespace parka
