#include "model/weights.h"

#include <algorithm>

#include <fmt/format.h>

#include "kernels/ops/quantize/quantize.h"
#include "model/phases.h"
#include "model/vision/vision_tower.h"

namespace parka {
namespace {

TensorView flat(const TensorView& t, int64_t numel) { return {t.data, t.dtype, {numel}}; }

bool any_weight_is_divided(const std::vector<ParameterInfo>& parameters) {
  return std::ranges::any_of(parameters, [](const ParameterInfo& p) { return p.placement.weight.size > 1; });
}

}  // namespace

TensorView matrix_of(const TensorView& t, int64_t e, int64_t n) {
  return t.empty() ? t : t.rows(e * (t.dim[0] / n), t.dim[0] / n);
}
ScaledView matrix_of(const ScaledView& t, int64_t e, int64_t n) {
  if (t.empty() || n == 1) return t;
  return {matrix_of(t.data, e, n), t.scale.rows(e, 1), t.scaling, t.group};
}

WeightUse training_use(const PrecisionConfig& precision) {
  return precision.recompute == Recompute::kBlock ? WeightUse::kBackwardWithForward : WeightUse::kBackward;
}

// With ZeRO stage 3 memory is what is asked for, and transposing costs little beside gathering. A base in FP8 has
// nothing but codes; codes with a scale for each block cannot be transposed on use.
WeightCopies kept_copies(const PrecisionConfig& precision, const Zero& zero, BaseFormat base) {
  if (precision.weight_copies != WeightCopies::kAuto) return precision.weight_copies;
  const bool transposes_codes = base == BaseFormat::kFp8 && precision.gemm == GemmPrecision::kFp8Tensor;
  return zero.shards_weights() || transposes_codes ? WeightCopies::kRows : WeightCopies::kBoth;
}

bool gathers_transposed(const ParameterTable& table, const Formats& formats, WeightCopies copies, WeightUse use) {
  PARKA_REQUIRE(copies != WeightCopies::kAuto);
  if (!any_weight_is_divided(table.all) || !formats.has_tensor_scales()) return false;
  if (copies != WeightCopies::kBoth || use != WeightUse::kBackward) return false;
  const std::vector<int> block = table.unit(1);  // blocks differ in windows, not in weights
  // Ranks do not have the same experts.
  const auto is_stacked = [&](int i) { return table.all[static_cast<size_t>(i)].role == ParameterRole::kExperts; };
  if (std::ranges::any_of(block, is_stacked)) return false;
  return std::all_of(block.begin(), block.end(), [&](int index) {
    const ParameterInfo& p = table.all[static_cast<size_t>(index)];
    const Shard& shard = p.placement.weight;
    return p.role != ParameterRole::kLinear || (p.rows % shard.size == 0 && shard.padded(p.numel()) == p.numel());
  });
}

ModelWeights::ModelWeights(const ParameterTable& table, const Formats& formats, const KeptCopies& copies,
                           WeightUse use, MemoryPlan& plan)
    : parameters_(table.all),
      formats_(formats),
      divides_(any_weight_is_divided(table.all)),
      are_updates_shared_(
          std::ranges::any_of(table.all, [](const auto& p) { return p.placement.states.size > 1; })),
      copies_kept_(copies),
      use_(use),
      coded_(table.all, formats.compute.dtype, coded_buffer_phases(), plan),
      trains_tower_(table.trains_any(kVision)),
      fp8_head_(formats.fp8_head && table.all[static_cast<size_t>(table.head)].quantized ? table.head : -1),
      gathers_transposed_(gathers_transposed(table, formats, copies.copies, use)),
      gathered_unit_(static_cast<size_t>(table.num_units()), false),
      copy_ids_(table.all.size()),
      piece_code_ids_(table.all.size()) {
  const bool keeps_copies = formats_.fp8_gemm && copies.copies != WeightCopies::kNone;  // of all blocks or of none
  const bool any_in_host = std::any_of(parameters_.begin(), parameters_.end(),
                                       [](const auto& p) { return p.placement.memory == MemoryPlace::kHost; });
  const bool fetches_on_use = any_in_host && !divides_ && !keeps_copies;
  // Collectives have their tensors on the device: pieces before they are gathered, and what ranks that share the
  // states have updated.
  has_host_parts_ = fetches_on_use || (any_in_host && are_updates_shared_ && !gathers_codes());
  const bool has_buffers = divides_ || has_host_parts_;
  if (divides_ || fetches_on_use) {
    std::fill(gathered_unit_.begin() + 1, gathered_unit_.end() - 1, true);
  }
  buffers_.resize(kGatherBuffers);
  declare_weights(plan);
  if (!formats_.fp8_gemm) {
    if (has_buffers) declare_gather_buffers(table, plan);
    return;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_copy(i)) declare_copies(i, plan);
  }
  if (formats_.has_tensor_scales()) {
    auto num_amax = static_cast<int64_t>(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      first_stacked_amax_.push_back(num_amax);
      if (is_stacked(i)) num_amax += parameters_[i].num_stacked * parameters_[i].placement.expert_places;
    }
    amax_id_ = plan.add("fp8 weights", "weight_amax", DType::kF32, {num_amax});
  }
  if (has_buffers) declare_gather_buffers(table, plan);
  declare_workspace(plan);
}

