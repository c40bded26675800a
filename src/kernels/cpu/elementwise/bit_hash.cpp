#include "kernels/ops/elementwise/bit_hash.h"

#include <atomic>
#include <cstring>

#include "core/parallel.h"

namespace parka::cpu {

void bit_hash(Device&, const BitHash& a) {
  constexpr int64_t kPiece = int64_t{1} << 18;  // a multiple of 8
  const auto* x = static_cast<const std::byte*>(a.x.data);
  std::atomic<uint64_t> sum{0};
  parallel_for(a.x.bytes(), kPiece, [&](int64_t begin, int64_t end) {
    sum += bit_hash_of({x + begin, x + end}, a.first_byte + static_cast<uint64_t>(begin));
  });
  uint64_t hash = 0;
  std::memcpy(&hash, a.hash.data, sizeof(hash));
  hash += sum;
  std::memcpy(a.hash.data, &hash, sizeof(hash));
}

}  // namespace parka::cpu
