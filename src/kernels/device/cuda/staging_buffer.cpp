#include "kernels/device/cuda/staging_buffer.h"

#include <algorithm>
#include <cstring>

#include <sys/mman.h>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/pinned_memory.h"

namespace parka::cuda {
namespace {

// One registration, too small to hold up the driver, which launches wait for, for long. No copy spans two.
constexpr int64_t kChunkBytes = int64_t{256} << 20;
// Copies of at least so many bytes share an event, and so many groups of them are queued at a time.
constexpr int64_t kGroupBytes = int64_t{128} << 20;
constexpr size_t kGroupsAhead = 4;

}  // namespace

CudaStaging::CudaStaging(int ordinal, cudaStream_t stream, int64_t bytes)
    : ordinal_(ordinal), stream_(stream), bytes_(bytes) {
  check(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "event");
  thread_ = start_thread("copies checkpoints to the host", [this] { work(); });
}

CudaStaging::~CudaStaging() {
  stop_thread(thread_, mutex_, changed_, stopping_);
  cudaStreamSynchronize(copies_);
  release_memory();
  for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  cudaEventDestroy(ready_);
  cudaStreamDestroy(copies_);
}

void CudaStaging::work() {
  cudaSetDevice(ordinal_);
  std::string failure = prepare();
  std::unique_lock lock(mutex_);
  failure_ = std::move(failure);
  prepared_ = true;
  changed_.notify_all();
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || num_recorded_ < groups_.size(); });
    if (stopping_) return;
    try {
      queue_groups(lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      error_ = std::current_exception();
      num_recorded_ = groups_.size();
      changed_.notify_all();
    }
  }
}

void CudaStaging::queue_groups(std::unique_lock<std::mutex>& lock) {
  while (num_recorded_ < groups_.size() && !stopping_) {
    const size_t number = num_recorded_;
    lock.unlock();
    if (number >= kGroupsAhead) check(cudaEventSynchronize(events_[number - kGroupsAhead]), "copy to the host");
    for (const Copy& copy : groups_[number].copies) queue(copy);
    check(cudaEventRecord(events_[number], copies_), "copy to the host");
    lock.lock();
    num_recorded_ = number + 1;
    changed_.notify_all();
  }
}

void CudaStaging::release_memory() {
  for (int64_t begin = 0; begin < pinned_bytes_; begin += kChunkBytes) cudaHostUnregister(memory_ + begin);
  if (memory_ != nullptr) ::munmap(memory_, static_cast<size_t>(bytes_));
  memory_ = nullptr;
  pinned_bytes_ = 0;
}

std::string CudaStaging::prepare() {
  void* memory = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return fmt::format("{:.2f} GiB of address space were refused", bytes_ / 0x1p30);
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
  if (!wait_for_host_room(count, stopping_)) {
    return fmt::format("{:.2f} GiB of host memory are needed, and after {:.2f} GiB too little was left",
                       bytes_ / 0x1p30, begin / 0x1p30);
  }
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
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return prepared_; });
  return failure_;
}

// Tensors that lie on the device as they will in the buffer are copied in one piece.
void CudaStaging::begin(const std::vector<TensorView>& tensors) {
  if (!failure().empty()) throw_internal("no memory to copy to: {}", failure_);
  {
    // The thread may still queue copies of a snapshot that nobody waits for, as its save has failed.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_recorded_ >= groups_.size(); });
  }
  std::vector<Group> groups(1);
  staged_.clear();
  int64_t at = 0;
  for (size_t i = 0; i < tensors.size();) {
    if (groups.back().bytes >= kGroupBytes) groups.emplace_back();
    const auto* const source = static_cast<const std::byte*>(tensors[i].data);
    int64_t count = 0, without_padding = 0;
    do {
      const int64_t bytes = tensors[i].bytes();
      PARKA_REQUIRE(at + count + bytes <= bytes_);
      staged_.push_back({{memory_ + at + count, static_cast<size_t>(bytes)}, groups.size() - 1});
      without_padding = count + bytes;
      count += place_of(bytes);
      ++i;
    } while (i < tensors.size() && tensors[i].data == source + count);
    groups.back().copies.push_back({source, at, without_padding});
    groups.back().bytes += count;
    at += count;
  }
  while (events_.size() < groups.size()) {
    check(cudaEventCreateWithFlags(&events_.emplace_back(), cudaEventDisableTiming | cudaEventBlockingSync),
          "event");
  }
  check(cudaEventRecord(ready_, stream_), "copy to the host");
  check(cudaStreamWaitEvent(copies_, ready_), "copy to the host");
  const std::lock_guard lock(mutex_);
  groups_ = std::move(groups);
  num_recorded_ = 0;
  error_ = nullptr;
  changed_.notify_all();
}

void CudaStaging::queue(const Copy& copy) {
  const std::byte* source = copy.source;
  // A copy between host memory and host memory would keep the driver, which launches wait for, as long as it takes.
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, source), "copy to the host");
  if (attributes.type == cudaMemoryTypeHost) {
    check(cudaEventSynchronize(ready_), "copy to the host");
    std::memcpy(memory_ + copy.at, source, static_cast<size_t>(copy.count));
    return;
  }
  int64_t at = copy.at;
  for (const int64_t end = at + copy.count; at < end;) {
    const int64_t part = std::min(end - at, kChunkBytes - at % kChunkBytes);
    check(cudaMemcpyAsync(memory_ + at, source, static_cast<size_t>(part), cudaMemcpyDeviceToHost, copies_),
          "copy to the host");
    source += part;
    at += part;
  }
}

cudaEvent_t CudaStaging::recorded(size_t group) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_recorded_ > group; });
  if (error_) std::rethrow_exception(error_);
  return events_[group];
}

void CudaStaging::order_after(size_t index) {
  check(cudaStreamWaitEvent(stream_, recorded(staged_.at(index).group)), "wait for copies");
}

std::span<const std::byte> CudaStaging::wait(size_t index) {
  const Staged& staged = staged_.at(index);
  cudaSetDevice(ordinal_);  // a new thread is on the first GPU, and would make a context there
  check(cudaEventSynchronize(recorded(staged.group)), "copy to the host");
  return staged.bytes;
}

}  // namespace parka::cuda
