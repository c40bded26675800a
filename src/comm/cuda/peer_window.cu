#include "comm/cuda/peer_window.h"

#include <algorithm>
#include <string>

#include <nccl_device.h>

#include "comm/cuda/nccl_status.h"
#include "core/error.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/driver_function.h"

namespace parka::cuda {
namespace {

void check_nccl(ncclResult_t status, const char* what, ncclComm_t comm) {
  if (status != ncclSuccess) throw Error(exit_code_of(status), std::string(what) + ": " + reason_of(status, comm));
}

__global__ void find_bases(ncclWindow_t window, int size, std::byte** bases) {
  for (int place = 0; place < size; ++place) {
    bases[place] = static_cast<std::byte*>(ncclGetPeerPointer(window, 0, place));
  }
}

CUdeviceptr address(const std::byte* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

std::optional<PeerWindow> PeerWindow::open(ncclComm_t comm, void* memory, int64_t bytes, std::byte* signals) {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "window", comm);
  if (version / 100 != NCCL_VERSION_CODE / 100) return {};  // the layout of a window may differ
  ncclWindow_t window = nullptr;
  check_nccl(ncclCommWindowRegister(comm, memory, static_cast<size_t>(bytes), &window, NCCL_WIN_COLL_SYMMETRIC),
             "window", comm);
  if (window == nullptr) return {};
  // If some GPUs cannot access each other, the window is an NCCL structure in host memory.
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, window), "window");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    check_nccl(ncclCommWindowDeregister(comm, window), "window", comm);
    return {};
  }
  return PeerWindow(comm, window, memory, signals);
}

PeerWindow::PeerWindow(ncclComm_t comm, void* window, void* memory, std::byte* signals)
    : comm_(comm), window_(window), memory_(static_cast<std::byte*>(memory)), signals_(signals) {
  int size = 0;
  check_nccl(ncclCommCount(comm, &size), "window", comm);
  check_nccl(ncclCommUserRank(comm, &place_), "window", comm);
  PARKA_REQUIRE(size * static_cast<int64_t>(sizeof(uint32_t)) <= kSignalBytes);
  bases_.resize(static_cast<size_t>(size));
  std::byte** found = nullptr;
  check(cudaMallocHost(&found, bases_.size() * sizeof(std::byte*)), "window");
  find_bases<<<1, 1>>>(static_cast<ncclWindow_t>(window), size, found);
  check_launch("window");
  check(cudaDeviceSynchronize(), "window");
  std::copy(found, found + size, bases_.begin());
  check(cudaFreeHost(found), "window");
}

void PeerWindow::close() { ncclCommWindowDeregister(comm_, static_cast<ncclWindow_t>(window_)); }

// A barrier on the stream: each rank writes its number of barriers to every other rank, and waits until it has
// received the same number from all others. Work that was queued before is visible to all ranks afterwards.
void PeerWindow::meet(cudaStream_t stream) {
  static const auto batch_mem_op = driver_function<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  ++meetings_;
  const auto signal = [&](int place) { return signals_ + static_cast<size_t>(place) * sizeof(uint32_t); };
  std::vector<CUstreamBatchMemOpParams> ops;
  for (const auto kind : {CU_STREAM_MEM_OP_WRITE_VALUE_32, CU_STREAM_MEM_OP_WAIT_VALUE_32}) {
    for (int place = 0; place < static_cast<int>(bases_.size()); ++place) {
      if (place == place_) continue;
      CUstreamBatchMemOpParams op{};
      op.operation = kind;
      if (kind == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        op.writeValue.address = address(at(place, signal(place_)));
        op.writeValue.value = meetings_;
      } else {
        op.waitValue.address = address(signal(place));
        op.waitValue.value = meetings_;
        op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      }
      ops.push_back(op);
    }
  }
  const CUresult result = batch_mem_op(stream, static_cast<unsigned>(ops.size()), ops.data(), 0);
  if (result != CUDA_SUCCESS) {
    throw Error(ExitCode::kInternal, "cuStreamBatchMemOp: CUDA error " + std::to_string(static_cast<int>(result)));
  }
}

void PeerWindow::exchange(const std::byte* in, std::byte* chunks, int64_t chunk_bytes, cudaStream_t stream) {
  const int size = static_cast<int>(bases_.size());
  meet(stream);
  for (int step = 1; step < size; ++step) {
    const int to = (place_ + step) % size;  // one rank writes to a rank at a time
    const int slot = place_ < to ? place_ : place_ - 1;
    check(cudaMemcpyAsync(at(to, chunks + slot * chunk_bytes), in + to * chunk_bytes,
                          static_cast<size_t>(chunk_bytes), cudaMemcpyDefault, stream),
          "exchange");
  }
  meet(stream);
}

void PeerWindow::gather_columns(const std::byte* in, std::byte* out, int64_t rows, int64_t row_bytes,
                                cudaStream_t stream) {
  const int size = static_cast<int>(bases_.size());
  meet(stream);
  for (int step = 1; step <= size; ++step) {  // this rank's own last
    const int to = (place_ + step) % size;
    std::byte* const columns = at(to, out + place_ * row_bytes);
    const auto width = static_cast<size_t>(row_bytes), pitch = static_cast<size_t>(size) * width;
    check(cudaMemcpy2DAsync(columns, pitch, in, width, width, static_cast<size_t>(rows), cudaMemcpyDefault, stream),
          "gather of columns");
  }
  meet(stream);
}

void PeerWindow::all_to_all(const std::byte* in, std::byte* out, int64_t rows, int64_t block_bytes,
                            cudaStream_t stream) {
  const int size = static_cast<int>(bases_.size());
  meet(stream);
  for (int step = 1; step <= size; ++step) {    // this rank's own last
    const int to = (place_ + step) % size;      // one rank writes to a rank at a time
    for (int64_t row = 0; row < rows; ++row) {  // not one copy of two dimensions, whose pitch is limited
      check(cudaMemcpyAsync(at(to, out + (row * size + place_) * block_bytes), in + (row * size + to) * block_bytes,
                            static_cast<size_t>(block_bytes), cudaMemcpyDefault, stream),
            "all-to-all");
    }
  }
  meet(stream);
}

}  // namespace parka::cuda
