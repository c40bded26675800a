#pragma once
#include <span>
#include <vector>

#include "core/memory/unit_buffers.h"
#include "core/mesh.h"
#include "core/placement.h"
#include "kernels/device/arena.h"
#include "model/coded_weights.h"
#include "model/formats.h"
#include "model/model_config.h"
#include "model/parameter_table.h"

namespace parka {

// The readers of a model's weights: forward passes alone, backward too, or a backward that also runs forward again.
enum class WeightUse { kForward, kBackward, kBackwardWithForward };
WeightUse training_use(const PrecisionConfig& precision);

// The meaning of precision.weight_copies on a rank: itself, or what `auto` stands for there. `base` is that of
// frozen weights (ParameterInfo::base).
WeightCopies kept_copies(const PrecisionConfig& precision, const Zero& zero, BaseFormat base);

// Which FP8 copies are kept for a whole optimizer step, by unit of the parameter table.
struct KeptCopies {
  WeightCopies copies;          // kept_copies()
  int first_backward_unit = 0;  // no input gradients are computed below it

  WeightCopies of_unit(int unit) const { return with(unit >= first_backward_unit); }
  WeightCopies with(bool has_input_gradient) const {
    return copies == WeightCopies::kBoth && !has_input_gradient ? WeightCopies::kRows : copies;
  }
  // All or none: where memory is saved a micro-batch quantizes the one head anew, in the workspace of blocks.
  WeightCopies of_head() const { return copies == WeightCopies::kBoth ? copies : WeightCopies::kNone; }
};

// True if ranks that have divided the blocks' weights (ZeRO stage 3) gather the transposed codes for backward,
// instead of transposing what all of them have gathered: where both are kept for a whole step, and every rank's
// pieces are whole rows of the weights. `copies` are those of a block.
bool gathers_transposed(const ParameterTable& table, const Formats& formats, WeightCopies copies, WeightUse use);

// Matrix e of n that are stored one below the other (ParameterInfo::num_stacked), with its scale.
TensorView matrix_of(const TensorView& t, int64_t e, int64_t n);
ScaledView matrix_of(const ScaledView& t, int64_t e, int64_t n);

// Rows of the FP8 copies of a head of `rows`: tensor cores sum 16 products at a time, and the gradient of the
// head's input is a sum over the vocabulary.
inline int64_t head_copy_rows(int64_t rows) { return ceil_div(rows, 16) * 16; }

// The weights that the model computes with, and their FP8 copies. With ZeRO stage 3 a rank keeps its piece of each
// block's weights, and buffers for two blocks (kGatherBuffers), into which the pieces of all ranks are gathered
// where the block is used: FP8 codes where GEMMs read nothing else.
//
// Weights of the blocks' linear layers may lie in host memory (Placement::memory): a rank's pieces, or what it
// keeps whole. If FP8 copies are kept for a whole step, GEMMs read these alone. Otherwise a block's weights are
// gathered into the same buffers from the host.
//
// Frozen weights may be stored as codes alone (ParameterInfo::base), whole on every rank: in 4 bits (CodedWeights),
// or as the FP8 copies that GEMMs read.
class ModelWeights {
 public:
  // Declares category "weights", and "fp8 weights" when the linear layers are FP8; with ZeRO stage 3 "gathered
  // weights". FP8 copies are kept so that accumulation does not quantize again; with ZeRO stage 3, unless none,
  // those of this rank's pieces as they are gathered. Input gradients read the transposed ones.
  ModelWeights(const ParameterTable& table, const Formats& formats, const KeptCopies& copies, WeightUse use,
               MemoryPlan& plan);

  void bind(const Arena& arena);

  // Which weights have changed: all of them, or those that an optimizer step updates.
  enum class Changed { kAll, kTrained };
  // Makes the FP8 copies that are kept anew, of whole weights whose maxima are in amax(); call whenever they have
  // changed.
  void quantize(Device& device, Changed changed = Changed::kAll) const;
  // [number of weights, and experts] fp32: the largest magnitude of each, from which the scale of its codes
  // follows. Empty unless FP8 copies have one scale per tensor. When own() has changed it is to be that of own(),
  // which an optimizer step finds on its way, but for experts: find_expert_amax() does; and find_amax() after any
  // other change. Then, where weights are divided, it is to be the maximum over those who share them.
  const TensorView& amax() const { return amax_; }
  void find_amax(Device& device) const;
  void find_expert_amax(Device& device) const;

