#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

namespace parka::cuda {

// Memory that every rank of an NCCL communicator has, of one size and on one host, mapped into all of them: ranks
// write into that of one another with their GPUs' copy engines, which take no multiprocessors from the work beside
// them. NCCL opens it, and gathers through it by itself.
//
// All ranks must make every call, in the same order. Throws Error(kInternal), and Error(kRankLost) where NCCL has
// lost another rank.
class PeerWindow {
 public:
  // Bytes of the memory that the window keeps for itself, zero before anyone opens it.
  static constexpr int64_t kSignalBytes = 4096;

  // The memory is a multiple of 4096 bytes; `signals` is in it. None where GPUs cannot reach the memory of one
  // another, and where NCCL is older than 2.28 or not the version that this was built with.
  static std::optional<PeerWindow> open(ncclComm_t comm, void* memory, int64_t bytes, std::byte* signals);
  // NCCL forgets the memory, which no rank may be writing to.
  void close();

  // Queues an exchange of pieces: piece p of `in` [size pieces] goes to the rank of place p, for which this waits
  // until all have come here. What others have for this rank is in `pieces` [size - 1] afterwards, in the order of
  // their places; it is in the memory, at the same place on every rank.
  void exchange(const std::byte* in, std::byte* pieces, int64_t piece_bytes, cudaStream_t stream);

  // Queues a gather of columns: those of all ranks, `in` [rows, row_bytes], side by side in their order are what
  // `out` [rows, size * row_bytes] holds on each afterwards, which is in the memory, at the same place on every
  // rank.
  void gather_columns(const std::byte* in, std::byte* out, int64_t rows, int64_t row_bytes, cudaStream_t stream);

 private:
  PeerWindow(ncclComm_t comm, void* window, void* memory, std::byte* signals);
  // A place in this rank's memory as it is mapped here of another's.
  std::byte* at(int place, std::byte* own) const { return bases_[static_cast<size_t>(place)] + (own - memory_); }
  void meet(cudaStream_t stream);

  ncclComm_t comm_;
  void* window_;  // ncclWindow_t, which older versions of NCCL do not have
  std::byte *memory_, *signals_;
  int place_ = 0;
  std::vector<std::byte*> bases_;  // of every rank's memory, by place
  uint32_t meetings_ = 0;          // that were queued
};

}  // namespace parka::cuda