void ModelWeights::declare_weights(MemoryPlan& plan) {
  plain_ids_.resize(parameters_.size());
  for (const size_t i : memory_order(parameters_)) {
    const ParameterInfo& p = parameters_[i];
    if (is_coded(i)) continue;
    std::vector<int64_t> shape = {copy_rows(i), p.cols};
    if (is_divided(p.unit)) {
      shape = {p.placement.weight.piece(p.numel())};
    } else if (p.placement.states.size > 1) {
      shape = {std::max(p.placement.states.padded(p.numel()), copy_rows(i) * p.cols)};
    }
    const DType dtype = p.role == ParameterRole::kRouterBias ? DType::kF32 : formats_.compute.dtype;
    plain_ids_[i] = plan.add("weights", p.name, dtype, std::move(shape), kAllPhases, p.placement.memory);
  }
}

void ModelWeights::declare_copies(size_t i, MemoryPlan& plan) {
  const ParameterInfo& p = parameters_[i];
  CopyIds& ids = copy_ids_[i];
  if (formats_.has_tensor_scales()) {
    ids.w.scale = plan.add("fp8 weights", p.name + ".fp8.scale", DType::kF32, {p.num_stacked});
  }
  if (keeps_rows(i)) {
    ids.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats_.weight, copy_rows(i), p.cols, kAllPhases,
                       ids.w.scale);
  }
  if (keeps_piece_codes(p.unit)) {
    const auto add = [&](const char* suffix) {
      return MatrixId{
          plan.add("fp8 weights", p.name + suffix, formats_.weight.dtype, {p.placement.weight.piece(p.numel())}),
          ids.w.scale, formats_.weight};
    };
    piece_code_ids_[i].w = add(".fp8");
    if (has_pieces_for_backward(p.unit)) piece_code_ids_[i].w_t = add(".fp8_t");
  }
  if (!keeps_transposed(i)) return;
  ids.w_t = add_matrix(plan, "fp8 weights", p.name + ".fp8_t", formats_.weight, p.num_stacked * p.cols,
                       copy_rows(i) / p.num_stacked, kAllPhases, ids.w.scale);
}