  // Weight `index` in the compute format: [rows, cols], or [cols] for a norm. An empty view for index -1. A block's
  // linear weights that are gathered as FP8 codes do not exist in it; those in host memory, whose copies are kept,
  // are there.
  TensorView plain(int index) const;
  // The same of a weight of a block's linear layer; a coded one is decoded, for use until the next call of this or
  // of quantized() or transposed().
  TensorView operand(Device& device, int index) const;
  // The same, flat and where this rank keeps it, on the device or the host; empty if it is divided over ranks
  // or coded.
  const TensorView& kept(int index) const { return at(index).kept; }
  // The FP8 copy of a linear layer's weight [N, K], and the same transposed, [K, N]; of E experts [E N, K] and
  // [E K, N], with scales [E]. One that is not kept is made here, for use until the next call. The head's, where it
  // is FP8, has rows of zeros up to head_copy_rows().
  const ScaledView& quantized(Device& device, int index) const;
  const ScaledView& transposed(Device& device, int index) const;
  // Its INT8 rows [N, K], if its product in forward is of those. They too may be made here.
  const ScaledView& int8_rows(Device& device, int index) const;
  // This rank's elements of all weights, in the compute format and the order of the table, flat; all elements where
  // weights are not divided. Empty views (data is not null) for small tensors of which the rank has nothing; no
  // views of coded weights.
  const std::vector<TensorView>& own() const { return own_; }

  // ---- Coded weights ----

  // Sets elements `first` and following of a weight, rounded to the compute format, in the buffer that all of them
  // share. When all its elements are there encode() stores it.
  void stage_coded(Device& device, int index, std::span<const float> values, int64_t first) const {
    coded_.stage(device, static_cast<size_t>(index), values, first);
  }
  void forget_decoded() const { coded_.forget_decoded(); }
  // The buffer of decoded weights, [rows, cols] in the compute format, to be written.
  TensorView coded_buffer(int index) const { return coded_.buffer(static_cast<size_t>(index)); }
  void encode(Device& device, int index) const;
  // The tensors in which it is stored.
  std::vector<CodeTensor> code_tensors(int index) const;

  // ---- For those who gather ----

  // The parts of a unit's weights: `whole` is the pieces of all ranks, one after the other and flat, or side by
  // side: matrices.
  struct Piece {
    TensorView own, whole;
    bool is_columns = false;
    bool trainable = true;  // of the parameter
    Peers peers = Peers::kShard;
  };
  enum class Pass { kForward, kBackward };
  // The pieces of a unit, in the same order on every rank. Empty if no rank lacks anything. Backward may gather
  // other copies (transposed) into the same buffer. Evaluation reads those of forward.
  const std::vector<Piece>& pieces(int unit, Pass pass) const {
    const bool differ = pass == Pass::kBackward && has_pieces_for_backward(unit);
    return (differ ? backward_pieces_ : pieces_)[static_cast<size_t>(unit)];
  }
  bool has_pieces_for_backward(int unit) const {
    return gathers_transposed_ && is_gathered_on_use(unit) && copies_kept_.of_unit(unit) == WeightCopies::kBoth;
  }
  // True if weights of the unit are not kept on the device, but have to be gathered before each use, from other
  // ranks or from host memory. Units of one buffer (gather_buffer_of) use the same memory.
  bool is_gathered_on_use(int unit) const { return gathered_unit_[static_cast<size_t>(unit)]; }
  // True if ranks have pieces of the unit's weights, and false if each has them whole.
  bool is_divided(int unit) const { return divides_ && is_gathered_on_use(unit); }
  // True if several ranks update a part each of what the others have as well.
  bool are_updates_shared() const { return are_updates_shared_; }
  // This rank's part of a weight in host memory, whole or its piece, and its place on the device: both flat.
  struct HostPart {
    TensorView host, device;
    Shard updated;  // the ranks that update pieces of the weight
  };
  // The parts of a unit. Empty if nothing reads a copy in the compute format: if FP8 copies are kept, and ranks
  // have no updated weights to exchange, or exchange codes.
  const std::vector<HostPart>& host_parts(int unit) const { return host_parts_[static_cast<size_t>(unit)]; }
  bool has_host_parts() const { return has_host_parts_; }
  // Makes the kept FP8 copies of such weights anew, from the buffers: quantize() leaves them out.
  void quantize_fetched(Device& device, int unit) const;
  // To be called before a unit is gathered on use, and when it has been: makes the FP8 codes of this rank's pieces
  // if codes are gathered and not kept, and those of the whole weights if they are not gathered.
  void before_gather(Device& device, int unit) const;
  void gathered(Device& device, int unit) const;

