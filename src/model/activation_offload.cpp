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
  std::vector<TensorId>& ids = buffers_[slot_of(place)].ids;
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
  if (!moves_blocks() || device.op_recorder() != nullptr) return;
  for (Buffer& buffer : buffers_) {
    for (TensorId id : buffer.ids) buffer.tensors.push_back(arena[id]);
  }
  int64_t bytes = 0;
  for (int64_t place = 0; place < num_moved_; ++place) {
    offsets_.push_back(bytes);
    for (const TensorView& tensor : buffer(place).tensors) bytes += tensor.bytes();
  }
  memory_ = std::make_unique<HostMemory>(device, bytes);
  copies_ = device.make_host_stream(kBuffers);
}

std::vector<HostStream::Copy> ActivationOffload::copies_of(int64_t place, bool to_host) const {
  std::vector<HostStream::Copy> copies;
  std::byte* host = memory_->memory + offsets_[static_cast<size_t>(place)];
  for (const TensorView& tensor : buffer(place).tensors) {
    copies.push_back({host, tensor.data, tensor.bytes()});
    if (!to_host) copies.back() = {tensor.data, host, tensor.bytes()};
    host += tensor.bytes();
  }
  return copies;
}

// The buffer's content is on its way to the host.
void ActivationOffload::before_forward(Device& device, int64_t l) const {
  const int64_t place = moved_place_of(l);
  if (place >= kBuffers) device.time_wait("copies to the host", [&] { copies_->wait_saved(slot_of(place)); });
}

void ActivationOffload::after_forward(int64_t l) const {
  const int64_t place = moved_place_of(l);
  if (place >= 0 && place < num_moved_) copies_->save(copies_of(place, /*to_host=*/true), slot_of(place));
}

// The block's content is on its way back.
void ActivationOffload::before_backward(Device& device, int64_t l) const {
  const int64_t place = moved_place_of(l);
  if (place < 0 || place >= num_moved_) return;
  device.time_wait("copies from the host", [&] { copies_->wait_loaded(slot_of(place)); });
}

void ActivationOffload::after_backward(int64_t l) const {
  const int64_t place = moved_place_of(l);
  if (place < kBuffers) return;
  copies_->follow_device();
  copies_->load(slot_of(place), copies_of(place - kBuffers, /*to_host=*/false));
}

}  // namespace parka
