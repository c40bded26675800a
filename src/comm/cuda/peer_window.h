#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace parka::cuda {

// Memory of equal size on every rank of an NCCL communicator, mapped into all ranks of the host. Ranks write into
// each other's with copy engines, which take no multiprocessors. NCCL opens the window, and uses it too.
//
// All ranks make every call, in one order. Throws Error(kInternal), or Error(kRankLost) for a lost rank.
class PeerWindow {
 public:
  // Bytes of the memory that the window reserves for signals. They must be zero before any rank opens it.
  static constexpr int64_t kSignalBytes = 4096;

  // `bytes` is a multiple of 4096; `signals` lies in the memory. Returns none where the GPUs cannot access each
  // other's memory, or where NCCL is older than 2.28 or not the version that this was built with.
  static std::optional<PeerWindow> open(ncclComm_t comm, void* memory, int64_t bytes, std::byte* signals);
  // Deregisters the memory. No rank may be writing to it.
  void close();

  // Queues an all-to-all: chunk p of `in` [size chunks] is sent to the rank at place p. Waits until all ranks have
  // reached this call. Afterwards `chunks` [size - 1] holds what the others sent, in the order of their places.
  // `chunks` lies in the window's memory, at the same offset on every rank.
  void exchange(const std::byte* in, std::byte* chunks, int64_t chunk_bytes, cudaStream_t stream);

  // Queues an all-gather of columns: `out` [rows, size * row_bytes] gets `in` [rows, row_bytes] of all ranks side
  // by side, in the order of their places. `out` lies in the window's memory, at the same offset on every rank.
  void gather_columns(const std::byte* in, std::byte* out, int64_t rows, int64_t row_bytes, cudaStream_t stream);

  // Queues an all-to-all of each row: afterwards block p of a row of `out` [rows, size, block_bytes] is what the
  // rank at place p has as block of this rank's place in that row of its `in`, of the same shape. `out` lies in the
  // window's memory, at the same offset on every rank, and does not overlap `in`.
  void all_to_all(const std::byte* in, std::byte* out, int64_t rows, int64_t block_bytes, cudaStream_t stream);

 private:
  PeerWindow(ncclComm_t comm, void* window, void* memory, std::byte* signals);
  // The address here of another rank's memory, at the offset that `own` has in this rank's.
  std::byte* at(int place, std::byte* own) const { return bases_[static_cast<size_t>(place)] + (own - memory_); }
  void meet(cudaStream_t stream);

  ncclComm_t comm_;
  void* window_;  // ncclWindow_t, which older versions of NCCL do not have
  std::byte *memory_, *signals_;
  int place_ = 0;
  std::vector<std::byte*> bases_;  // of every rank's memory, by place
  uint32_t meetings_ = 0;          // queued so far
};

}  // namespace parka::cuda