void ModelWeights::declare_workspace(MemoryPlan& plan) {
  int64_t most_codes = 0, most_scales = 1;
  bool lacks_rows = false, lacks_transposed = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!has_copy(i) || is_fp8_head(i)) continue;
    const ParameterInfo& p = parameters_[i];
    const auto scales = scale_shape(formats_.weight.scaling, formats_.weight.group, p.cols, p.rows);
    most_codes = std::max(most_codes, p.numel());
    most_scales = std::max(most_scales, scales[0] * scales[1]);
    // With stage 3 the codes are where they were gathered.
    lacks_rows = lacks_rows || (!keeps_rows(i) && !is_divided(p.unit));
    lacks_transposed =
        lacks_transposed || (has_input_gradient(i) && !keeps_transposed(i) && !has_pieces_for_backward(p.unit));
  }
  const auto add = [&](const std::string& name, PhaseMask phases) {
    return MatrixId{plan.add("workspace", name, formats_.weight.dtype, {most_codes}, phases),
                    plan.add("workspace", name + ".scale", DType::kF32, {most_scales}, phases), formats_.weight};
  };
  constexpr PhaseMask kForward = kForwardAttention | kForwardFfn | kRerun | kEvaluation;
  if (lacks_rows) rows_workspace_id_ = add("weight.fp8", kForward);
  if (use_ != WeightUse::kForward && lacks_transposed) {
    transposed_workspace_id_ = add("weight.fp8_t", kBackwardLinear);
  }
  if (fp8_head_ >= 0) declare_head_workspace(plan);
}

void ModelWeights::declare_head_workspace(MemoryPlan& plan) {
  const auto i = static_cast<size_t>(fp8_head_);
  const int64_t rows = copy_rows(i), cols = parameters_[i].cols;
  const TensorId scale = copy_ids_[i].w.scale;
  if (!keeps_rows(i)) {
    head_rows_workspace_id_ =
        add_matrix(plan, "workspace", "head_weight.fp8", formats_.weight, rows, cols, kHead | kEvaluation, scale);
  }
  if (use_ != WeightUse::kForward && !keeps_transposed(i)) {
    head_transposed_workspace_id_ =
        add_matrix(plan, "workspace", "head_weight.fp8_t", formats_.weight, cols, rows, kHead, scale);
  }
}

void ModelWeights::declare_gather_buffers(const ParameterTable& table, MemoryPlan& plan) {
  const std::vector<int> block = table.unit(1);  // blocks differ in windows and formats, not in weights
  const auto any_has_copy = [&](size_t place, bool wanted) {
    for (int64_t l = 0; l < table.num_blocks; ++l) {
      if (has_copy(static_cast<size_t>(table.unit(table.block_unit(l)).at(place))) == wanted) return true;
    }
    return false;
  };
  for (size_t number = 0; number < buffers_.size(); ++number) {
    for (int index : block) {
      const auto i = static_cast<size_t>(index);
      const size_t place = buffers_[number].size();
      const bool some_have_copies = any_has_copy(place, true);
      const ParameterInfo& p = parameters_[i];
      const std::string name = fmt::format("{}.gathered{}", p.name, number);
      const int64_t padded = p.placement.states.padded(p.numel());
      Gathered buffer;
      if (!divides_) {
        if (is_in_host(i)) {
          buffer.whole = plan.add("gathered weights", name, formats_.compute.dtype, {padded});
        }
      } else {
        const bool gathers_some_codes = some_have_copies && gathers_codes();
        if (gathers_some_codes) {
          buffer.codes = plan.add("gathered weights", name + ".codes", formats_.weight.dtype, {padded});
        }
        if (!gathers_some_codes || any_has_copy(place, false)) {
          buffer.whole = plan.add("gathered weights", name, formats_.compute.dtype, {padded});
        }
        if (some_have_copies && !gathers_codes()) {
          buffer.w =
              add_matrix(plan, "gathered weights", name + ".fp8", formats_.weight, p.rows, p.cols, kAllPhases);
        }
      }
      buffers_[number].push_back(buffer);
    }
  }
}

