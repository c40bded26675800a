#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/accumulation.h"
#include "core/mesh.h"
#include "core/tensor.h"

namespace parka {

class Device;

enum class Reduction { kSum, kMax };

// Collective operations of the ranks of a run. All ranks must call the same ones, in the same order and with the
// same sizes, also those of groups. If a rank does not, the others wait, and the watchdog names it.
//
// Collectives on tensors are queued in order, after the work that the device has queued by then. The device's later
// work overlaps with them until it wait()s. On the CPU they are done when the call returns. The same values over as
// many ranks give the same bits. Device::replay() cannot record collectives.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string description() const = 0;  // "4 ranks over TCP", "8 GPUs over NCCL 2.28.3"

  // Divides the ranks as `mesh` says; until then all are one kShard group. All call it before the first collective.
  void divide(const Mesh& mesh);
  Mesh mesh() const { return mesh_.value_or(Mesh(rank(), size())); }
  int size_of(Peers peers) const { return mesh().size(peers); }
  // This rank's place among its peers, 0 to size_of() - 1.
  int place_in(Peers peers) const { return mesh().place(peers); }

  // Device memory whose tensors collectives may copy without the device's multiprocessors; contents undefined. At
  // most one allocation at a time. All ranks request the same size, put the tensors of collectives at the same
  // offsets, and release it before the communicator is destroyed. Throws as Device::allocate().
  virtual void* allocate(Device& device, int64_t bytes);
  virtual void release(Device& device, void* memory);
  // A part of that memory which collectives may use until it is released. reduce_scatter receives there what others
  // send to this rank, if it fits. If several tensors fit, none waits for the sum of another.
  virtual void set_exchange_buffer(const TensorView& /*buffer*/) {}

  // ---- Tensors on the device (fp32 or bf16 where they are reduced) ----

  // Replaces x [n] by the element-wise reduction over all peers. A maximum ignores NaN.
  virtual void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) = 0;
  // out [n] = the sum over peers of elements [place * n, (place + 1) * n) of their `in` [size * n]. kContinue adds
  // the sum to the old value of `out`, and may change this rank's own shard of `in`. With kBegin `out` may be that
  // shard. bf16 is summed in fp32, in the order of peers, and rounded once. Exception: NCCL rounds at every hop
  // between nodes, and where tensors do not lie as allocate() and set_exchange_buffer() say.
  virtual void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                              Accumulation accumulation = Accumulation::kBegin) = 0;
  // out [size * n] = `in` [n] of all peers one after the other, in any format. `in` may be its place in `out`.
  virtual void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) = 0;
  // out [rows, size * columns] = `in` [rows, columns] of all peers side by side, in any format; `in` and `out` must
  // not overlap. On GPUs it needs as many bytes of set_exchange_buffer() as `out` has, unless `out` lies in
  // allocate()'s memory and the GPUs can access each other's.
  virtual void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) = 0;
  // out [rows, size, n]: in each row, block p is what the peer at place p has as block place_in(peers) of that row
  // of its `in` [rows, size, n], in any format. `in` and `out` must not overlap.
  virtual void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) = 0;

  // Collectives are numbered from 1, in the order of their calls. Number 0 stands for none: nothing waits for it.
  virtual uint64_t last_queued() const { return last_queued_; }
  // Makes the device's later work wait for collective `number` and those before it.
  virtual void wait(Device& device, uint64_t number) = 0;

  // ---- Agreement between hosts; these wait for all ranks ----

  // `text` of every rank, in the order of ranks; lengths may differ.
  virtual std::vector<std::string> gather_text(const std::string& text) = 0;
  // The largest value of any rank.
  double max(double value);
  void barrier() { gather_text(""); }

 protected:
  // The rank at a place among this rank's peers.
  int rank_at(Peers peers, int place) const { return mesh().rank_at(peers, place); }

  uint64_t last_queued_ = 0;

 private:
  virtual void divided() {}  // mesh() is known from here on

  std::optional<Mesh> mesh_;
};

// For a run of one process: every collective has one rank.
std::unique_ptr<Communicator> make_single_communicator();

// Checks of arguments for all implementations. They throw Error(kInternal).
// x is fp32 or bf16.
void check_reducible(const TensorView& x);
// `whole` has `size` times the elements of `part`, in the same format.
void check_scattered(const TensorView& whole, const TensorView& part, int size);
// As check_scattered; both also have the same number of rows.
void check_side_by_side(const TensorView& whole, const TensorView& part, int size);
// `in` and `out` are [rows, size, n], alike, in the same format.
void check_exchanged(const TensorView& in, const TensorView& out, int size);
// reduce_scatter with one rank, on the device's own stream.
void reduce_alone(Device& device, const TensorView& in, const TensorView& out, Accumulation accumulation);

class CollectiveCounter;
class Transport;

// Collectives of the ranks of `transport` for tensors on the CPU; they need Transport::connect_all(), agreement
// does not. Sums are computed in fp32 in the order of ranks and rounded once, so every transport gives the same
// bits. `counter` counts every collective. Both must outlive the result.
std::unique_ptr<Communicator> make_host_communicator(Transport& transport, CollectiveCounter& counter);

}  // namespace parka
