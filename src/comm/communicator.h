#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace parka {
class Device;

enum class Reduction { kSum, kMax };

// What becomes of what a tensor held that a sum goes to: it is lost, or added as well.
enum class Onto { kNothing, kOldValue };

// Which ranks take part in a collective, as divide() has divided them.
enum class Peers {
  kAll,
  kGroup,   // consecutive ranks; all of them before divide()
  kAcross,  // the ranks of one place in their groups; this rank alone before divide()
};

// Collective operations of the ranks of a run. All ranks must call the same ones in the same order with the same
// sizes, those of groups too; a rank that does not makes the others wait, and the watchdog (comm/launch/watchdog.h)
// then names it.
//
// Collectives on tensors are queued in order, behind the work that the device has queued by then; the device's
// later work runs beside them until it wait()s. On the CPU they are done when the call returns. The result is the
// same, bit for bit, whenever the same values are reduced over the same number of ranks. They cannot be part of
// what Device::replay() records.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string description() const = 0;  // "4 ranks over MPI", "8 GPUs over NCCL 2.28.3"

  // Divides the ranks into groups of `group_size` consecutive ones, a divisor of size(). All ranks call it, at most
  // once, before the first collective.
  void divide(int group_size);
  int size_of(Peers peers) const {
    return peers == Peers::kAll ? size() : peers == Peers::kGroup ? group_size() : size() / group_size();
  }
  // This rank's place among its peers, 0 to size_of() - 1.
  int place_in(Peers peers) const {
    return peers == Peers::kAll ? rank() : peers == Peers::kGroup ? rank() % group_size() : rank() / group_size();
  }

  // Memory, for one holder, whose tensors collectives may move without the device's multiprocessors; contents
  // undefined. All ranks ask for the same size, put tensors of collectives at the same places, and release it
  // before the communicator goes. Throws as Device::allocate().
  virtual void* allocate(Device& device, int64_t bytes);
  virtual void release(Device& device, void* memory);
  // A part of it that collectives may use until the memory is released. reduce_scatter puts there what others have
  // for this rank, if that is not more; where it has space for several tensors, none waits for the sum of another.
  virtual void set_exchange_buffer(const TensorView& /*buffer*/) {}

  // ---- Tensors on the device (fp32 or bf16 where they are reduced) ----

  // x [n] of all peers, reduced element by element, replaces x. A maximum passes over NaN.
  virtual void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) = 0;
  // out [n] = the sum over peers of elements [place * n, (place + 1) * n) of their `in` [size * n], onto nothing or
  // what `out` held; the latter may change its own place in `in`. bf16 is summed in fp32, in the order of peers,
  // and rounded once; but over NCCL, where tensors do not lie as allocate() and set_exchange_buffer() say, or
  // between nodes, it is rounded at every hop. `out` may be its own place in `in`, onto nothing.
  virtual void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                              Onto onto = Onto::kNothing) = 0;
  // out [size * n] = `in` [n] of all peers one after the other, of any format. `in` may be its own place in `out`.
  virtual void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) = 0;
  // out [rows, size * columns] = `in` [rows, columns] of all peers side by side, of any format, elsewhere. On GPUs
  // it takes as many bytes of set_exchange_buffer() as `out` has, unless `out` is in allocate()'s memory and GPUs
  // reach one another.
  virtual void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) = 0;

  // Collectives are numbered from 1 in order of their calls; nobody has to wait for number 0.
  virtual uint64_t last_queued() const = 0;
  // The device's later work waits for collective `number` and those before it.
  virtual void wait(Device& device, uint64_t number) = 0;

  // ---- Agreement between hosts; these wait for all ranks ----

  // `text` of every rank, by rank; they may differ in length.
  virtual std::vector<std::string> gather_text(const std::string& text) = 0;
  // The largest value of any rank.
  virtual double max(double value) = 0;
  virtual void barrier() = 0;

 protected:
  int group_size() const { return group_size_ == 0 ? size() : group_size_; }
  // The rank at a place among this rank's peers.
  int rank_at(Peers peers, int place) const {
    if (peers == Peers::kAll) return place;
    const int group = rank() / group_size();
    return peers == Peers::kGroup ? group * group_size() + place : place * group_size() + rank() % group_size();
  }

 private:
  virtual void divided() {}  // group_size() is known from here on

  int group_size_ = 0;  // 0: not divided
};

// A run of one process: reductions and gathers of one rank.
std::unique_ptr<Communicator> make_single_communicator();

// What every implementation asks of the tensors it is given; throws Error(kInternal) otherwise.
void check_reducible(const TensorView& x);
// `whole` has `size` times the elements of `part`, in the same format...
void check_scattered(const TensorView& whole, const TensorView& part, int size);
// ... in as many rows.
void check_side_by_side(const TensorView& whole, const TensorView& part, int size);
// reduce_scatter of one rank, on the device's own stream.
void reduce_alone(Device& device, const TensorView& in, const TensorView& out, Onto onto);

}  // namespace parka