void ModelWeights::bind(const Arena& arena) {
  coded_.bind(arena);
  amax_ = arena[amax_id_];
  piece_plain_.resize(parameters_.size());
  piece_codes_.resize(parameters_.size());
  piece_codes_t_.resize(parameters_.size());
  pieces_.resize(gathered_unit_.size());
  backward_pieces_.resize(gathered_unit_.size());
  host_parts_.resize(gathered_unit_.size());
  fetched_.resize(parameters_.size());
  size_t in_unit = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    in_unit = i > 0 && parameters_[i].unit == parameters_[i - 1].unit ? in_unit + 1 : 0;
    const ParameterInfo& p = parameters_[i];
    const std::vector<Gathered>& buffers = buffers_[gather_buffer_of(p.unit)];
    if (is_divided(p.unit)) {
      bind_gathered(arena, i, buffers[in_unit]);
    } else if (has_host_parts_ && is_in_host(i)) {
      bind_weight(arena, i, arena[buffers[in_unit].whole]);
    } else {
      bind_weight(arena, i, {});
    }
  }
}

// `buffer`: where on the device it is copied to; empty if it is not.
void ModelWeights::bind_weight(const Arena& arena, size_t i, const TensorView& buffer) {
  const ParameterInfo& p = parameters_[i];
  if (is_coded(i)) {
    plain_.emplace_back();
    kept_.emplace_back();
    own_.emplace_back();
    bind_copies(arena, i);
    return;
  }
  const auto matrix = [&](const TensorView& t) { return TensorView(t.data, t.dtype, {p.rows, p.cols}); };
  const auto unit = static_cast<size_t>(p.unit);
  const Shard& states = p.placement.states;
  const TensorView whole = flat(arena[plain_ids_[i]], states.padded(p.numel()));
  plain_.push_back(matrix(is_gathered_on_use(p.unit) && !buffer.empty() ? buffer : whole));
  kept_.push_back(flat(whole, p.numel()));
  const ElementRange own = states.own(p.numel());
  own_.push_back(kept_.back().rows(own.begin, own.size()));
  if (!buffer.empty()) {
    fetched_[i] = matrix(buffer);
    host_parts_[unit].push_back({whole, buffer, states});
  }
  if (states.size > 1) {
    const TensorView& on_device = buffer.empty() ? whole : buffer;
    const int64_t piece = states.piece(p.numel()), begin = states.rank * piece;
    pieces_[unit].push_back({on_device.rows(begin, piece), on_device, false, p.trainable, p.placement.peers()});
  }
  bind_copies(arena, i);
}

void ModelWeights::bind_copies(const Arena& arena, size_t i) {
  const ParameterInfo& p = parameters_[i];
  if (!has_copy(i)) {
    copies_.emplace_back();
    return;
  }
  const CopyIds& ids = copy_ids_[i];
  const MatrixId& w = is_fp8_head(i) ? head_rows_workspace_id_ : rows_workspace_id_;
  const MatrixId& w_t = is_fp8_head(i) ? head_transposed_workspace_id_ : transposed_workspace_id_;
  Copies copies = {
      (keeps_rows(i) ? ids.w : w).view(arena, copy_rows(i), p.cols),
      (keeps_transposed(i) ? ids.w_t : w_t).view(arena, p.num_stacked * p.cols, copy_rows(i) / p.num_stacked)};
  if (formats_.has_tensor_scales()) copies.w.scale = copies.w_t.scale = arena[ids.w.scale];
  copies_.push_back(copies);
}

