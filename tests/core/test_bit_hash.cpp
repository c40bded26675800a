#include "core/bit_hash.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(philox4x32(seed, 1, i)[0]);
  return bytes;
}

uint64_t hash_of(std::string_view text, uint64_t first_byte = 0) {
  return bit_hash_of(std::as_bytes(std::span(text)), first_byte);
}

}  // namespace

TEST_CASE("bit_hash_of has known values", "[core][bit_hash]") {
  // Of a few lines of Python with integers of any length.
  CHECK(bit_hash_of({}) == 0);
  CHECK(hash_of(std::string_view("\0", 1)) == 0x5436ddaf99dc8296);
  CHECK(hash_of("abc") == 0x5134e25efc9d1563);
  CHECK(hash_of("abc", 8) == 0x0df33aef5b6a4ba2);
  std::vector<std::byte> bytes(100);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  CHECK(bit_hash_of(bytes) == 0x7cc37b04e5e90ed0);
  CHECK(bit_hash_of(bytes, uint64_t{1} << 40) == 0xe313a5de2bcbd067);
  // The last two words that have a position.
  CHECK(bit_hash_of(std::vector(16, std::byte{0xff}), std::numeric_limits<uint64_t>::max() - 15) ==
        0xeb7a636bf751b2b4);
}

TEST_CASE("bit_hash_of shows every flipped bit", "[core][bit_hash]") {
  for (const size_t count : {1, 7, 8, 9, 64, 100}) {
    for (const bool zeros : {true, false}) {
      std::vector<std::byte> bytes = zeros ? std::vector<std::byte>(count) : random_bytes(count, count);
      std::vector<uint64_t> hashes = {bit_hash_of(bytes)};
      for (size_t bit = 0; bit < 8 * count; ++bit) {
        const auto flip = std::byte{1} << (bit % 8);
        bytes[bit / 8] ^= flip;
        hashes.push_back(bit_hash_of(bytes));
        bytes[bit / 8] ^= flip;
      }
      std::sort(hashes.begin(), hashes.end());
      CAPTURE(count, zeros);
      CHECK(std::adjacent_find(hashes.begin(), hashes.end()) == hashes.end());
    }
  }
}

// As where one line of a bus is stuck: had a flip of the highest bit only two effects, one pair in two would
// cancel.
TEST_CASE("two flips of the same bit in different words do not cancel in bit_hash_of", "[core][bit_hash]") {
  constexpr size_t kWords = 4096;
  const bool zeros = GENERATE(true, false);
  std::vector<std::byte> bytes = zeros ? std::vector<std::byte>(8 * kWords) : random_bytes(8 * kWords, 3);
  size_t cancelling = 0;
  for (size_t bit = 0; bit < 64; ++bit) {
    std::vector<uint64_t> changes, opposites;
    for (size_t w = 0; w < kWords; ++w) {
      const std::span<std::byte> word = std::span(bytes).subspan(8 * w, 8);
      const uint64_t before = bit_hash_of(word, 8 * w);
      word[bit / 8] ^= std::byte{1} << (bit % 8);
      changes.push_back(bit_hash_of(word, 8 * w) - before);
      opposites.push_back(-changes.back());
      word[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    std::sort(changes.begin(), changes.end());
    std::sort(opposites.begin(), opposites.end());
    std::vector<uint64_t> both;
    std::set_intersection(changes.begin(), changes.end(), opposites.begin(), opposites.end(),
                          std::back_inserter(both));
    cancelling += both.size();
  }
  CHECK(cancelling == 0);
}

TEST_CASE("bit_hash_of shows words that have changed places, and where a piece lies", "[core][bit_hash]") {
  const std::vector<std::byte> bytes = random_bytes(64, 4);
  std::vector<std::byte> swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 40);
  CHECK(bit_hash_of(bytes) != bit_hash_of(swapped));
  CHECK(bit_hash_of(bytes) != bit_hash_of(bytes, 8));
  CHECK(bit_hash_of(std::vector<std::byte>(16)) != bit_hash_of(std::vector<std::byte>(8)));
}

TEST_CASE("bit_hash_of pieces adds up to that of the whole", "[core][bit_hash]") {
  const std::vector<std::byte> bytes = random_bytes(1003, 5);
  const std::span<const std::byte> all(bytes);
  for (const uint64_t first_byte : {uint64_t{0}, uint64_t{24}, uint64_t{1} << 50}) {
    const uint64_t whole = bit_hash_of(all, first_byte);
    for (size_t cut = 0; cut <= all.size(); cut += 8) {
      const size_t second = cut + (all.size() - cut) / 16 * 8;
      CHECK(bit_hash_of(all.first(cut), first_byte) +
                bit_hash_of(all.subspan(cut, second - cut), first_byte + cut) +
                bit_hash_of(all.subspan(second), first_byte + second) ==
            whole);
    }
  }
}

TEST_CASE("bit_hash_of refuses a piece that does not begin with a word", "[core][bit_hash]") {
  CHECK_THROWS_AS(bit_hash_of(random_bytes(8, 6), 4), Error);
}
