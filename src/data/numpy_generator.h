#pragma once
#include <cstdint>
#include <span>

namespace parka {

// The part of numpy.random.Generator(PCG64(seed)) that shuffling needs, with the same stream of numbers. So a run
// reads its data in the same order as OLMo's trainer.
//
// PCG64 is pcg_setseq_128_xsl_rr_64 of O'Neill, "PCG: A family of simple fast space-efficient statistically good
// algorithms for random number generation" (2014). Its state is seeded from numpy's SeedSequence.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint64_t seed);

  // A uniform number in [0, max]: 32-bit draws, masked to the bits of max, until one is not above it. (numpy's
  // random_interval(), which shuffle() uses; integers() uses Lemire's method and gives other numbers.)
  uint32_t interval(uint32_t max);

  // Generator.shuffle() of a one-dimensional array: Fisher-Yates from the last element down.
  // Throws Error(kInternal) for more than 2^32 values.
  void shuffle(std::span<uint32_t> values);

 private:
  __extension__ using Uint128 = unsigned __int128;  // not ISO C++, but known to every compiler of 64-bit targets

  uint64_t next_uint64();
  uint32_t next_uint32();
  void advance();

  Uint128 state_ = 0;
  Uint128 increment_ = 0;
  uint32_t spare_ = 0;  // upper half of the last 64-bit draw
  bool has_spare_ = false;
};

}  // namespace parka