void ModelWeights::bind_gathered(const Arena& arena, size_t i, const Gathered& buffer) {
  const ParameterInfo& p = parameters_[i];
  piece_plain_[i] = arena[plain_ids_[i]];
  kept_.emplace_back();
  own_.push_back(flat(piece_plain_[i], p.own_elements().size()));
  const bool is_code = has_copy(i) && gathers_codes();
  const TensorView whole = arena[is_code ? buffer.codes : buffer.whole];
  Copies copies;
  if (has_copy(i)) {
    copies.w_t = transposed_workspace_id_.view(arena, p.num_stacked * p.cols, p.rows / p.num_stacked);
  }
  if (is_code) {
    bind_gathered_codes(arena, i, whole, copies);
  } else if (has_copy(i)) {
    copies.w = buffer.w.view(arena, p.rows, p.cols);
  }
  plain_.push_back(is_code ? TensorView() : TensorView(whole.data, whole.dtype, {p.rows, p.cols}));
  copies_.push_back(copies);
  const auto unit = static_cast<size_t>(p.unit);
  if (!is_code && is_in_host(i)) {
    const Shard& shard = p.placement.weight;
    const int64_t piece = shard.piece(p.numel());
    const TensorView on_device = whole.rows(shard.rank * piece, piece);
    host_parts_[unit].push_back({piece_plain_[i], on_device, shard});
    pieces_[unit].push_back({on_device, whole});
  } else {
    pieces_[unit].push_back({is_code ? piece_codes_[i] : piece_plain_[i], whole, false, true, p.placement.peers()});
  }
  if (piece_codes_t_[i].empty()) {
    backward_pieces_[unit].push_back(pieces_[unit].back());
  } else {
    backward_pieces_[unit].push_back({piece_codes_t_[i], copies.w_t.data, true});
  }
}

void ModelWeights::bind_gathered_codes(const Arena& arena, size_t i, const TensorView& whole, Copies& copies) {
  const ParameterInfo& p = parameters_[i];
  const CopyIds& kept = piece_code_ids_[i];
  const Shard& shard = p.placement.weight;
  const int64_t piece = shard.piece(p.numel());
  piece_codes_[i] = keeps_piece_codes(p.unit) ? arena[kept.w.data] : whole.rows(shard.rank * piece, piece);
  const TensorView scale = arena[copy_ids_[i].w.scale];
  copies.w = {TensorView(whole.data, whole.dtype, {p.rows, p.cols}), scale, Scaling::kTensor};
  copies.w_t.scale = scale;
  if (!has_pieces_for_backward(p.unit)) return;
  piece_codes_t_[i] = arena[kept.w_t.data].reshaped({p.cols, p.rows / shard.size});
  copies.w_t = {TensorView(whole.data, whole.dtype, {p.cols, p.rows}), scale, Scaling::kTensor};
}

void ModelWeights::quantize(Device& device, Changed changed) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (has_changed(i, changed) && keeps_piece_codes(parameters_[i].unit)) quantize_piece(device, i);
  }
  for (size_t i = 0; i < plain_.size(); ++i) {
    if (has_changed(i, changed) && !is_coded(i) && fetched_[i].empty()) quantize_whole(device, i, copied(i));
  }
}

void ModelWeights::quantize_fetched(Device& device, int unit) const {
  for (size_t i = 0; i < plain_.size(); ++i) {
    if (parameters_[i].unit == unit && !fetched_[i].empty()) quantize_whole(device, i, fetched_[i]);
  }
}

TensorView ModelWeights::copied(size_t i) const {
  const TensorView& w = plain_[i];
  return is_fp8_head(i) ? TensorView(w.data, w.dtype, {copy_rows(i), w.dim[1]}) : w;
}

// Makes the copies that are kept of a whole weight, from its elements.
void ModelWeights::quantize_whole(Device& device, size_t i, const TensorView& weight) const {
  if (!has_copy(i) || !keeps_rows(i)) return;
  make_codes(device, i, weight, copies_[i].w, keeps_transposed(i) ? copies_[i].w_t : ScaledView{});
}

void ModelWeights::make_codes(Device& device, size_t i, const TensorView& weight, const ScaledView& w,
                              const ScaledView& w_t) const {
  if (is_stacked(i)) {
    quantize_matrices(
        device, {.x = weight, .amax = amax_of(i), .scales = copies_[i].w.scale, .out = w.data, .out_t = w_t.data});
  } else {
    parka::quantize(device, {.x = weight, .out = w, .out_t = w_t, .amax = amax_of(i)});
  }
}