 private:
  // Where GEMMs find the FP8 codes of a weight, in rows or transposed.
  enum class Codes { kNone, kKept, kMadeOnUse, kGathered };
  // How one weight is stored. Made once, by storage_of().
  struct Storage {
    bool has_codes = false;  // an FP8 GEMM reads it
    Codes rows = Codes::kNone, transposed = Codes::kNone;
    Codes int8_rows = Codes::kNone;
    bool is_divided = false;               // over ranks, so that this one has a piece
    bool keeps_piece_codes = false;        // of such a piece, for a whole step
    bool is_stacked = false;               // matrices of experts, whose codes have a scale each
    bool is_4bit = false, is_fp8 = false;  // its codes are all there is of it
    bool is_in_host = false;
    int64_t rows_stored = 0;  // more than those of the weight for an FP8 head
  };
  struct CopyIds {
    MatrixId w, w_t;
    MatrixId int8_rows = {};
  };
  struct Copies {
    ScaledView w, w_t;
    ScaledView int8_rows = {};
  };
  struct Weight {
    ParameterInfo info;
    Storage storage;
    TensorId plain_id;       // of the whole weight, or of this rank's piece
    CopyIds copy_ids;        // of what is kept; the scale alone of codes that are made where they are used
    CopyIds piece_code_ids;  // of codes of this rank's piece that are kept
    int64_t first_amax = 0;  // in amax()
    TensorView plain, kept;  // plain(), kept()
    TensorView fetched;      // where one in host memory is copied to
    TensorView piece;        // flat and padded, of one that is gathered on use
    TensorView piece_codes, piece_codes_t;  // flat; [cols, rows / ranks]
    Copies copies;
  };
  // The memory into which one weight of a block is gathered.
  struct Gathered {
    TensorId whole;  // in the compute format, of blocks whose weight is gathered in it
    TensorId codes;  // of blocks whose codes are gathered
    MatrixId w;      // the FP8 copy that is made from `whole`; invalid for weights that no FP8 GEMM reads
  };
  Storage storage_of(const ParameterTable& table, size_t i) const;
  Weight& at(int index) { return weights_[static_cast<size_t>(index)]; }
  const Weight& at(int index) const { return weights_[static_cast<size_t>(index)]; }
  bool is_fp8_head(const Weight& w) const { return fp8_head_ >= 0 && &w == &at(fp8_head_); }
  bool gathers_codes() const { return divides_ && formats_.has_tensor_scales(); }
  static bool has_changed(const Weight& w, Changed changed) { return changed == Changed::kAll || w.info.trainable; }
  size_t index_of(const Weight& w) const { return static_cast<size_t>(&w - weights_.data()); }
  // One number, or one for each expert of this rank, among those of all ranks' experts.
  TensorView amax_of(const Weight& w) const {
    return amax_.empty() ? amax_ : amax_.rows(w.first_amax, w.storage.is_stacked ? w.info.num_stacked : 1);
  }
  // Of this weight, in amax_of(), of which it has the elements of own(), or all if it is coded.
  void find_amax(Device& device, const Weight& w, const TensorView& elements) const;
  void quantize_piece(Device& device, const Weight& w) const;
  void quantize_whole(Device& device, const Weight& w, const TensorView& elements) const;
  // Calls f(expert, begin, count) for each expert of whose matrix this rank has elements, by their place in own().
  template <typename F>
  static void for_each_own_part(const ParameterInfo& p, const F& f);
  // Makes codes of a whole weight, of the experts' each with its scale; empty: not wanted.
  void make_codes(Device& device, const Weight& weight, const TensorView& elements, const ScaledView& w,
                  const ScaledView& w_t) const;
  void declare_weights(const ParameterTable& table, MemoryPlan& plan);
  void declare_gather_buffers(const ParameterTable& table, MemoryPlan& plan);
  void declare_copies(Weight& weight, MemoryPlan& plan);
  void declare_workspace(MemoryPlan& plan);
  void declare_head_workspace(MemoryPlan& plan);
  // Whole weights in the compute format, decoded if they are coded.
  TensorView source(Device& device, const Weight& w) const {
    return w.info.is_coded() ? operand(device, static_cast<int>(index_of(w))) : copied(w);
  }
  // The source of the kept copies of a whole weight, with the rows of zeros after the head's.
  static TensorView copied(const Weight& w);
  void bind_weight(const Arena& arena, Weight& weight, const TensorView& buffer);
  void bind_copies(const Arena& arena, Weight& weight);
  void bind_gathered(const Arena& arena, Weight& weight, const Gathered& buffer);
  void bind_gathered_codes(const Arena& arena, Weight& weight, const TensorView& whole);

  Formats formats_;
  bool divides_, are_updates_shared_;
  KeptCopies copies_kept_;
  WeightUse use_;
  CodedWeights coded_;
  int fp8_head_;             // index of the head's weight if it has FP8 copies, else -1
  bool gathers_transposed_;  // of blocks of which both copies are kept
  bool has_host_parts_;
  std::vector<bool> gathered_unit_;                       // is_gathered_on_use()
  std::vector<Weight> weights_;                           // in the order of the table
  std::vector<std::vector<Gathered>> buffers_;            // each for a block's weights in their order
  MatrixId rows_workspace_id_, transposed_workspace_id_;  // for copies that are not kept: large enough for any
  MatrixId int8_workspace_id_;
  MatrixId head_rows_workspace_id_, head_transposed_workspace_id_;
  TensorId amax_id_;
  std::vector<TensorView> own_;
  std::vector<std::vector<Piece>> pieces_, backward_pieces_;  // by unit
  std::vector<std::vector<HostPart>> host_parts_;
  TensorView amax_;
};

}  // namespace parka
