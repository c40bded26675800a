#include "model/activation_offload.h"

#include <utility>

#include "core/error.h"

namespace parka {

ActivationOffload::ActivationOffload(int64_t num_blocks, int64_t offload_blocks)
    : num_moved_(offload_blocks), places_(static_cast<size_t>(num_blocks), -1) {
  if (!moves_blocks()) return;
  const int64_t count = num_moved_ + kRooms;
  PARKA_REQUIRE(count <= num_blocks);
  for (int64_t place = 0; place < count; ++place) {
    blocks_.push_back(place * num_blocks / count);
    places_[static_cast<size_t>(blocks_.back())] = place;
  }
}

int64_t ActivationOffload::room_before(int64_t l) const {
  const int64_t place = place_of(l);
  return place < kRooms ? -1 : blocks_[static_cast<size_t>(place - kRooms)];
}

void ActivationOffload::set_room(int64_t l, std::vector<TensorId> tensors) {
  const int64_t place = place_of(l);
  if (place >= 0) rooms_[static_cast<size_t>(place % kRooms)].ids = std::move(tensors);
}

int64_t ActivationOffload::host_bytes(const MemoryPlan& plan) const {
  int64_t bytes = 0;
  for (int64_t place = 0; place < num_moved_; ++place) {
    for (TensorId id : room(place).ids) bytes += plan[id].bytes;
  }
  return bytes;
}

void ActivationOffload::bind(Device& device, const Arena& arena) {
  for (int64_t place = 0; place < num_moved_; ++place) {
    Room& room = rooms_[static_cast<size_t>(place % kRooms)];
    if (room.store != nullptr) continue;
    int64_t bytes = 0;
    for (TensorId id : room.ids) {
      room.tensors.push_back(arena[id]);
      bytes += room.tensors.back().bytes();
    }
    room.store = device.make_host_store(ceil_div(num_moved_ - place, kRooms), bytes);
  }
}

// What the room holds is on its way to the host.
void ActivationOffload::before_forward(Device& device, int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= kRooms) device.time_wait("copies to the host", [&] { room(place).store->wait(); });
}

void ActivationOffload::after_forward(int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= 0 && place < num_moved_) room(place).store->save(place / kRooms, room(place).tensors);
}

// What the block has left is on its way back.
void ActivationOffload::before_backward(Device& device, int64_t l) const {
  const int64_t place = place_of(l);
  if (place < 0 || place >= num_moved_) return;
  device.time_wait("copies from the host", [&] { room(place).store->wait(); });
}

void ActivationOffload::after_backward(int64_t l) const {
  const int64_t place = place_of(l);
  if (place >= kRooms) room(place).store->load(place / kRooms - 1, room(place).tensors);
}

}  // namespace parka
