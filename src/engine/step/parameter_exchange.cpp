#include "engine/step/parameter_exchange.h"

#include <algorithm>

#include "kernels/device/device.h"

namespace parka {
namespace {

HostStream::Copy copy_of(const TensorView& target, const TensorView& source) {
  PARKA_REQUIRE(target.bytes() == source.bytes());
  return {.target = target.data, .source = source.data, .bytes = source.bytes()};
}

}  // namespace

ParameterExchange::ParameterExchange(Communicator& communicator, const Model& model, const Optimizer& optimizer,
                                     Device& device)
    : communicator_(communicator), model_(model), optimizer_(optimizer) {
  const bool has_host_parts = model.weights().has_host_parts();
  PARKA_REQUIRE(communicator.size() > 1 || has_host_parts);
  if (has_host_parts) host_stream_ = device.make_host_stream(gathered_.size());
}

void ParameterExchange::gather(Device& device, int unit, Pass pass, Changed changed) {
  model_.weights().before_gather(device, unit);
  for (const ModelWeights::Piece& piece : model_.weights().pieces(unit, pass)) {
    if (changed == Changed::kTrained && !piece.trainable) continue;
    if (piece.is_columns) {
      communicator_.all_gather_columns(device, piece.own, piece.whole, piece.peers);
    } else {
      communicator_.all_gather(device, piece.own, piece.whole, piece.peers);
    }
  }
}

// Queues copies into a unit's buffer, of which ops that are queued may be the last users.
void ParameterExchange::load(int unit, const std::vector<HostStream::Copy>& copies) {
  host_stream_->follow_device();
  host_stream_->load(gather_buffer_of(unit), copies);
}

// Copies to a unit's buffer what this rank has of it in host memory.
void ParameterExchange::fetch(int unit) {
  std::vector<HostStream::Copy> copies;
  for (const ModelWeights::HostPart& part : model_.weights().host_parts(unit)) {
    copies.push_back(copy_of(part.device, part.host));
  }
  load(unit, copies);
}

void ParameterExchange::wait_for_host(Device& device, int unit) {
  if (!comes_from_host(unit)) return;
  device.time_wait(kLoadWait, [&] { host_stream_->wait_loaded(gather_buffer_of(unit)); });
}

void ParameterExchange::prefetch(Device& device, int unit, Pass pass) {
  const ModelWeights& weights = model_.weights();
  if (unit < 0 || unit >= model_.parameters().num_units() || !weights.is_gathered_on_use(unit)) return;
  Gathered& buffer = gathered_[gather_buffer_of(unit)];
  if (buffer.unit == unit && (buffer.pass == pass || !weights.has_pieces_for_backward(unit))) return;
  buffer = {unit, pass, 0, false};
  if (comes_from_host(unit)) fetch(unit);
  if (!weights.is_divided(unit)) return;
  wait_for_host(device, unit);  // collectives begin when what the device has queued is done
  gather(device, unit, pass);
  buffer.number = communicator_.last_queued();
}

void ParameterExchange::gather_on_use(Device& device, int unit, Pass pass) {
  if (!model_.weights().is_gathered_on_use(unit)) return;
  prefetch(device, unit, pass);
  Gathered& buffer = gathered_[gather_buffer_of(unit)];
  if (buffer.is_ready) return;
  wait_for_host(device, unit);
  wait(device, buffer.number, "gathered weights");
  model_.weights().gathered(device, unit);
  buffer.is_ready = true;
}

void ParameterExchange::wait(Device& device, uint64_t number, const char* what) {
  device.time_wait(what, [&] { communicator_.wait(device, number); });
}

void ParameterExchange::before_forward(Device& device, int unit) {
  gather_on_use(device, unit, Pass::kForward);
  prefetch(device, unit + 1, Pass::kForward);
}

std::vector<int> ParameterExchange::opened_by(int unit) const {
  const ParameterTable& table = model_.parameters();
  const bool tied = table.ties_head();
  std::vector<int> opened = table.trained(unit);
  if (tied && unit == 0) std::erase(opened, table.embedding);  // open since the head
  if (tied && unit == table.head_unit() && table.is_trainable(table.embedding)) opened.push_back(table.embedding);
  return opened;
}

void ParameterExchange::before_backward(Device& device, int unit) {
  gather_on_use(device, unit, Pass::kBackward);
  // If backward has pieces of its own, all buffers are free while the head is at work.
  if (unit == model_.parameters().head_unit()) {
    const int first = std::max(model_.parameters().first_trained_unit, unit - kGatherBuffers);
    for (int last = unit - 1; last >= first; --last) prefetch(device, last, Pass::kBackward);
  }
  if (!optimizer_.shares_gradient_buffers()) return;
  const std::vector<int> opened = opened_by(unit);
  uint64_t last_read = 0;
  for (int parameter : opened) {
    last_read = std::max(last_read, reduced_[optimizer_.gradient_buffer(static_cast<size_t>(parameter))]);
  }
  wait(device, last_read, "buffer for gradients");
  for (int parameter : opened) optimizer_.open_gradient(device, static_cast<size_t>(parameter));
}

void ParameterExchange::after_backward(Device& device, int unit) {
  const ParameterTable& table = model_.parameters();
  // Into this unit's buffer, and ahead of its gradients, which have more time: the weights of the next block that
  // uses it, or those with which the next micro-batch begins, unless they change before it.
  const int next = unit - kGatherBuffers;
  if (next >= std::max(table.block_unit(0), table.first_trained_unit)) {
    prefetch(device, next, Pass::kBackward);
  } else if (!place_.is_last && unit > 0) {
    prefetch(device, (unit - 1) % kGatherBuffers + 1, Pass::kForward);
  }
  if (!place_.is_last && !optimizer_.shards_gradients()) return;
  if (communicator_.size() == 1) return;
  for (int parameter : table.trained(unit)) {
    const auto i = static_cast<size_t>(parameter);
    const Optimizer::GradientPieces& gradient = optimizer_.gradient_pieces(i);
    uint64_t& reduced = reduced_[optimizer_.gradient_buffer(i)];
    const Placement& placement = table.all[i].placement;
    if (placement.states.size == 1 && !optimizer_.shards_gradients()) {
      communicator_.all_reduce(device, gradient.whole, Reduction::kSum,
                               placement.is_by_expert() ? Peers::kReplicate : Peers::kAll);
      reduced = communicator_.last_queued();
      continue;
    }
    // Divided gradients: backward has overwritten the buffer with those of this micro-batch alone, and a rank's
    // piece of their sum joins what it has accumulated.
    const Accumulation accumulation =
        optimizer_.shards_gradients() && !place_.is_first ? Accumulation::kContinue : Accumulation::kBegin;
    communicator_.reduce_scatter(device, gradient.whole, gradient.own, placement.peers(), accumulation);
    reduced = communicator_.last_queued();
    if (place_.is_last && communicator_.size_of(Peers::kReplicate) > 1) {
      communicator_.all_reduce(device, gradient.own, Reduction::kSum, Peers::kReplicate);
      if (optimizer_.releases_gradients()) reduced = communicator_.last_queued();  // the piece lies in the buffer
    }
  }
  // The work after the last micro-batch reads the sums.
  if (unit == table.first_trained_unit && place_.is_last) {
    wait(device, communicator_.last_queued(), "sums of gradients");
  }
}

void ParameterExchange::wait_for_gradients(Device& device, int unit) {
  uint64_t last = 0;
  for (int parameter : model_.parameters().trained(unit)) {
    last = std::max(last, reduced_[optimizer_.gradient_buffer(static_cast<size_t>(parameter))]);
  }
  wait(device, last, "sums of gradients");
}

void ParameterExchange::sum_of_pieces(Device& device, const TensorView& x) {
  if (x.empty()) return;
  sum(device, x, Peers::kShard);
  if (communicator_.size_of(Peers::kReplicate) == 1) return;
  // NCCL may add in another order in each group.
  communicator_.all_reduce(device, x, Reduction::kMax, Peers::kReplicate);
  wait(device, communicator_.last_queued(), "sums of numbers");
}

void ParameterExchange::sum(Device& device, const TensorView& x, Peers peers) {
  if (communicator_.size() == 1) return;
  communicator_.all_reduce(device, x, Reduction::kSum, peers);
  wait(device, communicator_.last_queued(), "sums of numbers");
}

void ParameterExchange::exchange_pieces(Device& device, const TensorView& in, const TensorView& out, Peers peers) {
  if (in.data == out.data) return;
  communicator_.all_to_all(device, in, out, peers);
  wait(device, communicator_.last_queued(), "directions");
}

// Brings up to date what other ranks have changed of a unit that every rank has whole in host memory. This rank's
// pieces go to the device, those of all come together there and go back.
void ParameterExchange::share_in_host(Device& device, int unit) {
  const ModelWeights& weights = model_.weights();
  std::vector<HostStream::Copy> to_device, to_host;
  for (const ModelWeights::HostPart& part : weights.host_parts(unit)) {
    const int64_t piece = part.host.numel() / part.updated.size, begin = part.updated.rank * piece;
    to_device.push_back(copy_of(part.device.rows(begin, piece), part.host.rows(begin, piece)));
    to_host.push_back(copy_of(part.host, part.device));
  }
  load(unit, to_device);
  wait_for_host(device, unit);
  gather(device, unit, Pass::kForward);
  wait(device, communicator_.last_queued(), "gathered weights");
  weights.quantize_fetched(device, unit);
  host_stream_->save(to_host);
}

void ParameterExchange::weights_changed(Device& device, Changed changed) {
  const ModelWeights& weights = model_.weights();
  const auto is_shared_in_host = [&](int unit) {
    return weights.are_updates_shared() && !weights.is_divided(unit) && comes_from_host(unit);
  };
  const int num_units = model_.parameters().num_units();
  for (int unit = 0; unit < num_units; ++unit) {
    if (!weights.is_gathered_on_use(unit) && !is_shared_in_host(unit)) {
      gather(device, unit, Pass::kForward, changed);
    }
  }
  if (weights.are_updates_shared() && !weights.amax().empty()) {
    communicator_.all_reduce(device, weights.amax(), Reduction::kMax, Peers::kShard);
  }
  wait(device, communicator_.last_queued(), "gathered weights");
  bool any_is_saved = false;
  for (int unit = 0; unit < num_units; ++unit) {
    const bool has_changed = changed == Changed::kAll || !model_.parameters().trained(unit).empty();
    if (!has_changed || !is_shared_in_host(unit)) continue;
    share_in_host(device, unit);
    any_is_saved = true;
  }
  if (any_is_saved) device.time_wait(kSaveWait, [&] { host_stream_->wait_saved(); });
  weights.quantize(device, changed);
  std::ranges::fill(gathered_, Gathered{});
}

void GroupExchange::all_to_all(Device& device, const TensorView& in, const TensorView& out) {
  communicator_.all_to_all(device, in, out, peers_);
  wait(device);
}

void GroupExchange::all_gather(Device& device, const TensorView& in, const TensorView& out) {
  communicator_.all_gather(device, in, out, peers_);
}

void GroupExchange::reduce_scatter(Device& device, const TensorView& in, const TensorView& out,
                                   Accumulation accumulation) {
  communicator_.reduce_scatter(device, in, out, peers_, accumulation);
}

void GroupExchange::wait(Device& device) {
  device.time_wait(what_, [&] { communicator_.wait(device, communicator_.last_queued()); });
}

}  // namespace parka
