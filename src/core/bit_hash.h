#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/host_device.h"

// A 64-bit hash that shows whether bytes in memory have changed. Bytes are read as little-endian 64-bit words, the
// last one padded with zeros; w[i] is the word at byte 8 i of the whole, of which the bytes may be a part:
//   hash = sum over i of mix(w[i] ^ (i * kHashStep + kHashStart))     mod 2^64
//   mix(z): z ^= z >> 32;  z *= kHashFactor;  z ^= z >> 32;  z *= kHashFactor;  z ^= z >> 32
//   - mix is a bijection, so a change within one word, of one bit or of all, changes the hash with certainty.
//   - Other changes keep it only by chance, even if a faulty line flips the same bit of many words: every bit of a
//     word changes every bit of its term, in a way that depends on the word and its place. No pair of 2^40 pairs of
//     words kept the hash with each of the 64 bits flipped in both.
//   - A sum modulo 2^64 is the same in any order: the hash depends on neither device nor the number of threads. The
//     hashes of parts add up to that of the whole if all but the last part are multiples of 8 bytes long.
// It does not detect zeros appended within the last word, and it does not withstand an attacker.
namespace parka {

inline constexpr int64_t kHashWordBytes = 8;
inline constexpr uint64_t kHashStart = 0x2545f4914f6cdd1d, kHashStep = 0x9e3779b97f4a7c15,
                          kHashFactor = 0xd6e8feb86659fd93;

PARKA_HOST_DEVICE constexpr uint64_t mix_hash(uint64_t z) {
  z ^= z >> 32;
  z *= kHashFactor;
  z ^= z >> 32;
  z *= kHashFactor;
  return z ^ z >> 32;
}

// The term of w[i] is mix_hash(w[i] ^ hash_place(i)).
PARKA_HOST_DEVICE constexpr uint64_t hash_place(uint64_t i) { return i * kHashStep + kHashStart; }

// The hash of bytes that begin at byte `first_byte` of the whole, a multiple of 8. No bytes: 0. For any thread.
uint64_t bit_hash_of(std::span<const std::byte> bytes, uint64_t first_byte = 0);

}  // namespace parka
