#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/mesh.h"
#include "core/parameter.h"
#include "kernels/device/arena.h"
#include "kernels/device/device.h"
#include "optim/optimizer_config.h"

namespace parka {

// Parameters that are updated together: one, or those of one shape whose directions Muon orthogonalizes.
struct UpdateGroup {
  static constexpr size_t kNone = ~size_t{0};

  int unit = 0;                         // of the first
  Peers peers = Peers::kShard;          // that divide the states of each
  std::vector<size_t> parameters = {};  // of which this rank has elements
  // [rows][ranks that divide the states]: the parameter in each row that the rank at a place orthogonalizes; in the
  // last row kNone where there are too few. Empty: nothing is orthogonalized.
  std::vector<size_t> owned = {};
};

// Muon's work on whole matrices (Jordan 2024; with AdamW's size of updates, Moonlight, arXiv 2502.16982). States
// and weights are divided as AdamW's: only directions, 2 bytes an element, go to the rank that orthogonalizes a
// matrix, and come back. So states are as large on every rank, and a matrix has the same bits on any number.
class MatrixUpdates {
 public:
  // Declares buffers for the largest group in category "orthogonalization", alive in `phases`.
  MatrixUpdates(const OptimizerConfig& config, const std::vector<ParameterInfo>& parameters, MemoryPlan& plan,
                PhaseMask phases);
  void bind(const Arena& arena);

  const std::vector<UpdateGroup>& groups() const { return groups_; }

  // A group's directions: [rows, ranks, piece] bf16, where `pieces` has this rank's elements of every parameter,
  // and `whole` all ranks' elements of this rank's parameters. One tensor where no ranks divide them.
  struct Directions {
    TensorView pieces, whole;
  };
  Directions directions(const UpdateGroup& group) const;
  // This rank's elements of a parameter of the group, in `pieces`.
  TensorView direction(const UpdateGroup& group, size_t parameter) const;
  // Orthogonalizes `whole`, each of a parameter's matrices apart, and scales it.
  void orthogonalize(Device& device, const UpdateGroup& group) const;

  // ---- Telemetry ----

  // A matrix [m, n] of a parameter, also of experts that other ranks have. Its sums are the |O|^2, |u|^2 and |v|^2
  // of measure(). They give the root mean square of its update O, and a lower bound of the largest singular value
  // before the scale.
  struct Matrix {
    size_t parameter;
    int64_t m, n;
    double rms(const float* sums) const;
    double singular_value(const float* sums) const;
  };
  static constexpr int64_t kSums = 4;  // the last one has no meaning
  void declare_telemetry(MemoryPlan& plan);
  const std::vector<Matrix>& measured() const { return measured_; }
  // From now on measure() leaves the sums of what orthogonalize() made, or does nothing.
  void begin_telemetry(Device& device, bool measures);
  // A matrix that all ranks of a sum have is left to those that count_whole.
  void measure(Device& device, const UpdateGroup& group, bool count_whole) const;
  // [measured(), kSums] fp32, zeros for matrices of other ranks; empty where nothing is measured.
  TensorView sums() const { return measures_ ? sums_ : TensorView(); }

 private:
  void measure(Device& device, const TensorView& matrix, const TensorView& sums) const;
  const ParameterInfo& first_of(const UpdateGroup& group) const;
  void add_groups(std::vector<size_t> alike, std::vector<double>& costs);
  void orthogonalize(Device& device, const TensorView& matrices) const;

  const OptimizerConfig& config_;
  const std::vector<ParameterInfo>& parameters_;
  std::vector<UpdateGroup> groups_;
  TensorId pieces_id_, whole_id_, other_id_, gram_id_, polynomial_id_;
  TensorView pieces_, whole_, other_, gram_, polynomial_;
  std::vector<Matrix> measured_;  // with telemetry: in the order of parameters
  bool measures_ = false;
  TensorId sums_id_, vectors_id_;
  TensorView sums_, vectors_;
};

}  // namespace parka
