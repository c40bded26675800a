#include "kernels/device/cuda/pinned_memory.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <linux/mempolicy.h>

#include "core/error.h"
#include "core/memory/host_memory.h"
#include "core/parallel.h"
#include "kernels/device/cuda/check.h"

namespace parka::cuda {
namespace {

// How long a virtual machine may take to grow.
constexpr std::chrono::seconds kGrowth{10};

bool has_room(int64_t bytes) {
  const std::optional<int64_t> available = available_host_bytes();
  return !available || *available >= bytes + kHostReserveBytes;
}

// Has pages made in the memory of the GPU's own socket, as long as there is some: its link is further from that of
// another one. If that is refused, as in some containers, they are where the threads are that make them.
void prefer_near_memory(void* data, int64_t bytes) {
  constexpr size_t kWords = 16, kBitsOfWord = 8 * sizeof(unsigned long);
  int gpu = 0, node = -1;
  if (cudaGetDevice(&gpu) != cudaSuccess ||
      cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, gpu) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (node < 0 || static_cast<size_t>(node) >= kWords * kBitsOfWord) return;
  std::array<unsigned long, kWords> nodes{};
  nodes[static_cast<size_t>(node) / kBitsOfWord] = 1UL << (static_cast<size_t>(node) % kBitsOfWord);
  ::syscall(SYS_mbind, data, static_cast<size_t>(bytes), MPOL_PREFERRED, nodes.data(), kWords * kBitsOfWord, 0UL);
}

constexpr const char* kIn = "copy from host memory";
constexpr const char* kOut = "copy to host memory";

void queue_copies(const std::vector<HostStream::Copy>& copies, cudaStream_t stream, const char* what) {
  for (const HostStream::Copy& copy : copies) {
    check(cudaMemcpyAsync(copy.target, copy.source, static_cast<size_t>(copy.bytes), cudaMemcpyDefault, stream),
          what);
  }
}

}  // namespace

bool wait_for_host_room(int64_t bytes, const std::atomic<bool>& given_up) {
  const auto deadline = std::chrono::steady_clock::now() + kGrowth;
  while (!has_room(bytes)) {
    if (given_up || std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return !given_up;
}

PinnedMemory::PinnedMemory(int64_t bytes) : bytes_(bytes) {
  void* const data =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw_bad_input("not enough host memory: {:.2f} GiB of address space were refused; keep less there",
                    static_cast<double>(bytes) / 0x1p30);
  }
  data_ = data;
  ::madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  ::madvise(data_, static_cast<size_t>(bytes_), MADV_DONTFORK);  // a child would get copies of all pinned pages
  prefer_near_memory(data_, bytes_);
  try {
    make_pages();
    const cudaError_t status = cudaHostRegister(data_, static_cast<size_t>(bytes_), cudaHostRegisterDefault);
    if (status != cudaSuccess) {
      cudaGetLastError();
      throw_bad_input("{:.2f} GiB of host memory could not be pinned: {}; keep less there, or raise `ulimit -l`",
                      static_cast<double>(bytes_) / 0x1p30, cudaGetErrorString(status));
    }
  } catch (...) {
    ::munmap(data_, static_cast<size_t>(bytes_));
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  cudaHostUnregister(data_);
  ::munmap(data_, static_cast<size_t>(bytes_));
}

// The driver would make them one after another, on one thread.
void PinnedMemory::make_pages() {
  constexpr int64_t kAtATime = int64_t{1} << 30, kOfThread = int64_t{2} << 20, kPageBytes = 4096;
  const std::atomic<bool> never{false};
  for (int64_t begin = 0; begin < bytes_; begin += kAtATime) {
    const int64_t count = std::min(kAtATime, bytes_ - begin);
    if (!wait_for_host_room(count, never)) {
      throw_bad_input(
          "not enough host memory: {:.2f} GiB are to be pinned, and after {:.2f} GiB too little was left; keep less there",
          static_cast<double>(bytes_) / 0x1p30, static_cast<double>(begin) / 0x1p30);
    }
    auto* const memory = static_cast<volatile std::byte*>(data_) + begin;
    parallel_for(count, kOfThread, [memory](int64_t first, int64_t end) {
      for (int64_t at = first; at < end; at += kPageBytes) memory[at] = std::byte{0};
    });
  }
}

CudaHostStream::CudaHostStream(cudaStream_t stream, size_t num_slots)
    : stream_(stream), loaded_(num_slots), saved_(num_slots) {
  check(cudaStreamCreateWithFlags(&in_, cudaStreamNonBlocking), "stream");
  check(cudaStreamCreateWithFlags(&out_, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "event");
  for (auto* events : {&loaded_, &saved_}) {
    for (cudaEvent_t& event : *events) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  }
}

CudaHostStream::~CudaHostStream() {
  cudaStreamSynchronize(in_);
  cudaStreamSynchronize(out_);
  for (const auto* events : {&loaded_, &saved_}) {
    for (const cudaEvent_t event : *events) cudaEventDestroy(event);
  }
  cudaEventDestroy(ready_);
  cudaStreamDestroy(out_);
  cudaStreamDestroy(in_);
}

void CudaHostStream::follow_device() {
  check(cudaEventRecord(ready_, stream_), kIn);
  check(cudaStreamWaitEvent(in_, ready_), kIn);
}

void CudaHostStream::load(size_t slot, const std::vector<Copy>& copies) {
  check(cudaStreamWaitEvent(in_, saved_.at(last_saved_)), kIn);
  queue_copies(copies, in_, kIn);
  check(cudaEventRecord(loaded_.at(slot), in_), kIn);
}

void CudaHostStream::wait_loaded(size_t slot) { check(cudaStreamWaitEvent(stream_, loaded_.at(slot)), kIn); }

void CudaHostStream::save(const std::vector<Copy>& copies, size_t slot) {
  check(cudaEventRecord(ready_, stream_), kOut);
  check(cudaStreamWaitEvent(out_, ready_), kOut);
  queue_copies(copies, out_, kOut);
  check(cudaEventRecord(saved_.at(slot), out_), kOut);
  last_saved_ = slot;
}

void CudaHostStream::wait_saved(size_t slot) { check(cudaStreamWaitEvent(stream_, saved_.at(slot)), kOut); }

}  // namespace parka::cuda
