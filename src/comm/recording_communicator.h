#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace parka {

// A collective as it was queued.
struct RecordedCollective {
  enum class Kind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kAllToAll };
  Kind kind;
  int64_t bytes;  // of the whole tensor, all ranks' pieces together; kAllToAll: of one rank's `in`
  Peers peers;
  // kReduceScatter through an exchange buffer: bytes that a rank reads and writes to add up the others' pieces.
  int64_t summed_bytes = 0;

  bool operator==(const RecordedCollective&) const = default;
};

// The device's later work waits for a collective...
struct RecordedWait {
  uint64_t newer;  // ... after which so many others are queued

  bool operator==(const RecordedWait&) const = default;
};

// A rank without the others, which say the same. Collectives check their tensors and tell a function.
class RecordingCommunicator final : public Communicator {
 public:
  // The functions are told of calls in their order; empty ones are not called.
  struct Listener {
    std::function<void(RecordedCollective)> collective;
    std::function<void(RecordedWait)> wait;
  };
  RecordingCommunicator(int rank, int size, Listener listener = {});

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override;
  void set_exchange_buffer(const TensorView& buffer) override { exchange_bytes_ = buffer.bytes(); }

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) override;

  void wait(Device& device, uint64_t number) override;

  std::vector<std::string> gather_text(const std::string& text) override;

 private:
  void record(const RecordedCollective& collective);

  int rank_, size_;
  Listener listener_;
  int64_t exchange_bytes_ = 0;
};

}  // namespace parka
