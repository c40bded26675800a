#pragma once
#include <atomic>
#include <cstdint>

namespace parka::cuda {

// Waits until the host has so many bytes to spare, and a reserve for everything else on it: a virtual machine's
// memory may grow as it is used. false: it has not after some seconds, or `given_up` has become true.
bool wait_for_host_room(int64_t bytes, const std::atomic<bool>& given_up);

// Memory of the host that a GPU can access under the host's own addresses: zeros, whose pages all threads make
// together, and one registration, so that a copy may span any part of it.
class PinnedMemory {
 public:
  // Throws Error(kBadInput) naming the size when the host has too little, or does not pin it.
  explicit PinnedMemory(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  void* data() const { return data_; }

 private:
  void make_pages();

  void* data_ = nullptr;
  int64_t bytes_;
};

}  // namespace parka::cuda
