#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace parka {
class Device;

enum class Reduction { kSum, kMax };

// Collective operations of the ranks of a run. All ranks must call the same ones in the same order with the same
// sizes; a rank that does not makes the others wait, and the watchdog (comm/watchdog.h) then names it.
//
// Collectives on tensors are queued in order, behind the work that the device has queued by then; the device's
// later work runs beside them until it wait()s. On the CPU they are done when the call returns. The result is the
// same, bit for bit, whenever the same values are reduced over the same number of ranks.
//
// Collectives may be part of what Device::replay() records. Three rules then hold: before replay(), wait() for
// whatever was queued outside it (breaking this throws Error(kInternal)); within it, wait() for what was queued in
// it before the work ends; and the recording must be gone before the communicator, which waits for that.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string description() const = 0;  // "4 ranks over MPI", "8 GPUs over NCCL 2.28.3"

  // ---- Tensors on the device (fp32 or bf16 where they are reduced) ----

  // x [n] of all ranks, reduced element by element, replaces x. A maximum passes over NaN.
  virtual void all_reduce(Device& device, const TensorView& x, Reduction reduction) = 0;
  // out [n] = the sum over ranks of elements [rank * n, (rank + 1) * n) of their `in` [size * n]. bf16 is summed in
  // fp32 over MPI, and rounded at every hop over NCCL. `out` may be its own place in `in`.
  virtual void reduce_scatter(Device& device, const TensorView& in, const TensorView& out) = 0;
  // out [size * n] = `in` [n] of all ranks one after the other, of any format. `in` may be its own place in `out`.
  virtual void all_gather(Device& device, const TensorView& in, const TensorView& out) = 0;

  // Collectives are numbered from 1 in order of their calls. One that is replayed keeps its number.
  virtual uint64_t last_queued() const = 0;
  // The device's later work waits for collective `number` and those before it.
  virtual void wait(Device& device, uint64_t number) = 0;

  // ---- Agreement between hosts; these wait for all ranks ----

  // `text` of every rank, by rank; they may differ in length.
  virtual std::vector<std::string> gather_text(const std::string& text) = 0;
  // The largest value of any rank.
  virtual double max(double value) = 0;
  virtual void barrier() = 0;
};

// A run of one process: reductions and gathers of one rank.
std::unique_ptr<Communicator> make_single_communicator();

// What every implementation asks of the tensors it is given; throws Error(kInternal) otherwise.
void check_reducible(const TensorView& x);
// `whole` has `size` times the elements of `part`, in the same format.
void check_scattered(const TensorView& whole, const TensorView& part, int size);

}  // namespace parka
