#include "optim/state_stream.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

int64_t aligned(int64_t bytes) { return ceil_div(bytes, MemoryPlan::kAlignment) * MemoryPlan::kAlignment; }

}  // namespace

int64_t StateStream::slot_bytes(const std::vector<int64_t>& tensors) {
  int64_t sum = 0;
  for (const int64_t bytes : tensors) sum += aligned(bytes);
  return sum;
}

StateStream::StateStream(const Arena& arena, std::vector<TensorView> slots, std::vector<ParameterState> states,
                         int64_t part_elements)
    : arena_(arena),
      slots_(std::move(slots)),
      states_(std::move(states)),
      copies_(arena.device().make_host_stream(slots_.size())) {
  PARKA_REQUIRE(slots_.size() >= kLeastSlots && part_elements > 0 && part_elements % kMomentGroup == 0);
  for (size_t i = 0; i < states_.size(); ++i) {
    first_part_.push_back(parts_.size());
    bool any_in_host_memory = false;
    states_[i].visit([&](const TensorView& tensor, int64_t) {
      any_in_host_memory = any_in_host_memory || arena_.is_in_host_memory(tensor);
    });
    if (!any_in_host_memory) continue;
    const int64_t numel = states_[i].numel();
    for (int64_t first = 0; first < numel; first += part_elements) {
      parts_.push_back({i, first, std::min(part_elements, numel - first)});
    }
  }
  first_part_.push_back(parts_.size());
}

ParameterState StateStream::place(const Part& part, size_t slot, std::vector<Carried>& carried) const {
  ParameterState state = states_[part.parameter].part(part.first, part.count);
  int64_t at = 0;
  state.visit([&](TensorView& tensor, int64_t) {
    if (!arena_.is_in_host_memory(tensor)) return;
    PARKA_REQUIRE(at + tensor.bytes() <= slots_[slot].bytes());
    const TensorView host = tensor;
    tensor.data = slots_[slot].as<uint8_t>() + at;
    carried.push_back({host, tensor});
    at += aligned(tensor.bytes());
  });
  return state;
}

void StateStream::begin(const std::vector<size_t>& order) {
  order_.clear();
  for (const size_t i : order) {
    for (size_t part = first_part_.at(i); part < first_part_[i + 1]; ++part) order_.push_back(part);
  }
  next_ = 0;
  loaded_.clear();
  copies_->follow_device();
  load_ahead();
}

void StateStream::load(size_t part) {
  const size_t slot = num_loads_++ % slots_.size();
  std::vector<Carried> carried;
  place(parts_[part], slot, carried);
  std::vector<HostStream::Copy> copies;
  copies.reserve(carried.size());
  for (const Carried& c : carried) copies.push_back({c.on_device.data, c.host.data, c.host.bytes()});
  copies_->load(slot, copies);
  loaded_.push_back({part, slot});
}

void StateStream::load_ahead() {
  while (loaded_.size() < slots_.size() && next_ < order_.size()) load(order_[next_++]);
}

// A part that was loaded ahead in vain is loaded again when its turn comes.
StateStream::Loaded StateStream::take(size_t part) {
  if (loaded_.empty() || loaded_.front().part != part) {
    loaded_.clear();
    const auto found = std::find(order_.begin(), order_.end(), part);
    next_ = static_cast<size_t>(found - order_.begin()) + (found == order_.end() ? 0 : 1);
    load(part);
  }
  const Loaded taken = loaded_.front();
  loaded_.pop_front();
  return taken;
}

void StateStream::update(size_t i, const QueueUpdate& queue) {
  if (!is_carried(i)) {
    queue(0, states_.at(i));
    return;
  }
  for (size_t part = first_part_[i]; part < first_part_[i + 1]; ++part) {
    const Loaded loaded = take(part);
    std::vector<Carried> carried;
    const ParameterState on_device = place(parts_[part], loaded.slot, carried);
    arena_.device().time_wait(kLoadWait, [&] { copies_->wait_loaded(loaded.slot); });
    queue(parts_[part].first, on_device);
    std::vector<HostStream::Copy> copies;
    copies.reserve(carried.size());
    for (const Carried& c : carried) copies.push_back({c.host.data, c.on_device.data, c.host.bytes()});
    copies_->save(copies);
    load_ahead();
  }
}

void StateStream::end() {
  arena_.device().time_wait(kSaveWait, [&] { copies_->wait_saved(); });
}

}  // namespace parka