void ModelWeights::find_amax(Device& device) const {
  if (amax_.empty()) return;
  device.fill_zero(amax_.data, amax_.bytes());
  for (size_t i = 0; i < own_.size(); ++i) {
    if (is_fp8_coded(i)) continue;  // its codes are made, and have their scale
    find_amax(device, i, is_4bit_coded(i) ? operand(device, static_cast<int>(i)) : own_[i]);
  }
}

void ModelWeights::find_expert_amax(Device& device) const {
  if (amax_.empty()) return;
  const auto num_weights = static_cast<int64_t>(parameters_.size()), num_stacked = amax_.numel() - num_weights;
  if (num_stacked == 0) return;
  const TensorView stacked = amax_.rows(num_weights, num_stacked);
  device.fill_zero(stacked.data, stacked.bytes());
  for (size_t i = 0; i < own_.size(); ++i) {
    if (is_stacked(i)) find_amax(device, i, own_[i]);
  }
}

void ModelWeights::find_amax(Device& device, size_t i, const TensorView& weight) const {
  const ParameterInfo& p = parameters_[i];
  Amax a = {.x = weight, .result = amax_of(i)};
  if (is_stacked(i)) {
    if (weight.empty()) return;
    a.part = p.numel() / p.num_stacked;
    a.first = is_coded(i) ? 0 : p.placement.states.own(p.numel()).begin;
  }
  parka::amax(device, a);
}

template <typename F>
void ModelWeights::for_each_own_part(size_t i, const F& f) const {
  const ParameterInfo& p = parameters_[i];
  const ElementRange own = p.placement.states.own(p.numel());
  const int64_t size = p.numel() / p.num_stacked;
  for (int64_t e = 0; e < p.num_stacked; ++e) {
    const int64_t begin = std::max(own.begin, e * size), end = std::min(own.end, (e + 1) * size);
    if (begin < end) f(e, begin - own.begin, end - begin);
  }
}

// Makes the codes of this rank's piece of a weight, if codes are gathered.
void ModelWeights::quantize_piece(Device& device, size_t i) const {
  if (piece_codes_[i].empty()) return;
  const ScaledView& w = copies_[i].w;
  if (is_stacked(i)) {
    // Of all experts: those that this rank has nothing of are gathered as codes, without their scale.
    tensor_scales(device, {amax_of(i), w.data.dtype, w.scale});
    for_each_own_part(i, [&](int64_t e, int64_t begin, int64_t count) {
      const auto part = [&](const TensorView& t) {
        return t.rows(begin, count).reshaped({count / Shard::kGroup, Shard::kGroup});
      };
      parka::quantize(device, {.x = part(piece_plain_[i]),
                               .out = {part(piece_codes_[i]), w.scale.rows(e, 1), Scaling::kTensor},
                               .scale_given = true});
    });
    return;
  }
  const bool transposes = !piece_codes_t_[i].empty();
  // One scale for all: where nothing is transposed the shape is free, and this one fills tiles.
  const int64_t columns = transposes ? w.data.dim[1] : Shard::kGroup, rows = piece_codes_[i].numel() / columns;
  const ScaledView codes = {piece_codes_[i].reshaped({rows, columns}), w.scale, Scaling::kTensor};
  const ScaledView codes_t = {piece_codes_t_[i], w.scale, Scaling::kTensor};
  parka::quantize(device, {.x = piece_plain_[i].reshaped({rows, columns}),
                           .out = codes,
                           .out_t = transposes ? codes_t : ScaledView{},
                           .amax = amax_of(i)});
}

void ModelWeights::before_gather(Device& device, int unit) const {
  if (keeps_piece_codes(unit) || !is_gathered_on_use(unit)) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit == unit) quantize_piece(device, i);
  }
}

