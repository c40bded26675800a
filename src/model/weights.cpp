#include "model/weights.h"

#include <algorithm>

#include <fmt/format.h>

#include "kernels/ops/gemm/int8.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/phases.h"
#include "model/vision/vision_tower.h"

namespace parka {
namespace {

TensorView flat(const TensorView& t, int64_t numel) { return {t.data, t.dtype, {numel}}; }

bool any_weight_is_divided(const std::vector<ParameterInfo>& parameters) {
  return std::ranges::any_of(parameters, [](const ParameterInfo& p) { return p.placement.weight.size > 1; });
}

// True if blocks whose input gradients are computed run forward again in backward.
bool runs_blocks_again(const ParameterTable& table, const KeptCopies& copies, WeightUse use) {
  return use == WeightUse::kBackwardWithForward && copies.first_backward_unit < table.head_unit();
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
    : formats_(formats),
      divides_(any_weight_is_divided(table.all)),
      are_updates_shared_(
          std::ranges::any_of(table.all, [](const auto& p) { return p.placement.states.size > 1; })),
      copies_kept_(copies),
      use_(use),
      coded_(table.all, formats.compute.dtype, runs_blocks_again(table, copies, use), plan),
      fp8_head_(formats.fp8_head && table.all[static_cast<size_t>(table.head)].quantized ? table.head : -1),
      gathers_transposed_(gathers_transposed(table, formats, copies.copies, use)),
      gathered_unit_(static_cast<size_t>(table.num_units()), false) {
  const bool keeps_copies = formats_.fp8_gemm && copies.copies != WeightCopies::kNone;  // of all blocks or of none
  const bool any_in_host = std::any_of(table.all.begin(), table.all.end(),
                                       [](const auto& p) { return p.placement.memory == MemoryPlace::kHost; });
  const bool fetches_on_use = any_in_host && !divides_ && !keeps_copies;
  // Collectives have their tensors on the device: pieces before they are gathered, and what ranks that share the
  // states have updated.
  has_host_parts_ = fetches_on_use || (any_in_host && are_updates_shared_ && !gathers_codes());
  const bool has_buffers = divides_ || has_host_parts_;
  if (divides_ || fetches_on_use) {
    std::fill(gathered_unit_.begin() + 1, gathered_unit_.end() - 1, true);
  }
  for (size_t i = 0; i < table.all.size(); ++i) {
    Weight& weight = weights_.emplace_back();
    weight.info = table.all[i];
    weight.storage = storage_of(table, i);
  }
  buffers_.resize(kGatherBuffers);
  declare_weights(table, plan);
  for (Weight& weight : weights_) {
    if (weight.storage.has_codes) declare_copies(weight, plan);
  }
  if (formats_.has_tensor_scales()) {
    auto num_amax = static_cast<int64_t>(weights_.size());
    for (Weight& weight : weights_) {
      const ParameterInfo& p = weight.info;
      weight.first_amax = static_cast<int64_t>(index_of(weight));
      if (!weight.storage.is_stacked) continue;
      weight.first_amax = num_amax + p.placement.expert_place * p.num_stacked;
      num_amax += p.num_stacked * p.placement.expert_places;
    }
    amax_id_ = plan.add("fp8 weights", "weight_amax", DType::kF32, {num_amax});
  }
  if (has_buffers) declare_gather_buffers(table, plan);
  if (formats_.fp8_gemm) declare_workspace(plan);
}

ModelWeights::Storage ModelWeights::storage_of(const ParameterTable& table, size_t i) const {
  const ParameterInfo& p = table.all[i];
  const bool is_head = static_cast<int>(i) == fp8_head_,
             is_of_tower = formats_.fp8_tower && p.role == ParameterRole::kTowerLinear,
             is_stacked = p.role == ParameterRole::kExperts;
  const bool may_have_codes = p.role == ParameterRole::kLinear || is_stacked || is_head || is_of_tower;
  Storage s = {.has_codes = formats_.fp8_gemm && p.quantized && may_have_codes,
               .is_divided = is_divided(p.unit),
               .is_stacked = is_stacked,
               .is_4bit = is_4bit(p.base),
               .is_fp8 = p.base == BaseFormat::kFp8,
               .is_in_host = p.placement.memory == MemoryPlace::kHost,
               .rows_stored = is_head ? head_copy_rows(p.rows) : p.rows};
  const WeightCopies of_unit = copies_kept_.of_unit(p.unit);
  s.keeps_piece_codes = gathers_codes() && s.is_divided && of_unit != WeightCopies::kNone;
  if (!s.has_codes) return s;
  const bool has_input_gradient =
      is_of_tower ? table.trains_any(kVision) : is_head || p.unit >= copies_kept_.first_backward_unit;
  const WeightCopies copies = is_head ? copies_kept_.of_head() : copies_kept_.with(has_input_gradient);
  const auto kept_if = [](bool keeps) { return keeps ? Codes::kKept : Codes::kMadeOnUse; };
  if (p.quantized_forward) {  // else backward alone has FP8 products
    s.rows = s.is_divided ? Codes::kGathered : kept_if(p.is_coded() ? s.is_fp8 : copies != WeightCopies::kNone);
  }
  if (p.int8_forward) s.int8_rows = kept_if(!p.is_coded() && copies != WeightCopies::kNone);
  if (use_ == WeightUse::kForward || !has_input_gradient) return s;
  s.transposed = s.is_divided ? (has_pieces_for_backward(p.unit) ? Codes::kGathered : Codes::kMadeOnUse)
                              : kept_if(!s.is_4bit && copies == WeightCopies::kBoth);
  return s;
}

void ModelWeights::declare_weights(const ParameterTable& table, MemoryPlan& plan) {
  for (const size_t i : memory_order(table.all)) {
    const ParameterInfo& p = weights_[i].info;
    const Storage& storage = weights_[i].storage;
    if (p.is_coded()) continue;
    std::vector<int64_t> shape = {storage.rows_stored, p.cols};
    if (storage.is_divided) {
      shape = {p.placement.weight.piece(p.numel())};
    } else if (p.placement.states.size > 1) {
      shape = {std::max(p.placement.states.padded(p.numel()), storage.rows_stored * p.cols)};
    }
    const DType dtype = p.role == ParameterRole::kRouterBias ? DType::kF32 : formats_.compute.dtype;
    weights_[i].plain_id = plan.add("weights", p.name, dtype, std::move(shape), kAllPhases, p.placement.memory);
  }
}

void ModelWeights::declare_copies(Weight& weight, MemoryPlan& plan) {
  const ParameterInfo& p = weight.info;
  const Storage& storage = weight.storage;
  CopyIds& ids = weight.copy_ids;
  if (formats_.has_tensor_scales()) {
    ids.w.scale = plan.add("fp8 weights", p.name + ".fp8.scale", DType::kF32, {p.num_stacked});
  }
  if (storage.rows == Codes::kKept) {
    ids.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats_.weight, storage.rows_stored, p.cols,
                       kAllPhases, ids.w.scale);
  }
  if (storage.int8_rows == Codes::kKept) {
    ids.int8_rows =
        add_matrix(plan, "fp8 weights", p.name + ".int8", parka::int8_rows(p.cols), p.rows, p.cols, kAllPhases);
  }
  if (storage.keeps_piece_codes) {
    const auto add = [&](const char* suffix) {
      return MatrixId{
          plan.add("fp8 weights", p.name + suffix, formats_.weight.dtype, {p.placement.weight.piece(p.numel())}),
          ids.w.scale, formats_.weight};
    };
    weight.piece_code_ids.w = add(".fp8");
    if (storage.transposed == Codes::kGathered) weight.piece_code_ids.w_t = add(".fp8_t");
  }
  if (storage.transposed != Codes::kKept) return;
  ids.w_t = add_matrix(plan, "fp8 weights", p.name + ".fp8_t", formats_.weight, p.num_stacked * p.cols,
                       storage.rows_stored / p.num_stacked, kAllPhases, ids.w.scale);
}

void ModelWeights::declare_workspace(MemoryPlan& plan) {
  int64_t most_codes = 0, most_scales = 1, most_int8 = 0, most_int8_rows = 0;
  bool makes_rows = false, makes_transposed = false;
  for (const Weight& weight : weights_) {
    if (!weight.storage.has_codes || is_fp8_head(weight)) continue;
    const ParameterInfo& p = weight.info;
    const auto scales = scale_shape(formats_.weight.scaling, formats_.weight.group, p.cols, p.rows);
    most_codes = std::max(most_codes, p.numel());
    most_scales = std::max(most_scales, scales[0] * scales[1]);
    makes_rows |= weight.storage.rows == Codes::kMadeOnUse;
    makes_transposed |= weight.storage.transposed == Codes::kMadeOnUse;
    if (weight.storage.int8_rows != Codes::kMadeOnUse) continue;
    most_int8 = std::max(most_int8, p.numel());
    most_int8_rows = std::max(most_int8_rows, p.rows);
  }
  const auto add = [&](const std::string& name, PhaseMask phases) {
    return MatrixId{plan.add("workspace", name, formats_.weight.dtype, {most_codes}, phases),
                    plan.add("workspace", name + ".scale", DType::kF32, {most_scales}, phases), formats_.weight};
  };
  constexpr PhaseMask kForward = kForwardAttention | kForwardFfn | kRerun | kEvaluation;
  if (makes_rows) rows_workspace_id_ = add("weight.fp8", kForward);
  if (makes_transposed) transposed_workspace_id_ = add("weight.fp8_t", kBackwardLinear);
  if (most_int8 > 0) {
    int8_workspace_id_ = {plan.add("workspace", "weight.int8", DType::kI8, {most_int8}, kForward),
                          plan.add("workspace", "weight.int8.scale", DType::kF32, {most_int8_rows}, kForward),
                          parka::int8_rows(0)};
  }
  if (fp8_head_ >= 0) declare_head_workspace(plan);
}

void ModelWeights::declare_head_workspace(MemoryPlan& plan) {
  const Weight& head = at(fp8_head_);
  const int64_t rows = head.storage.rows_stored, cols = head.info.cols;
  const TensorId scale = head.copy_ids.w.scale;
  if (head.storage.rows == Codes::kMadeOnUse) {
    head_rows_workspace_id_ =
        add_matrix(plan, "workspace", "head_weight.fp8", formats_.weight, rows, cols, kHead | kEvaluation, scale);
  }
  if (head.storage.transposed == Codes::kMadeOnUse) {
    head_transposed_workspace_id_ =
        add_matrix(plan, "workspace", "head_weight.fp8_t", formats_.weight, cols, rows, kHead, scale);
  }
}

void ModelWeights::declare_gather_buffers(const ParameterTable& table, MemoryPlan& plan) {
  const std::vector<int> block = table.unit(1);  // blocks differ in windows and formats, not in weights
  const auto any_has_codes = [&](size_t place, bool wanted) {
    for (int64_t l = 0; l < table.num_blocks; ++l) {
      if (at(table.unit(table.block_unit(l)).at(place)).storage.has_codes == wanted) return true;
    }
    return false;
  };
  for (size_t number = 0; number < buffers_.size(); ++number) {
    for (int index : block) {
      const size_t place = buffers_[number].size();
      const bool some_have_codes = any_has_codes(place, true);
      const ParameterInfo& p = at(index).info;
      const std::string name = fmt::format("{}.gathered{}", p.name, number);
      const int64_t padded = p.placement.states.padded(p.numel());
      Gathered buffer;
      if (!divides_) {
        if (at(index).storage.is_in_host) {
          buffer.whole = plan.add("gathered weights", name, formats_.compute.dtype, {padded});
        }
      } else {
        const bool gathers_some_codes = some_have_codes && gathers_codes();
        if (gathers_some_codes) {
          buffer.codes = plan.add("gathered weights", name + ".codes", formats_.weight.dtype, {padded});
        }
        if (!gathers_some_codes || any_has_codes(place, false)) {
          buffer.whole = plan.add("gathered weights", name, formats_.compute.dtype, {padded});
        }
        if (some_have_codes && !gathers_codes()) {
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
  pieces_.resize(gathered_unit_.size());
  backward_pieces_.resize(gathered_unit_.size());
  host_parts_.resize(gathered_unit_.size());
  int unit = -1;
  size_t in_unit = 0;
  for (Weight& weight : weights_) {
    in_unit = weight.info.unit == unit ? in_unit + 1 : 0;
    unit = weight.info.unit;
    const std::vector<Gathered>& buffers = buffers_[gather_buffer_of(unit)];
    if (weight.storage.is_divided) {
      bind_gathered(arena, weight, buffers[in_unit]);
    } else if (has_host_parts_ && weight.storage.is_in_host) {
      bind_weight(arena, weight, arena[buffers[in_unit].whole]);
    } else {
      bind_weight(arena, weight, {});
    }
  }
}

// `buffer`: where on the device it is copied to; empty if it is not.
void ModelWeights::bind_weight(const Arena& arena, Weight& weight, const TensorView& buffer) {
  const ParameterInfo& p = weight.info;
  if (weight.storage.has_codes) bind_copies(arena, weight);
  if (p.is_coded()) {
    own_.emplace_back();
    return;
  }
  const auto matrix = [&](const TensorView& t) { return TensorView(t.data, t.dtype, {p.rows, p.cols}); };
  const auto unit = static_cast<size_t>(p.unit);
  const Shard& states = p.placement.states;
  const TensorView whole = flat(arena[weight.plain_id], states.padded(p.numel()));
  weight.plain = matrix(is_gathered_on_use(p.unit) && !buffer.empty() ? buffer : whole);
  weight.kept = flat(whole, p.numel());
  const ElementRange own = states.own(p.numel());
  own_.push_back(weight.kept.rows(own.begin, own.size()));
  if (!buffer.empty()) {
    weight.fetched = matrix(buffer);
    host_parts_[unit].push_back({whole, buffer, states});
  }
  if (states.size > 1) {
    const TensorView& on_device = buffer.empty() ? whole : buffer;
    const int64_t piece = states.piece(p.numel()), begin = states.rank * piece;
    pieces_[unit].push_back({on_device.rows(begin, piece), on_device, false, p.trainable, p.placement.peers()});
  }
}

void ModelWeights::bind_copies(const Arena& arena, Weight& weight) {
  const ParameterInfo& p = weight.info;
  const Storage& storage = weight.storage;
  const CopyIds& ids = weight.copy_ids;
  const MatrixId& w = is_fp8_head(weight) ? head_rows_workspace_id_ : rows_workspace_id_;
  const MatrixId& w_t = is_fp8_head(weight) ? head_transposed_workspace_id_ : transposed_workspace_id_;
  weight.copies = {(storage.rows == Codes::kKept ? ids.w : w).view(arena, storage.rows_stored, p.cols),
                   (storage.transposed == Codes::kKept ? ids.w_t : w_t)
                       .view(arena, p.num_stacked * p.cols, storage.rows_stored / p.num_stacked)};
  if (formats_.has_tensor_scales()) weight.copies.w.scale = weight.copies.w_t.scale = arena[ids.w.scale];
  if (storage.int8_rows == Codes::kNone) return;
  MatrixId int8 = storage.int8_rows == Codes::kKept ? ids.int8_rows : int8_workspace_id_;
  int8.format.group = p.cols;
  weight.copies.int8_rows = int8.view(arena, p.rows, p.cols);
}

void ModelWeights::bind_gathered(const Arena& arena, Weight& weight, const Gathered& buffer) {
  const ParameterInfo& p = weight.info;
  const bool has_codes = weight.storage.has_codes, is_code = has_codes && gathers_codes();
  weight.piece = arena[weight.plain_id];
  own_.push_back(flat(weight.piece, p.own_elements().size()));
  const TensorView whole = arena[is_code ? buffer.codes : buffer.whole];
  if (has_codes) {
    weight.copies.w_t = transposed_workspace_id_.view(arena, p.num_stacked * p.cols, p.rows / p.num_stacked);
  }
  if (is_code) {
    bind_gathered_codes(arena, weight, whole);
  } else {
    if (has_codes) weight.copies.w = buffer.w.view(arena, p.rows, p.cols);
    weight.plain = TensorView(whole.data, whole.dtype, {p.rows, p.cols});
  }
  const auto unit = static_cast<size_t>(p.unit);
  if (!is_code && weight.storage.is_in_host) {
    const Shard& shard = p.placement.weight;
    const int64_t piece = shard.piece(p.numel());
    const TensorView on_device = whole.rows(shard.rank * piece, piece);
    host_parts_[unit].push_back({weight.piece, on_device, shard});
    pieces_[unit].push_back({on_device, whole});
  } else {
    pieces_[unit].push_back({is_code ? weight.piece_codes : weight.piece, whole, false, true, p.placement.peers()});
  }
  if (weight.piece_codes_t.empty()) {
    backward_pieces_[unit].push_back(pieces_[unit].back());
  } else {
    backward_pieces_[unit].push_back({weight.piece_codes_t, weight.copies.w_t.data, true});
  }
}

void ModelWeights::bind_gathered_codes(const Arena& arena, Weight& weight, const TensorView& whole) {
  const ParameterInfo& p = weight.info;
  const CopyIds& kept = weight.piece_code_ids;
  Copies& copies = weight.copies;
  const Shard& shard = p.placement.weight;
  const int64_t piece = shard.piece(p.numel());
  weight.piece_codes =
      weight.storage.keeps_piece_codes ? arena[kept.w.data] : whole.rows(shard.rank * piece, piece);
  const TensorView scale = arena[weight.copy_ids.w.scale];
  copies.w = {TensorView(whole.data, whole.dtype, {p.rows, p.cols}), scale, Scaling::kTensor};
  copies.w_t.scale = scale;
  if (weight.storage.transposed != Codes::kGathered) return;
  weight.piece_codes_t = arena[kept.w_t.data].reshaped({p.cols, p.rows / shard.size});
  copies.w_t = {TensorView(whole.data, whole.dtype, {p.cols, p.rows}), scale, Scaling::kTensor};
}

void ModelWeights::quantize(Device& device, Changed changed) const {
  for (const Weight& w : weights_) {
    if (has_changed(w, changed) && w.storage.keeps_piece_codes) quantize_piece(device, w);
  }
  for (const Weight& w : weights_) {
    if (has_changed(w, changed) && !w.info.is_coded() && w.fetched.empty()) quantize_whole(device, w, copied(w));
  }
}

void ModelWeights::quantize_fetched(Device& device, int unit) const {
  for (const Weight& w : weights_) {
    if (w.info.unit == unit && !w.fetched.empty()) quantize_whole(device, w, w.fetched);
  }
}

TensorView ModelWeights::copied(const Weight& w) {
  return {w.plain.data, w.plain.dtype, {w.storage.rows_stored, w.info.cols}};
}

// Makes the copies that are kept of a whole weight, from its elements.
void ModelWeights::quantize_whole(Device& device, const Weight& w, const TensorView& elements) const {
  const auto kept = [](Codes codes, const ScaledView& copy) { return codes == Codes::kKept ? copy : ScaledView{}; };
  if (w.storage.int8_rows == Codes::kKept) quantize_int8(device, {.x = elements, .out = w.copies.int8_rows});
  if (w.storage.rows != Codes::kKept && w.storage.transposed != Codes::kKept) return;
  make_codes(device, w, elements, kept(w.storage.rows, w.copies.w), kept(w.storage.transposed, w.copies.w_t));
}

void ModelWeights::make_codes(Device& device, const Weight& weight, const TensorView& elements, const ScaledView& w,
                              const ScaledView& w_t) const {
  if (weight.storage.is_stacked) {
    quantize_matrices(device, {.x = elements,
                               .amax = amax_of(weight),
                               .scales = weight.copies.w.scale,
                               .out = w.data,
                               .out_t = w_t.data});
  } else {
    parka::quantize(device, {.x = elements, .out = w, .out_t = w_t, .amax = amax_of(weight)});
  }
}

void ModelWeights::find_amax(Device& device) const {
  if (amax_.empty()) return;
  device.fill_zero(amax_.data, amax_.bytes());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Storage& storage = weights_[i].storage;
    if (storage.is_fp8) continue;  // its codes are made, and have their scale
    find_amax(device, weights_[i], storage.is_4bit ? operand(device, static_cast<int>(i)) : own_[i]);
  }
}

void ModelWeights::find_expert_amax(Device& device) const {
  if (amax_.empty()) return;
  const auto num_weights = static_cast<int64_t>(weights_.size()), num_stacked = amax_.numel() - num_weights;
  if (num_stacked == 0) return;
  const TensorView stacked = amax_.rows(num_weights, num_stacked);
  device.fill_zero(stacked.data, stacked.bytes());
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i].storage.is_stacked) find_amax(device, weights_[i], own_[i]);
  }
}

void ModelWeights::find_amax(Device& device, const Weight& w, const TensorView& elements) const {
  const ParameterInfo& p = w.info;
  Amax a = {.x = elements, .result = amax_of(w)};
  if (w.storage.is_stacked) {
    if (elements.empty()) return;
    a.part = p.numel() / p.num_stacked;
    a.first = p.is_coded() ? 0 : p.placement.states.own(p.numel()).begin;
  }
  parka::amax(device, a);
}

template <typename F>
void ModelWeights::for_each_own_part(const ParameterInfo& p, const F& f) {
  const ElementRange own = p.placement.states.own(p.numel());
  const int64_t size = p.numel() / p.num_stacked;
  for (int64_t e = 0; e < p.num_stacked; ++e) {
    const int64_t begin = std::max(own.begin, e * size), end = std::min(own.end, (e + 1) * size);
    if (begin < end) f(e, begin - own.begin, end - begin);
  }
}

// Makes the codes of this rank's piece of a weight, if codes are gathered.
void ModelWeights::quantize_piece(Device& device, const Weight& weight) const {
  if (weight.piece_codes.empty()) return;
  const ScaledView& w = weight.copies.w;
  if (weight.storage.is_stacked) {
    // Of all experts: those that this rank has nothing of are gathered as codes, without their scale.
    tensor_scales(device, {amax_of(weight), w.data.dtype, w.scale});
    for_each_own_part(weight.info, [&](int64_t e, int64_t begin, int64_t count) {
      const auto part = [&](const TensorView& t) {
        return t.rows(begin, count).reshaped({count / Shard::kGroup, Shard::kGroup});
      };
      parka::quantize(device, {.x = part(weight.piece),
                               .out = {part(weight.piece_codes), w.scale.rows(e, 1), Scaling::kTensor},
                               .scale_given = true});
    });
    return;
  }
  const bool transposes = !weight.piece_codes_t.empty();
  // One scale for all: where nothing is transposed the shape is free, and this one fills tiles.
  const int64_t columns = transposes ? w.data.dim[1] : Shard::kGroup, rows = weight.piece_codes.numel() / columns;
  const ScaledView codes = {weight.piece_codes.reshaped({rows, columns}), w.scale, Scaling::kTensor};
  const ScaledView codes_t = {weight.piece_codes_t, w.scale, Scaling::kTensor};
  parka::quantize(device, {.x = weight.piece.reshaped({rows, columns}),
                           .out = codes,
                           .out_t = transposes ? codes_t : ScaledView{},
                           .amax = amax_of(weight)});
}

void ModelWeights::before_gather(Device& device, int unit) const {
  for (const Weight& w : weights_) {
    if (w.info.unit == unit && w.storage.is_divided && !w.storage.keeps_piece_codes) quantize_piece(device, w);
  }
}

void ModelWeights::gathered(Device& device, int unit) const {
  if (!divides_ || gathers_codes()) return;
  for (const Weight& w : weights_) {
    if (w.info.unit == unit && w.storage.has_codes) parka::quantize(device, {.x = w.plain, .out = w.copies.w});
  }
}

const ScaledView& ModelWeights::quantized(Device& device, int index) const {
  const Weight& w = at(index);
  if (w.storage.rows == Codes::kMadeOnUse) make_codes(device, w, source(device, w), w.copies.w, {});
  return w.copies.w;
}

const ScaledView& ModelWeights::int8_rows(Device& device, int index) const {
  const Weight& w = at(index);
  if (w.storage.int8_rows == Codes::kMadeOnUse) {
    quantize_int8(device, {.x = source(device, w), .out = w.copies.int8_rows});
  }
  return w.copies.int8_rows;
}

const ScaledView& ModelWeights::transposed(Device& device, int index) const {
  const Weight& w = at(index);
  const ScaledView& w_t = w.copies.w_t;
  if (w.storage.transposed != Codes::kMadeOnUse) return w_t;
  const bool moves_codes =
      formats_.has_tensor_scales() && (w.storage.rows == Codes::kKept || w.storage.rows == Codes::kGathered);
  if (!moves_codes) {
    make_codes(device, w, source(device, w), {}, w_t);
  } else if (w.storage.is_stacked) {
    quantize_matrices(device, {.x = w.copies.w.data, .amax = {}, .scales = w_t.scale, .out_t = w_t.data});
  } else {
    parka::quantize(device, {.x = w.copies.w, .out_t = w_t, .scale_given = true});
  }
  return w_t;
}

void ModelWeights::encode(Device& device, int index) const {
  const Weight& w = at(index);
  const auto i = static_cast<size_t>(index);
  if (w.storage.is_4bit) {
    coded_.encode(device, i);
    return;
  }
  PARKA_REQUIRE(w.storage.is_fp8);
  const TensorView elements = coded_.buffer(i), amax = amax_of(w);
  if (!amax.empty()) {
    device.fill_zero(amax.data, amax.bytes());
    find_amax(device, w, elements);
  }
  quantize_whole(device, w, elements);
}

TensorView ModelWeights::operand(Device& device, int index) const {
  const Weight& w = at(index);
  const auto i = static_cast<size_t>(index);
  if (w.storage.is_4bit) return coded_.decode(device, i);
  if (!w.storage.is_fp8) return w.plain;
  const TensorView out = coded_.buffer(i);
  const int64_t n = w.info.num_stacked;
  for (int64_t e = 0; e < n; ++e) {
    parka::quantize(device, {.x = matrix_of(w.copies.w, e, n), .out = matrix_of(out, e, n)});
  }
  return out;
}

std::vector<CodeTensor> ModelWeights::code_tensors(int index) const {
  const Weight& w = at(index);
  if (w.storage.is_4bit) return coded_.tensors(static_cast<size_t>(index));
  PARKA_REQUIRE(w.storage.is_fp8);
  std::vector<CodeTensor> tensors = {{".fp8", w.copies.w.data}, {".fp8.scale", w.copies.w.scale}};
  if (w.storage.transposed != Codes::kKept) return tensors;
  tensors.push_back({".fp8_t", w.copies.w_t.data});
  if (!formats_.has_tensor_scales()) tensors.push_back({".fp8_t.scale", w.copies.w_t.scale});
  return tensors;
}

TensorView ModelWeights::plain(int index) const {
  if (index < 0) return {};
  const TensorView& w = at(index).plain;
  const ParameterRole role = at(index).info.role;
  const bool is_vector =
      role == ParameterRole::kNorm || role == ParameterRole::kBias || role == ParameterRole::kRouterBias;
  return is_vector ? w.reshaped({w.numel()}) : w;
}

}  // namespace parka
