#include "model/weights.h"

#include <algorithm>

#include "kernels/ops/amax.h"
#include "kernels/ops/quantize.h"
#include "model/phases.h"

namespace parka {
namespace {

TensorView flat(const TensorView& t, int64_t numel) { return {t.data, t.dtype, {numel}}; }

}  // namespace

ModelWeights::ModelWeights(const ParameterTable& table, const Formats& formats, Transposed transposed,
                           const Zero& zero, MemoryPlan& plan)
    : parameters_(table.all),
      formats_(formats),
      zero_(zero),
      linear_(table.all.size(), false),
      gathers_codes_(formats.fp8_gemm && formats.weight.scaling == Scaling::kTensor),
      gathered_unit_(static_cast<size_t>(table.num_units()), false),
      copy_ids_(table.all.size()) {
  for (const BlockParameters& block : table.blocks) {
    for (int index : {block.qkv, block.attention_out, block.up_gate, block.down}) linear_[index] = true;
  }
  if (zero_.shards_weights()) std::fill(gathered_unit_.begin() + 1, gathered_unit_.end() - 1, true);
  int64_t most_codes = 0, most_scales = 1;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    const DType dtype = formats.compute.dtype;
    if (is_gathered_on_use(p.unit)) {
      plain_ids_.push_back(plan.add("weights", p.name, dtype, {zero_.shard.piece(p.numel())}));
    } else if (zero_.shard.size == 1) {
      plain_ids_.push_back(plan.add("weights", p.name, dtype, {p.rows, p.cols}));
    } else {
      plain_ids_.push_back(plan.add("weights", p.name, dtype, {zero_.shard.padded(p.numel())}));
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    if (!has_copy(i)) continue;
    declare_copy(i, transposed, plan);
    const auto scales = scale_shape(formats.weight.scaling, formats.weight.group, p.cols, p.rows);
    most_codes = std::max(most_codes, p.rows * p.cols);
    most_scales = std::max(most_scales, scales[0] * scales[1]);
  }
  if (zero_.shards_weights()) declare_rooms(table, plan);
  const bool makes_anew =
      transposed == Transposed::kWorkspace || (transposed == Transposed::kCached && zero_.shards_weights());
  if (!formats.fp8_gemm || !makes_anew) return;
  constexpr PhaseMask kUse = kBackwardLinear;
  workspace_id_ = {plan.add("workspace", "weight.fp8_t", formats.weight.dtype, {most_codes}, kUse),
                   plan.add("workspace", "weight.fp8_t.scale", DType::kF32, {most_scales}, kUse), formats.weight};
}

void ModelWeights::declare_copy(size_t i, Transposed transposed, MemoryPlan& plan) {
  const ParameterInfo& p = parameters_[i];
  CopyIds& copies = copy_ids_[i];
  if (is_gathered_on_use(p.unit)) {
    if (!gathers_codes_) return;  // the copy is made of what is gathered
    copies.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats_.weight, 1, zero_.shard.piece(p.numel()),
                          kAllPhases);
    return;
  }
  copies.w = add_matrix(plan, "fp8 weights", p.name + ".fp8", formats_.weight, p.rows, p.cols, kAllPhases);
  if (transposed != Transposed::kCached) return;
  copies.w_t = add_matrix(plan, "fp8 weights", p.name + ".fp8_t", formats_.weight, p.cols, p.rows, kAllPhases,
                          copies.w.scale);
}

void ModelWeights::declare_rooms(const ParameterTable& table, MemoryPlan& plan) {
  const std::vector<int> block = table.unit(1);  // all blocks are alike
  for (size_t parity = 0; parity < 2; ++parity) {
    for (int index : block) {
      const auto i = static_cast<size_t>(index);
      const ParameterInfo& p = parameters_[i];
      const std::string name = p.name + (parity == 0 ? ".gathered_even" : ".gathered_odd");
      const int64_t padded = zero_.shard.padded(p.numel());
      Room room;
      if (has_copy(i) && gathers_codes_) {
        room.whole = plan.add("gathered weights", name, formats_.weight.dtype, {padded});
        room.w.data = room.whole;
        room.w.format = formats_.weight;  // the scale is the piece's own
      } else {
        room.whole = plan.add("gathered weights", name, formats_.compute.dtype, {padded});
        if (has_copy(i)) {
          room.w = add_matrix(plan, "gathered weights", name + ".fp8", formats_.weight, p.rows, p.cols, kAllPhases);
        }
      }
      rooms_[parity].push_back(room);
    }
  }
  if (formats_.fp8_gemm && gathers_codes_) {
    amax_id_ = plan.add("fp8 weights", "weight_amax", DType::kF32, {static_cast<int64_t>(parameters_.size())});
  }
}

void ModelWeights::bind(const Arena& arena) {
  amax_ = arena[amax_id_];
  piece_plain_.resize(parameters_.size());
  piece_codes_.resize(parameters_.size());
  pieces_.resize(gathered_unit_.size());
  size_t in_unit = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    in_unit = i > 0 && parameters_[i].unit == parameters_[i - 1].unit ? in_unit + 1 : 0;
    const ParameterInfo& p = parameters_[i];
    if (is_gathered_on_use(p.unit)) {
      bind_gathered(arena, i, rooms_[p.unit % 2][in_unit]);
    } else {
      bind_weight(arena, i);
    }
  }
}