void ModelWeights::gathered(Device& device, int unit) const {
  if (!divides_ || gathers_codes()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit != unit || !has_copy(i)) continue;
    parka::quantize(device, {.x = plain_[i], .out = copies_[i].w});
  }
}

const ScaledView& ModelWeights::quantized(Device& device, int index) const {
  const auto i = static_cast<size_t>(index);
  if (!keeps_rows(i) && !is_divided(parameters_[i].unit))
    make_codes(device, i, source(device, i), copies_[i].w, {});
  return copies_[i].w;
}

const ScaledView& ModelWeights::transposed(Device& device, int index) const {
  const auto i = static_cast<size_t>(index);
  const ScaledView& w_t = copies_[i].w_t;
  if (keeps_transposed(i) || has_pieces_for_backward(parameters_[i].unit)) return w_t;
  const bool moves_codes = formats_.has_tensor_scales() && (keeps_rows(i) || is_divided(parameters_[i].unit));
  if (!moves_codes) {
    make_codes(device, i, source(device, i), {}, w_t);
  } else if (is_stacked(i)) {
    quantize_matrices(device, {.x = copies_[i].w.data, .amax = {}, .scales = w_t.scale, .out_t = w_t.data});
  } else {
    parka::quantize(device, {.x = copies_[i].w, .out_t = w_t, .scale_given = true});
  }
  return w_t;
}

// Codes in 4 bits are decoded for every GEMM, FP8 codes for evaluation in bf16 alone.
PhaseMask ModelWeights::coded_buffer_phases() const {
  const bool any_4bit =
      std::any_of(parameters_.begin(), parameters_.end(), [](const ParameterInfo& p) { return is_4bit(p.base); });
  return kEvaluation | (any_4bit ? kBlockForward | kBackwardLinear | kRerun : PhaseMask{0});
}

void ModelWeights::encode(Device& device, int index) const {
  const auto i = static_cast<size_t>(index);
  if (is_4bit_coded(i)) {
    coded_.encode(device, i);
    return;
  }
  PARKA_REQUIRE(is_fp8_coded(i));
  const TensorView weight = coded_.buffer(i), amax = amax_of(i);
  if (!amax.empty()) {
    device.fill_zero(amax.data, amax.bytes());
    find_amax(device, i, weight);
  }
  quantize_whole(device, i, weight);
}

TensorView ModelWeights::operand(Device& device, int index) const {
  const auto i = static_cast<size_t>(index);
  if (is_4bit_coded(i)) return coded_.decode(device, i);
  if (!is_fp8_coded(i)) return plain_[i];
  const TensorView out = coded_.buffer(i);
  const int64_t n = parameters_[i].num_stacked;
  for (int64_t e = 0; e < n; ++e) {
    parka::quantize(device, {.x = matrix_of(copies_[i].w, e, n), .out = matrix_of(out, e, n)});
  }
  return out;
}

std::vector<CodeTensor> ModelWeights::code_tensors(int index) const {
  const auto i = static_cast<size_t>(index);
  if (is_4bit_coded(i)) return coded_.tensors(i);
  PARKA_REQUIRE(is_fp8_coded(i));
  std::vector<CodeTensor> tensors = {{".fp8", copies_[i].w.data}, {".fp8.scale", copies_[i].w.scale}};
  if (!keeps_transposed(i)) return tensors;
  tensors.push_back({".fp8_t", copies_[i].w_t.data});
  if (!formats_.has_tensor_scales()) tensors.push_back({".fp8_t.scale", copies_[i].w_t.scale});
  return tensors;
}

TensorView ModelWeights::plain(int index) const {
  if (index < 0) return {};
  const TensorView& w = plain_[index];
  const ParameterRole role = parameters_[static_cast<size_t>(index)].role;
  const bool is_vector =
      role == ParameterRole::kNorm || role == ParameterRole::kBias || role == ParameterRole::kRouterBias;
  return is_vector ? w.reshaped({w.numel()}) : w;
}

}  // namespace parka
