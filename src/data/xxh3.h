#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace parka {

// XXH3-64 of the bytes, as `xxhsum -H3` prints it.
uint64_t xxh3_64(std::span<const std::byte> bytes);

}  // namespace parka
