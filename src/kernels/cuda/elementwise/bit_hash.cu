#include "kernels/ops/elementwise/bit_hash.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

// A hash of a tensor's bits as the sum of mixed 64-bit words, each with its place, so threads may take any.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 6;
constexpr int kPacks = 4;          // wide loads that a thread has under way before it uses the first
constexpr int64_t kPackWords = 2;  // 64-bit words of a wide load

// Words 0, 1... of x: those before `first_pack` and behind the packs are read byte by byte, the others in packs.
struct HashedBytes {
  const uint8_t* x;
  int64_t bytes;
  int64_t first_pack;  // its word, where x is aligned to 16 bytes
  int64_t packs;

  __device__ int64_t num_words() const { return (bytes + kHashWordBytes - 1) / kHashWordBytes; }
  __device__ uint64_t word(int64_t k) const {
    uint64_t w = 0;
#pragma unroll
    for (int64_t i = 0; i < kHashWordBytes; ++i) {
      const int64_t at = k * kHashWordBytes + i;
      if (at < bytes) w |= uint64_t{x[at]} << (8 * i);
    }
    return w;
  }
};

// x is read as any memory that other kernels write: no load goes through the read-only cache.
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    bit_hash_kernel(HashedBytes in, uint64_t first_word, unsigned long long* hash) {
  wait_for_kernel_before();
  const int64_t threads = int64_t{gridDim.x} * kThreads, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const auto* packs = reinterpret_cast<const ulonglong2*>(in.x + in.first_pack * kHashWordBytes);
  const uint64_t stride = static_cast<uint64_t>(threads) * kPackWords * kHashStep;
  uint64_t sum = 0, place = hash_place(first_word + static_cast<uint64_t>(in.first_pack + thread * kPackWords));
  const auto add_next = [&](const ulonglong2& pack) {
    sum += mix_hash(pack.x ^ place) + mix_hash(pack.y ^ (place + kHashStep));
    place += stride;
  };
  int64_t n = thread;
  for (; n + (kPacks - 1) * threads < in.packs; n += kPacks * threads) {
    ulonglong2 pack[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) pack[i] = packs[n + i * threads];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) add_next(pack[i]);
  }
  for (; n < in.packs; n += threads) add_next(packs[n]);

  const int64_t others = in.num_words() - in.packs * kPackWords;
  for (int64_t i = thread; i < others; i += threads) {
    const int64_t k = i < in.first_pack ? i : i + in.packs * kPackWords;
    sum += mix_hash(in.word(k) ^ hash_place(first_word + static_cast<uint64_t>(k)));
  }

  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ uint64_t warp_sums[kWarps];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) sum += warp_sums[warp];
  atomicAdd(hash, static_cast<unsigned long long>(sum));
}

// In packs from the first address aligned to 16 bytes, if a word begins there.
HashedBytes hashed_bytes(const TensorView& x) {
  HashedBytes in = {static_cast<const uint8_t*>(x.data), x.bytes(), 0, 0};
  if (!is_aligned(x.data, kHashWordBytes)) return in;
  const int64_t words = in.bytes / kHashWordBytes;
  in.first_pack = is_aligned(x.data, 16) ? 0 : std::min<int64_t>(words, 1);
  in.packs = (words - in.first_pack) / kPackWords;
  return in;
}

}  // namespace

void bit_hash(Device& any_device, const BitHash& a) {
  const CudaDevice& device = as_cuda(any_device);
  const HashedBytes in = hashed_bytes(a.x);
  const int64_t shares = in.packs > 0 ? ceil_div(in.packs, int64_t{kPacks}) : ceil_div(in.bytes, kHashWordBytes);
  const int64_t blocks = std::min<int64_t>(ceil_div(shares, int64_t{kThreads}),
                                           int64_t{kBlocksPerMultiprocessor} * device.num_multiprocessors());
  launch_early(device, "bit_hash", bit_hash_kernel, {blocks, kThreads}, in, a.first_byte / kHashWordBytes,
               static_cast<unsigned long long*>(a.hash.data));
}

}  // namespace parka::cuda
