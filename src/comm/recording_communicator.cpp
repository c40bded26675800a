#include "comm/recording_communicator.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace parka {

using Kind = RecordedCollective::Kind;

RecordingCommunicator::RecordingCommunicator(int rank, int size, Listener listener)
    : rank_(rank), size_(size), listener_(std::move(listener)) {
  PARKA_REQUIRE(rank >= 0 && rank < size);
}

std::string RecordingCommunicator::description() const { return fmt::format("{} ranks, recorded", size_); }

void RecordingCommunicator::record(const RecordedCollective& collective) {
  ++last_queued_;
  if (listener_.collective) listener_.collective(collective);
}

void RecordingCommunicator::all_reduce(Device&, const TensorView& x, Reduction, Peers peers) {
  check_reducible(x);
  record({Kind::kAllReduce, x.bytes(), peers});
}

void RecordingCommunicator::reduce_scatter(Device&, const TensorView& in, const TensorView& out, Peers peers,
                                           Accumulation accumulation) {
  check_reducible(in);
  check_scattered(in, out, size_of(peers));
  const int64_t written_and_added_to = (accumulation == Accumulation::kContinue ? 2 : 1) * out.bytes();
  record({Kind::kReduceScatter, in.bytes(), peers, exchange_bytes_ > 0 ? in.bytes() + written_and_added_to : 0});
}

void RecordingCommunicator::all_gather(Device&, const TensorView& in, const TensorView& out, Peers peers) {
  check_scattered(out, in, size_of(peers));
  record({Kind::kAllGather, out.bytes(), peers});
}

void RecordingCommunicator::all_gather_columns(Device&, const TensorView& in, const TensorView& out, Peers peers) {
  check_side_by_side(out, in, size_of(peers));
  PARKA_REQUIRE(exchange_bytes_ == 0 || out.bytes() <= exchange_bytes_);  // as GPUs need it
  record({Kind::kAllGather, out.bytes(), peers});
}

void RecordingCommunicator::all_to_all(Device&, const TensorView& in, const TensorView& out, Peers peers) {
  check_exchanged(in, out, size_of(peers));
  record({Kind::kAllToAll, in.bytes(), peers});
}

void RecordingCommunicator::wait(Device&, uint64_t number) {
  PARKA_REQUIRE(number <= last_queued_);
  if (number > 0 && listener_.wait) listener_.wait({last_queued_ - number});
}

std::vector<std::string> RecordingCommunicator::gather_text(const std::string& text) {
  return std::vector<std::string>(static_cast<size_t>(size_), text);
}

}  // namespace parka
