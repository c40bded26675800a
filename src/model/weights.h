#pragma once
#include <vector>

#include "kernels/arena.h"
#include "model/formats.h"
#include "model/parameter_table.h"

namespace parka {

// A linear layer's weight as its GEMMs read it.
struct LinearWeight {
  ScaledView w;    // [N, K]
  ScaledView w_t;  // [K, N]: for FP8 input gradients; empty otherwise
};

// The weights that the model computes with, and their FP8 copies.
class ModelWeights {
 public:
  // Declares category "weights", and "fp8 weights" when the linear layers are FP8. The copies are kept for a whole
  // optimizer step, so that accumulation does not quantize again; transposed ones only `for_training`.
  ModelWeights(const ParameterTable& table, const Formats& formats, bool for_training, MemoryPlan& plan);

  void bind(const Arena& arena);

  // Makes the FP8 copies anew; call whenever weights have changed.
  void quantize(Device& device) const;

  // Weight `index` in the compute format: [rows, cols], or [cols] for a norm. An empty view for index -1.
  TensorView plain(int index) const;
  // The weight of a linear layer inside a block. `fp8` chooses between the copies and the weight itself.
  LinearWeight linear(int index, bool fp8) const;
  // All weights in the order of the table, [rows, cols] each.
  const std::vector<TensorView>& all() const { return plain_; }

 private:
  struct Copies {
    MatrixId w, w_t;
  };
  std::vector<ParameterInfo> parameters_;
  std::vector<TensorId> plain_ids_;
  std::vector<Copies> copy_ids_;  // invalid for weights that no FP8 GEMM reads
  std::vector<TensorView> plain_;
  std::vector<LinearWeight> copies_;
};

}  // namespace parka
