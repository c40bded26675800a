#include "core/bit_hash.h"

#include <bit>
#include <cstring>

#include "core/error.h"

namespace parka {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

uint64_t bit_hash_of(std::span<const std::byte> bytes, uint64_t first_byte) {
  PARKA_REQUIRE(first_byte % kHashWordBytes == 0);
  const size_t num_words = bytes.size() / kHashWordBytes;
  uint64_t hash = 0, word = 0, place = hash_place(first_byte / kHashWordBytes);
  for (size_t k = 0; k < num_words; ++k, place += kHashStep) {
    std::memcpy(&word, bytes.data() + k * kHashWordBytes, sizeof(word));
    hash += mix_hash(word ^ place);
  }
  const std::span<const std::byte> rest = bytes.subspan(num_words * kHashWordBytes);
  if (rest.empty()) return hash;
  word = 0;
  std::memcpy(&word, rest.data(), rest.size());
  return hash + mix_hash(word ^ place);
}

}  // namespace parka