void ModelWeights::bind_weight(const Arena& arena, size_t i) {
  const ParameterInfo& p = parameters_[i];
  const TensorView whole = arena[plain_ids_[i]];
  plain_.emplace_back(whole.data, whole.dtype, std::initializer_list<int64_t>{p.rows, p.cols});
  const Shard::Range own = zero_.shard.own(p.numel());
  own_.push_back(flat(whole, p.numel()).rows(own.begin, own.count()));
  if (zero_.shard.size > 1) {
    const int64_t piece = zero_.shard.piece(p.numel()), begin = zero_.shard.rank * piece;
    pieces_[static_cast<size_t>(p.unit)].push_back({whole.rows(begin, piece), whole});
  }
  const CopyIds& ids = copy_ids_[i];
  Copies copies = {ids.w.view(arena, p.rows, p.cols), ids.w_t.view(arena, p.cols, p.rows)};
  if (workspace_id_.valid() && ids.w.valid()) {
    copies.w_t = workspace_id_.view(arena, p.cols, p.rows);
    if (copies.w_t.scaling == Scaling::kTensor) copies.w_t.scale = copies.w.scale;
  }
  copies_.push_back(copies);
}

void ModelWeights::bind_gathered(const Arena& arena, size_t i, const Room& room) {
  const ParameterInfo& p = parameters_[i];
  piece_plain_[i] = arena[plain_ids_[i]];
  own_.push_back(flat(piece_plain_[i], zero_.shard.own(p.numel()).count()));
  const TensorView whole = arena[room.whole];
  const bool is_code = has_copy(i) && gathers_codes_;
  Copies copies;
  if (is_code) {
    const ScaledView piece = copy_ids_[i].w.view(arena, 1, zero_.shard.piece(p.numel()));
    piece_codes_[i] = flat(piece.data, piece.data.numel());
    copies.w = {TensorView(whole.data, whole.dtype, {p.rows, p.cols}), piece.scale, Scaling::kTensor};
  } else if (has_copy(i)) {
    copies.w = room.w.view(arena, p.rows, p.cols);
  }
  plain_.push_back(is_code ? TensorView() : TensorView(whole.data, whole.dtype, {p.rows, p.cols}));
  if (workspace_id_.valid() && has_copy(i)) {
    copies.w_t = workspace_id_.view(arena, p.cols, p.rows);
    if (is_code) copies.w_t.scale = copies.w.scale;
  }
  copies_.push_back(copies);
  pieces_[static_cast<size_t>(p.unit)].push_back({is_code ? piece_codes_[i] : piece_plain_[i], whole});
}

void ModelWeights::quantize(Device& device) const {
  for (size_t i = 0; i < plain_.size(); ++i) {
    if (copies_[i].w.empty() || is_gathered_on_use(parameters_[i].unit)) continue;
    const ScaledView cached_t = workspace_id_.valid() ? ScaledView{} : copies_[i].w_t;
    parka::quantize(device, {.x = plain_[i], .out = copies_[i].w, .out_t = cached_t});
  }
}

void ModelWeights::gathered(Device& device, int unit) const {
  if (gathers_codes_) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit != unit || copies_[i].w.empty()) continue;
    parka::quantize(device, {.x = plain_[i], .out = copies_[i].w});
  }
}

void ModelWeights::find_piece_amax(Device& device) const {
  device.fill_zero(amax_.data, amax_.bytes());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (piece_codes_[i].empty()) continue;
    amax(device, {.x = piece_plain_[i], .result = amax_.rows(static_cast<int64_t>(i), 1)});
  }
}

void ModelWeights::quantize_pieces(Device& device) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (piece_codes_[i].empty()) continue;
    // One scale for all: the shape is free, and this one fills tiles.
    const int64_t groups = piece_codes_[i].numel() / Shard::kGroup;
    const TensorView codes = piece_codes_[i].reshaped({groups, Shard::kGroup});
    parka::quantize(device, {.x = piece_plain_[i].reshaped({groups, Shard::kGroup}),
                             .out = {codes, copies_[i].w.scale, Scaling::kTensor},
                             .amax = amax_.rows(static_cast<int64_t>(i), 1)});
  }
}

const ScaledView& ModelWeights::transposed(Device& device, int index) const {
  const ScaledView& w_t = copies_[index].w_t;
  if (!workspace_id_.valid()) return w_t;
  // Codes with one scale are moved; scales of blocks are found again, as they were from the same weight.
  const ScaledView from = w_t.scaling == Scaling::kTensor ? copies_[index].w : ScaledView(plain_[index]);
  parka::quantize(device, {.x = from, .out = {}, .out_t = w_t, .scale_given = w_t.scaling == Scaling::kTensor});
  return w_t;
}

TensorView ModelWeights::plain(int index) const {
  if (index < 0) return {};
  const TensorView& w = plain_[index];
  return w.dim[0] == 1 ? w.reshaped({w.dim[1]}) : w;
}

}  // namespace parka
