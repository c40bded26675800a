#pragma once
#include <vector>

#include "kernels/arena.h"
#include "model/formats.h"
#include "model/parameter_table.h"

namespace parka {

// The weights that the model computes with, and their FP8 copies.
class ModelWeights {
 public:
  // What is kept of the transposed FP8 weights, which input gradients read.
  enum class Transposed : uint8_t {
    kNone,       // nothing: there are no gradients
    kCached,     // all of them
    kWorkspace,  // room for one, made anew by transposed()
  };
  // Declares category "weights", and "fp8 weights" when the linear layers are FP8. The copies are kept for a whole
  // optimizer step, so that accumulation does not quantize again.
  ModelWeights(const ParameterTable& table, const Formats& formats, Transposed transposed, MemoryPlan& plan);

  void bind(const Arena& arena);

  // Makes the FP8 copies anew; call whenever weights have changed.
  void quantize(Device& device) const;

  // Weight `index` in the compute format: [rows, cols], or [cols] for a norm. An empty view for index -1.
  TensorView plain(int index) const;
  // The FP8 copy of a linear layer's weight [N, K].
  const ScaledView& quantized(int index) const { return copies_[index].w; }
  // The same transposed, [K, N]; kWorkspace makes it, for use until the next call.
  const ScaledView& transposed(Device& device, int index) const;
  // All weights in the order of the table, [rows, cols] each.
  const std::vector<TensorView>& all() const { return plain_; }

 private:
  struct CopyIds {
    MatrixId w, w_t;
  };
  struct Copies {
    ScaledView w, w_t;
  };
  std::vector<ParameterInfo> parameters_;
  std::vector<TensorId> plain_ids_;
  std::vector<CopyIds> copy_ids_;  // invalid for weights that no FP8 GEMM reads
  MatrixId workspace_id_;          // kWorkspace: large enough for any transposed copy
  std::vector<TensorView> plain_;
  std::vector<Copies> copies_;
};

}  // namespace parka
