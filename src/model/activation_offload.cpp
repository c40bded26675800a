#include "model/activation_offload.h"

#include <algorithm>

#include "core/error.h"

namespace parka {

ActivationOffload::ActivationOffload(int64_t num_blocks, int64_t offload_blocks, int64_t first_kept)
    : num_moved_(first_kept == 0 ? offload_blocks
                                 : std::clamp<int64_t>(num_blocks - first_kept - kBuffers, 0, offload_blocks)),
      places_(static_cast<size_t>(num_blocks), -1) {
  if (!moves_blocks()) return;
  const int64_t count = num_moved_ + kBuffers;
  const int64_t num_kept = num_blocks - first_kept;
  PARKA_REQUIRE(count <= num_kept);
  for (int64_t place = 0; place < count; ++place) {
    blocks_.push_back(first_kept + place * num_kept / count);
    places_[static_cast<size_t>(blocks_.back())] = place;
  }
}

int64_t ActivationOffload::block_before(int64_t l) const {
  const int64_t place = place_of(l);
  return place < kBuffers ? -1 : blocks_[static_cast<size_t>(place - kBuffers)];
}

void ActivationOffload::add_to_buffer(int64_t l, const std::vector<TensorId>& tensors) {
  const int64_t place = place_of(l);
  if (place < 0) return;
  std::vector<TensorId>& ids = buffers_[static_cast<size_t>(place % kBuffers)].ids;
  ids.insert(ids.end(), tensors.begin(), tensors.end());
}

int64_t ActivationOffload::host_bytes(const MemoryPlan& plan) const {
  int64_t bytes = 0;
  for (int64_t place = 0; place < num_moved_; ++place) {
    for (TensorId id : buffer(place).ids) bytes += plan[id].bytes;
  }
  return bytes;
}

void ActivationOffload::bind(Device& device, const Arena& arena) {
  for (int64_t place = 0; place < num_moved_; ++place) {
    Buffer& buffer = buffers_[static_cast<size_t>(place % kBuffers)];
    if (buffer.store != nullptr) continue;
    int64_t bytes = 0;
    for (TensorId id : buffer.ids) {
      buffer.tensors.push_back(arena[id]);
      bytes += buffer.tensors.back().bytes();
    }
    buffer.store = device.make_host_store(ceil_div(num_moved_ - place, kBuffers), bytes);
  }
}

// The buffer's content is on its way to the host.
void ActivationOffload::before_forward(Device& device, int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= kBuffers) device.time_wait("copies to the host", [&] { buffer(place).store->wait(); });
}

void ActivationOffload::after_forward(int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= 0 && place < num_moved_) buffer(place).store->save(place / kBuffers, buffer(place).tensors);
}

// The block's content is on its way back.
void ActivationOffload::before_backward(Device& device, int64_t l) const {
  const int64_t place = place_of(l);
  if (place < 0 || place >= num_moved_) return;
  device.time_wait("copies from the host", [&] { buffer(place).store->wait(); });
}

void ActivationOffload::after_backward(int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= kBuffers) buffer(place).store->load(place / kBuffers - 1, buffer(place).tensors);
}

}  // namespace parka
