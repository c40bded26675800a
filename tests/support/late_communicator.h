#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"

namespace parka::test {

// Passes collectives on as late as their order allows, as a slow link might make them: when something waits for
// them or for a later one. Until then what they read and write belongs to them. All ranks must wait at the same
// places.
class LateCommunicator final : public Communicator {
 public:
  explicit LateCommunicator(Communicator& real) : real_(real) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  std::string description() const override { return real_.description() + ", late"; }

  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override {
    waiting_.emplace_back([=, this, &device] { real_.all_reduce(device, x, reduction, peers); });
  }
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override {
    waiting_.emplace_back([=, this, &device] { real_.reduce_scatter(device, in, out, peers, accumulation); });
  }
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    waiting_.emplace_back([=, this, &device] { real_.all_gather(device, in, out, peers); });
  }
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    waiting_.emplace_back([=, this, &device] { real_.all_gather_columns(device, in, out, peers); });
  }
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    waiting_.emplace_back([=, this, &device] { real_.all_to_all(device, in, out, peers); });
  }

  uint64_t last_queued() const override { return real_.last_queued() + waiting_.size(); }
  void wait(Device& device, uint64_t number) override {
    PARKA_REQUIRE(number <= last_queued());
    while (real_.last_queued() < number) {
      waiting_.front()();
      waiting_.pop_front();
    }
    real_.wait(device, number);
  }

  std::vector<std::string> gather_text(const std::string& text) override { return real_.gather_text(text); }

 private:
  void divided() override { real_.divide(mesh()); }

  Communicator& real_;
  std::deque<std::function<void()>> waiting_;
};

}  // namespace parka::test
