#pragma once
#include <array>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC
// 2011). A draw is a pure function of (seed, stream, index): equal on CPU and GPU, in any order and division.
namespace parka {

PARKA_HOST_DEVICE inline std::array<uint32_t, 4> philox4x32(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint32_t kMultiplier0 = 0xd2511f53u, kMultiplier1 = 0xcd9e8d57u;
  constexpr uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * c0;
    const uint64_t p1 = uint64_t{kMultiplier1} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {c0, c1, c2, c3};
}

// Uniform in (0, 1): never 0, so its logarithm is finite.
inline double uniform_open(uint32_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

// Two independent standard normals (Box-Muller, in double) from two words of random bits.
inline std::array<double, 2> normal2_of(uint32_t bits0, uint32_t bits1) {
  const double radius = std::sqrt(-2.0 * std::log(uniform_open(bits0)));
  const double angle = 6.283185307179586 * uniform_open(bits1);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Two standard normals from draw `index` of the stream.
inline std::array<double, 2> philox_normal2(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto r = philox4x32(seed, stream, index);
  return normal2_of(r[0], r[1]);
}

}  // namespace parka
