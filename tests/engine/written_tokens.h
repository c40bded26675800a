#pragma once
#include <cstdint>
#include <fstream>
#include <string>

#include "core/philox.h"

namespace parka::test {

// A file of `count` random tokens below 64, always the same.
inline void write_tokens(const std::string& path, int64_t count) {
  std::ofstream file(path, std::ios::binary);
  for (int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<uint16_t>(philox4x32(1, 2, static_cast<uint64_t>(i))[0] % 64);
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
}

}  // namespace parka::test
