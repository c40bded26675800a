#include "kernels/cuda/staging_buffer.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <thread>

#include <sys/mman.h>

#include "core/error.h"
#include "core/host_memory.h"
#include "kernels/cuda/check.h"

namespace parka::cuda {
namespace {

// One registration: small enough that the driver, which launches wait for, is not held up for long. No copy spans
// two of them.
constexpr int64_t kChunkBytes = int64_t{256} << 20;
// Copies of so many bytes share an event.
constexpr int64_t kBytesPerEvent = int64_t{128} << 20;
// What is left to everything else on the host.
constexpr int64_t kReserveBytes = int64_t{2} << 30;
// A virtual machine's memory may grow as it is used.
constexpr std::chrono::seconds kGrowth{10};

bool has_room(int64_t bytes) {
  const std::optional<int64_t> available = available_host_bytes();
  return !available || *available >= bytes + kReserveBytes;
}

}  // namespace

CudaStaging::CudaStaging(int ordinal, cudaStream_t stream, int64_t bytes)
    : ordinal_(ordinal), stream_(stream), bytes_(bytes) {
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "event");
  try {
    preparing_ = std::async(std::launch::async, [this] { return prepare(); });
  } catch (const std::system_error&) {
    failure_ = prepare();  // no thread is to be had
  }
}

CudaStaging::~CudaStaging() {
  stopping_ = true;
  if (preparing_.valid()) preparing_.wait();
  cudaStreamSynchronize(copies_);
  release_memory();
  for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  cudaEventDestroy(ready_);
  cudaStreamDestroy(copies_);
}

void CudaStaging::release_memory() {
  for (int64_t begin = 0; begin < pinned_bytes_; begin += kChunkBytes) cudaHostUnregister(memory_ + begin);
  if (memory_ != nullptr) ::munmap(memory_, static_cast<size_t>(bytes_));
  memory_ = nullptr;
  pinned_bytes_ = 0;
}

std::string CudaStaging::prepare() {
  cudaSetDevice(ordinal_);
  void* memory = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return fmt::format("{:.2f} GiB of addresses were refused", bytes_ / 0x1p30);
  memory_ = static_cast<std::byte*>(memory);
  ::madvise(memory_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  ::madvise(memory_, static_cast<size_t>(bytes_), MADV_DONTFORK);  // a child would get copies of all pinned pages
  for (int64_t begin = 0; begin < bytes_; begin += kChunkBytes) {
    const std::string failure = pin(begin, std::min(kChunkBytes, bytes_ - begin));
    if (failure.empty()) continue;
    release_memory();
    return failure;
  }
  return {};
}

std::string CudaStaging::pin(int64_t begin, int64_t count) {
  const auto deadline = std::chrono::steady_clock::now() + kGrowth;
  while (!has_room(count)) {
    if (stopping_ || std::chrono::steady_clock::now() >= deadline) {
      return fmt::format("{:.2f} GiB of host memory are wanted, and after {:.2f} GiB too little was left",
                         bytes_ / 0x1p30, begin / 0x1p30);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (stopping_) return "not wanted any more";
  constexpr int64_t kPageBytes = 4096;
  for (int64_t at = begin; at < begin + count; at += kPageBytes) {
    const_cast<volatile std::byte*>(memory_)[at] = std::byte{0};  // the page is made here, outside the driver
  }
  if (const cudaError_t status =
          cudaHostRegister(memory_ + begin, static_cast<size_t>(count), cudaHostRegisterDefault);
      status != cudaSuccess) {
    cudaGetLastError();
    return fmt::format("{:.2f} GiB of host memory could not be pinned: {}", bytes_ / 0x1p30,
                       cudaGetErrorString(status));
  }
  pinned_bytes_ = begin + count;
  return {};
}

const std::string& CudaStaging::failure() {
  if (preparing_.valid()) failure_ = preparing_.get();
  return failure_;
}

// What lies on the device as it will in the buffer is copied in one piece, and copies share events: about a
// thousand entries fit a stream's queue, and with more the host would wait here for the copies.
void CudaStaging::begin(const std::vector<TensorView>& tensors) {
  if (!failure().empty()) throw_internal("no memory to copy to: {}", failure_);
  check(cudaEventRecord(ready_, stream_), "copy to the host");
  check(cudaStreamWaitEvent(copies_, ready_), "copy to the host");
  copied_.clear();
  size_t events = 0;
  int64_t at = 0, without_event = 0;
  for (size_t i = 0; i < tensors.size();) {
    const auto* const source = static_cast<const std::byte*>(tensors[i].data);
    int64_t count = 0;
    do {
      PARKA_REQUIRE(at + count + tensors[i].bytes() <= bytes_);
      copied_.push_back({{memory_ + at + count, static_cast<size_t>(tensors[i].bytes())}, events});
      count += place_of(tensors[i].bytes());
      ++i;
    } while (i < tensors.size() && tensors[i].data == source + count);
    // The last tensor has no padding behind it that is sure to be there.
    const TensorView& last = tensors[i - 1];
    copy(source, at, count - place_of(last.bytes()) + last.bytes());
    at += count;
    without_event += count;
    if (without_event < kBytesPerEvent && i < tensors.size()) continue;
    check(cudaEventRecord(event(events++), copies_), "copy to the host");
    without_event = 0;
  }
}

void CudaStaging::copy(const std::byte* source, int64_t at, int64_t count) {
  for (const int64_t end = at + count; at < end;) {
    const int64_t part = std::min(end - at, kChunkBytes - at % kChunkBytes);
    check(cudaMemcpyAsync(memory_ + at, source, static_cast<size_t>(part), cudaMemcpyDeviceToHost, copies_),
          "copy to the host");
    source += part;
    at += part;
  }
}

cudaEvent_t CudaStaging::event(size_t number) {
  while (events_.size() <= number) {
    check(cudaEventCreateWithFlags(&events_.emplace_back(), cudaEventDisableTiming | cudaEventBlockingSync),
          "event");
  }
  return events_[number];
}

void CudaStaging::order_after(size_t index) {
  check(cudaStreamWaitEvent(stream_, events_.at(copied_.at(index).event)), "wait for copies");
}

std::span<const std::byte> CudaStaging::wait(size_t index) {
  const Copied& copied = copied_.at(index);
  cudaSetDevice(ordinal_);  // a new thread is on the first GPU, and would make a context there
  check(cudaEventSynchronize(events_.at(copied.event)), "copy to the host");
  return copied.bytes;
}

}  // namespace parka::cuda
