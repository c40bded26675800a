#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/memory/unit_buffers.h"
#include "core/placement.h"
#include "model/layers/peer_exchange.h"
#include "model/model.h"
#include "optim/optimizer.h"

namespace parka {

// Keeps weights and gradients of several ranks together, as the ZeRO stage divides them over groups of ranks:
//   gradients  stages 0 and 1: reduced in the last micro-batch of a step, each unit's as soon as backward has them;
//              2 and 3: in every micro-batch, and a rank's piece of their sum is what it accumulates. Where there
//              are several groups, a rank's piece is added to those of its peers in the other groups in the last
//              micro-batch
//   weights    stage 0: nothing to do, all ranks make the same update; 1 and 2: gathered after the update; 3: those
//              of blocks are gathered before each use, one block ahead, unless they are still in their buffer
// Where gradients are released, each unit's are reduced as at stages 0 and 1, and no rank accumulates any.
// Weights in host memory (precision.offload_weights) that GEMMs read are copied to the device before each use, in
// the same way, by one rank too. After the update, those that ranks have made parts of pass through the device.
// Collectives and copies run beside the device's other work, which waits for them where it needs their result.
class ParameterExchange final : public UnitHooks {
 public:
  // For more than one rank, or for weights in host memory that have buffers on the device. The parameters say what
  // is divided over which ranks (Placement). All of these must live as long as the exchange.
  ParameterExchange(Communicator& communicator, const Model& model, const Optimizer& optimizer, Device& device);

  // The names of the device's waits (Device::time_wait) when weights pass between it and host memory.
  static constexpr const char *kLoadWait = "weights from the host", *kSaveWait = "weights to the host";

  // The place of a micro-batch in its step: both if the step has no other.
  struct Place {
    bool is_first = false, is_last = false;
  };
  // Before the forward pass of a micro-batch of training, or of evaluation, which has no place in a step.
  void begin_micro_batch(const Place& place) { place_ = place; }
  // True if nothing is queued in this micro-batch. Blocks are gathered on use, or none is.
  bool is_idle() const {
    const bool gathers_on_use = model_.weights().is_gathered_on_use(model_.parameters().block_unit(0));
    return !place_.is_last && !optimizer_.shards_gradients() && !gathers_on_use;
  }
  void before_forward(Device& device, int unit) override;
  void before_backward(Device& device, int unit) override;
  void after_backward(Device& device, int unit) override;
  // With shares_gradient_buffers(): before the sums of the unit that after_backward() was told of last are read.
  void wait_for_gradients(Device& device, int unit);

  // Replaces x, of what ranks have in pieces, by its sum over a group: the same bits in all groups, which have
  // copies of one another. Nothing is done for an empty view.
  void sum_of_pieces(Device& device, const TensorView& x);
  // Replaces x by its sum over peers.
  void sum(Device& device, const TensorView& x, Peers peers);
  // Block p of each row of `in` [rows, peers that divide the states, n] goes to the rank at place p, and block p of
  // `out` comes from it. Nothing is done where they are one tensor.
  void exchange_pieces(Device& device, const TensorView& in, const TensorView& out, Peers peers);
  // After each rank has changed its own weights, with their maxima in ModelWeights::amax(): brings what it has of
  // the others' up to date, and FP8 copies.
  using Changed = ModelWeights::Changed;
  void weights_changed(Device& device, Changed changed);

 private:
  void wait(Device& device, uint64_t number, const char* what);
  using Pass = ModelWeights::Pass;

  void gather_on_use(Device& device, int unit, Pass pass);
  void prefetch(Device& device, int unit, Pass pass);
  void gather(Device& device, int unit, Pass pass, Changed changed = Changed::kAll);
  bool comes_from_host(int unit) const { return !model_.weights().host_parts(unit).empty(); }
  void load(int unit, const std::vector<HostStream::Copy>& copies);
  void fetch(int unit);
  void wait_for_host(Device& device, int unit);
  void share_in_host(Device& device, int unit);
  // Parameters whose gradients begin with a unit of backward.
  std::vector<int> opened_by(int unit) const;

  Communicator& communicator_;
  const Model& model_;
  const Optimizer& optimizer_;
  Place place_;

  // The content of each gather buffer, until weights change. Backward begins with the blocks that forward has ended
  // with, and the next micro-batch with those that backward has ended with: as many as there are buffers, if
  // backward reads what forward reads.
  struct Gathered {
    int unit = -1;
    Pass pass = Pass::kForward;
    uint64_t number = 0;  // of the collective, if that brings it
    bool is_ready = false;
  };
  std::array<Gathered, kGatherBuffers> gathered_;
  std::unique_ptr<HostStream> host_stream_;  // between host memory and gather buffers; absent without host parts
  std::array<uint64_t, kGradientBuffers> reduced_ = {};  // the last reduction out of each of the gradient buffers
};

// Peers as layers see them. The communicator must outlive it.
class GroupExchange final : public PeerExchange {
 public:
  // `what`: the name of the device's waits (Device::time_wait), for the slowest of the ranks and what it sends.
  GroupExchange(Communicator& communicator, Peers peers, const char* what)
      : communicator_(communicator), peers_(peers), what_(what) {}
  int64_t place() const override { return communicator_.place_in(peers_); }
  void all_to_all(Device& device, const TensorView& in, const TensorView& out) override;
  void all_gather(Device& device, const TensorView& in, const TensorView& out) override;
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out,
                      Accumulation accumulation) override;
  void wait(Device& device) override;

 private:
  Communicator& communicator_;
  Peers peers_;
  const char* what_;
};

}  // namespace parka
