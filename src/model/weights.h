#pragma once
#include <vector>

#include "core/shard.h"
#include "kernels/arena.h"
#include "model/formats.h"
#include "model/parameter_table.h"

namespace parka {

// The weights that the model computes with, and their FP8 copies. With ZeRO stage 3 a rank keeps its piece of each
// block's weights, and two blocks' worth of room, taken in turns, into which the pieces of all ranks are gathered
// where the block is used: FP8 codes where GEMMs read nothing else.
class ModelWeights {
 public:
  // What is kept of the transposed FP8 weights, which input gradients read.
  enum class Transposed : uint8_t {
    kNone,       // nothing: there are no gradients
    kCached,     // all of them; with ZeRO stage 3 as kWorkspace
    kWorkspace,  // room for one, made anew by transposed()
  };
  // Declares category "weights", and "fp8 weights" when the linear layers are FP8; with ZeRO stage 3 "gathered
  // weights". The copies are kept for a whole optimizer step, so that accumulation does not quantize again.
  ModelWeights(const ParameterTable& table, const Formats& formats, Transposed transposed, const Zero& zero,
               MemoryPlan& plan);

  void bind(const Arena& arena);

  // Makes the FP8 copies of whole weights anew; call whenever they have changed.
  void quantize(Device& device) const;

  // Weight `index` in the compute format: [rows, cols], or [cols] for a norm. An empty view for index -1. A block's
  // linear weights that are gathered as FP8 codes do not exist in it.
  TensorView plain(int index) const;
  // The FP8 copy of a linear layer's weight [N, K].
  const ScaledView& quantized(int index) const { return copies_[index].w; }
  // The same transposed, [K, N]; kWorkspace makes it, for use until the next call.
  const ScaledView& transposed(Device& device, int index) const;
  // This rank's elements of all weights, in the compute format and the order of the table, flat; all elements where
  // weights are not divided. Empty views (data is not null) for small tensors of which the rank has nothing.
  const std::vector<TensorView>& own() const { return own_; }

  // ---- For those who gather ----

  // What a unit's weights are put together from: `whole` is the pieces of all ranks, flat.
  struct Piece {
    TensorView own, whole;
  };
  // Of a unit, in the same order on every rank. Empty if no rank lacks anything.
  const std::vector<Piece>& pieces(int unit) const { return pieces_[static_cast<size_t>(unit)]; }
  // Whether the unit's weights are not kept, but have to be gathered before each use. Units u and u + 2 use the
  // same memory.
  bool is_gathered_on_use(int unit) const { return gathered_unit_[static_cast<size_t>(unit)]; }
  // To be called when such a unit has been gathered: makes FP8 copies if they are not what was gathered.
  void gathered(Device& device, int unit) const;
  // The FP8 codes of this rank's pieces, in two parts: the largest magnitudes of the pieces [number of weights]
  // fp32, which must then become those of all ranks; and the codes with the scales that follow from them. An empty
  // view if pieces have no codes.
  const TensorView& piece_amax() const { return amax_; }
  void find_piece_amax(Device& device) const;
  void quantize_pieces(Device& device) const;

 private:
  struct CopyIds {
    MatrixId w, w_t;
  };
  struct Copies {
    ScaledView w, w_t;
  };
  // Where one weight of a block is gathered.
  struct Room {
    TensorId whole;  // what is gathered: codes, or the compute format
    MatrixId w;      // the FP8 copy: of `whole`, or made from it; invalid for weights that no FP8 GEMM reads
  };
  bool has_copy(size_t i) const { return formats_.fp8_gemm && linear_[i]; }
  void declare_rooms(const ParameterTable& table, MemoryPlan& plan);
  void declare_copy(size_t i, Transposed transposed, MemoryPlan& plan);
  void bind_weight(const Arena& arena, size_t i);
  void bind_gathered(const Arena& arena, size_t i, const Room& room);

  std::vector<ParameterInfo> parameters_;
  Formats formats_;
  Zero zero_;
  std::vector<bool> linear_;         // the blocks' linear layers, by parameter
  bool gathers_codes_;               // of the weights that have FP8 copies
  std::vector<bool> gathered_unit_;  // is_gathered_on_use()
  std::vector<TensorId> plain_ids_;  // of whole weights, or of this rank's pieces
  std::vector<CopyIds> copy_ids_;    // the same; w_t is invalid for pieces
  std::vector<Room> rooms_[2];       // for a block's weights in their order, for units of even and odd numbers
  MatrixId workspace_id_;            // kWorkspace: large enough for any transposed copy
  TensorId amax_id_;
  std::vector<TensorView> plain_, own_;
  std::vector<TensorView> piece_plain_, piece_codes_;  // flat and padded, of weights that are gathered on use
  std::vector<Copies> copies_;
  std::vector<std::vector<Piece>> pieces_;
  TensorView amax_;
};

}  // namespace parka
