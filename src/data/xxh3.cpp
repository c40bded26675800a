#include "data/xxh3.h"

// GCC 12's AVX-512 intrinsics warn of their own deliberately undefined registers.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

namespace parka {

uint64_t xxh3_64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace parka
