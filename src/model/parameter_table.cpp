#include "model/parameter_table.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "core/error.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/tensor.h"
#include "kernels/ops/optimizer/adamw.h"
#include "model/layers/embedding.h"
#include "model/layers/head.h"
#include "model/layers/stack.h"
#include "model/side/side_network.h"
#include "model/vision/image_embedding.h"

namespace parka {
namespace {

constexpr double kMitchellCutoff = 3.0;  // standard deviations
constexpr double kMostParameters = 1e13;

// Standard normals from the stream of one parameter: each is the first within the cutoff of its element's draws.
struct Normals {
  uint64_t seed;
  size_t parameter;
  double cutoff;

  // Draws the numbers of element `first` and following, times `std`.
  void fill(int64_t first, double std, std::span<float> out) const {
    // All bits first, in a loop that compilers vectorise: they are most of the work.
    constexpr size_t kBatch = 64;
    uint32_t bits0[kBatch], bits1[kBatch];
    for (size_t begin = 0; begin < out.size(); begin += kBatch) {
      const auto element = static_cast<uint64_t>(first) + begin;
      for (size_t i = 0; i < kBatch; ++i) {
        const auto bits = philox4x32(seed, parameter, element + i);
        bits0[i] = bits[0];
        bits1[i] = bits[1];
      }
      for (size_t i = 0; i < std::min(kBatch, out.size() - begin); ++i) {
        const double value = normal2_of(bits0[i], bits1[i])[0];
        out[begin + i] = static_cast<float>(std * (std::abs(value) <= cutoff ? value : draw_again(element + i)));
      }
    }
  }

 private:
  double draw_again(uint64_t element) const {
    for (uint64_t attempt = 1;; ++attempt) {
      const double value = philox_normal2(seed, static_cast<uint64_t>(parameter) | attempt << 32, element)[0];
      if (std::abs(value) <= cutoff) return value;
    }
  }
};

// Kaiming's uniform distribution with a = sqrt(5), as peft draws it: within
// +-1/sqrt(fan_in).
std::vector<float> uniform_values(uint64_t seed, size_t parameter, int64_t fan_in, ElementRange range) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(fan_in));
  std::vector<float> values;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const uint32_t bits = philox4x32(seed, parameter, static_cast<uint64_t>(i))[0];
    values.push_back(static_cast<float>(bound * (std::ldexp(2.0 * bits + 1.0, -32) - 1.0)));
  }
  return values;
}

// The parameters whose name matches: at least one.
std::vector<ParameterInfo*> matches(std::vector<ParameterInfo>& parameters, const char* key,
                                    const std::string& pattern) {
  std::vector<ParameterInfo*> found;
  for (ParameterInfo& p : parameters) {
    if (fnmatch(pattern.c_str(), p.name.c_str(), 0) == 0) found.push_back(&p);
  }
  if (!found.empty()) return found;
  throw_bad_input("{}: no parameter has a name like \"{}\"; names are {}, {} and so on: correct or remove it", key,
                  pattern, parameters.front().name, parameters[1].name);
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::ranges::any_of(patterns, [&](const auto& p) { return fnmatch(p.c_str(), name.c_str(), 0) == 0; });
}

void set_lr_factors(std::vector<ParameterInfo>& parameters, const ParameterRules& rules) {
  if (rules.lr_patterns.size() != rules.lr_factors.size()) {
    throw_bad_input("optimizer.lr_factors has {} numbers, but lr_patterns has {} entries; give one for each",
                    rules.lr_factors.size(), rules.lr_patterns.size());
  }
  for (size_t i = 0; i < rules.lr_patterns.size(); ++i) {
    const std::string& pattern = rules.lr_patterns[i];
    const std::vector<ParameterInfo*> found = matches(parameters, "optimizer.lr_patterns", pattern);
    if (std::ranges::none_of(found, &ParameterInfo::trainable)) {
      throw_bad_input(
          "optimizer.lr_patterns: all parameters with a name like \"{}\" are frozen, {} for one, and have no learning "
          "rate: correct or remove it",
          pattern, found.front()->name);
    }
    for (ParameterInfo* p : found) p->lr_factor = rules.lr_factors[i];
  }
}

void apply_rules(std::vector<ParameterInfo>& parameters, const ParameterRules& rules) {
  if (rules.lora.rank > 0) {
    for (ParameterInfo& p : parameters) p.trainable = is_adapter(p);
  }
  if (rules.side.exists()) {
    for (ParameterInfo& p : parameters) p.trainable = is_of_side(p);
  }
  for (const std::string& pattern : rules.frozen) {
    for (ParameterInfo* p : matches(parameters, "optimizer.frozen", pattern)) p->trainable = false;
  }
  for (ParameterInfo& p : parameters) p.trainable = p.trainable && p.role != ParameterRole::kRouterBias;
  if (std::ranges::none_of(parameters, &ParameterInfo::trainable)) {
    throw_bad_input("optimizer.frozen leaves no parameter to train; remove a pattern");
  }
  for (ParameterInfo& p : parameters) {
    p.quantized = !is_unquantized(rules.unquantized, p);
    p.quantized_forward = !is_forward_unquantized(rules.unquantized, p);
    p.int8_forward = rules.int8_forward && p.quantized_forward && has_own_forward(p);
    p.quantized_forward = p.quantized_forward && !p.int8_forward;
    const bool keeps_weight = rules.base == BaseFormat::kFp8 && !p.quantized_forward;
    const bool may_be_coded = p.role == ParameterRole::kLinear || p.role == ParameterRole::kExperts;
    if (may_be_coded && !p.trainable && !keeps_weight) p.base = rules.base;
  }
  for (const std::string& pattern : rules.unquantized) {
    if (std::ranges::any_of(parameters, [&](const auto& p) { return is_forward_unquantized({pattern}, p); }))
      continue;
    throw_bad_input(
        "precision.unquantized: no weight of a product has a name like \"{}\"; names are head, blocks.0.qkv, "
        "blocks.0.down.forward and so on: correct or remove it",
        pattern);
  }
  set_lr_factors(parameters, rules);
}

}  // namespace

bool is_unquantized(const std::vector<std::string>& patterns, const ParameterInfo& parameter) {
  const bool is_tied = parameter.role == ParameterRole::kTiedEmbedding,
             is_head = parameter.role == ParameterRole::kHead;
  const bool is_of_experts =
      parameter.role == ParameterRole::kExperts || parameter.name.find(".shared.") != std::string::npos;
  if (is_of_experts || (!parameter.is_of_block() && !is_head && !is_tied)) return false;
  return matches_any(patterns, is_tied ? "head" : parameter.name);
}

bool has_own_forward(const ParameterInfo& parameter) {
  return parameter.role == ParameterRole::kLinear && is_unquantized({parameter.name}, parameter);
}

bool is_forward_unquantized(const std::vector<std::string>& patterns, const ParameterInfo& parameter) {
  return is_unquantized(patterns, parameter) ||
         (has_own_forward(parameter) && matches_any(patterns, parameter.name + ".forward"));
}

std::string block_prefix(std::string_view stack, int64_t l) { return fmt::format("{}blocks.{}.", stack, l); }

ParameterTable::ParameterTable(std::vector<ParameterInfo> parameters) : all(std::move(parameters)) {
  for (size_t i = 0; i < all.size(); ++i) by_name_.emplace(all[i].name, static_cast<int>(i));
}

// Weights of blocks alone are divided: one block is gathered while another computes.
ParameterTable ParameterTable::placed(const Zero& zero, MemoryPlace linear_weights) && {
  for (ParameterInfo& p : all) {
    const bool is_of_block = p.unit > 0 && p.unit < head_unit(), is_expert = p.role == ParameterRole::kExperts;
    const auto divided = [&](bool is_divided) {
      return !is_divided ? Shard{} : is_expert ? zero.shard_of_experts() : zero.shard();
    };
    const bool may_move = p.role == ParameterRole::kLinear && p.quantized_forward;
    p.placement = {.memory = may_move ? linear_weights : MemoryPlace::kDevice,
                   .weight = divided(zero.shards_weights() && is_of_block),
                   .gradient = divided(zero.shards_gradients()),
                   .states = divided(zero.shards_states())};
    if (!is_expert) continue;
    p.placement.expert_place = zero.mesh.place(Peers::kExpert);
    p.placement.expert_places = zero.expert_places();
    p.rows /= zero.expert_places();
    p.num_stacked /= zero.expert_places();
    p.fused_rows.resize(p.fused_rows.size() / static_cast<size_t>(zero.expert_places()));
  }
  return std::move(*this);
}

int ParameterTable::index_of(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? -1 : found->second;
}

bool ParameterTable::trains_any(std::string_view prefix) const {
  return std::ranges::any_of(all, [&](const auto& p) { return p.trainable && p.name.starts_with(prefix); });
}

int64_t ParameterTable::num_parameters() const {
  int64_t sum = 0;
  for (const ParameterInfo& p : all) sum += p.whole_numel();
  return sum;
}

int64_t ParameterTable::num_active_parameters() const {
  int64_t sum = 0;
  for (const ParameterInfo& p : all) sum += p.active_numel();
  return sum;
}

int64_t ParameterTable::num_compute_parameters() const {
  return num_active_parameters() - (ties_head() ? 0 : all[static_cast<size_t>(embedding)].numel());
}

std::vector<int> ParameterTable::unit(int index) const {
  std::vector<int> members;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].unit == index) members.push_back(static_cast<int>(i));
  }
  return members;
}

std::vector<int> ParameterTable::trained(int unit) const {
  std::vector<int> members = this->unit(unit);
  std::erase_if(members, [&](int i) { return !all[static_cast<size_t>(i)].trainable; });
  return members;
}

std::vector<int> ParameterTable::trained() const {
  std::vector<int> members;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].trainable) members.push_back(static_cast<int>(i));
  }
  return members;
}

void ParameterList::add_matrices(const std::string& prefix, const std::string& layer, int64_t cols,
                                 std::initializer_list<Part> parts, const MoeConfig& moe) {
  if (parts.size() > 1 || moe.exists()) {
    PARKA_REQUIRE(all_.back().name == layer);
    for (const Part& part : parts) all_.back().fused_rows.push_back(part.rows);
    stack(moe, std::vector(all_.back().fused_rows));
  }
  const int64_t experts = std::max<int64_t>(moe.num_experts, 1);
  int64_t first_row = 0;
  for (const Part& part : parts) {
    if (lora_.rank > 0 && std::ranges::count(lora_.targets, part.target) > 0) {
      const std::string name = prefix + part.target;
      const int index = static_cast<int>(all_.size());
      adapters_.push_back({layer, first_row, part.rows, index, index + 1});
      add(name + ".lora_A", experts * lora_.rank, cols, ParameterRole::kAdapterIn,
          /*decayed=*/true, 0.0);
      stack(moe, {lora_.rank});
      add(name + ".lora_B", experts * part.rows, lora_.rank, ParameterRole::kAdapterOut,
          /*decayed=*/true, 0.0);
      stack(moe, {part.rows});
    }
    first_row += part.rows;
  }
}

void ParameterList::stack(const MoeConfig& moe, const std::vector<int64_t>& rows) {
  if (!moe.exists()) return;
  ParameterInfo& weight = all_.back();
  weight.num_stacked = moe.num_experts;
  weight.num_active = moe.experts_per_token;
  weight.fused_rows.clear();
  for (int64_t e = 0; e < moe.num_experts; ++e) {
    weight.fused_rows.insert(weight.fused_rows.end(), rows.begin(), rows.end());
  }
}

void ParameterList::add(std::string name, int64_t rows, int64_t cols, ParameterRole role, bool decayed,
                        double initial_std) {
  const double end = static_cast<double>(next_element_) + static_cast<double>(rows) * static_cast<double>(cols);
  if (end > kMostParameters) {
    throw_bad_input(
        "the model has {:.3g} parameters up to {}, more than {:.0e}; make model.d_model, d_ffn, num_layers or "
        "vocab_size smaller",
        end, name, kMostParameters);
  }
  all_.push_back({std::move(name), rows, cols, role, decayed, next_element_, unit_, initial_std});
  next_element_ += ceil_div(rows * cols, kMomentGroup) * kMomentGroup;
}

double ParameterList::initial_std(int64_t fan_in, double depth) const {
  if (model_.init == InitKind::kNormal) return model_.init_std;
  return 1.0 / std::sqrt((depth == 0 ? 1.0 : depth) * static_cast<double>(fan_in));
}

ParameterTable make_parameter_table(const ModelConfig& config, bool decay_embeddings, const ParameterRules& rules) {
  ParameterList list(config, rules.lora);
  Embedding::add_parameter(list, config, decay_embeddings);
  if (config.vision.exists()) ImageEmbedding::add_parameters(list, config);
  if (rules.side.exists()) {
    SideNetwork::add_parameters(list, config, rules.side);
  } else {
    Stack::add_parameters(list, config, kDecoder);
    list.begin_unit();
    Head::add_parameters(list, config);
  }

  std::vector<ParameterInfo> parameters = list.take();
  for (ParameterInfo& p : parameters) {
    if (p.role == ParameterRole::kLinear && p.unit == 0) p.role = ParameterRole::kTowerLinear;
    if (p.role == ParameterRole::kLinear && is_of_side(p)) p.role = ParameterRole::kPlainLinear;
    if (is_of_side(p) && p.initial_std > 0) p.initial_std = 1.0 / std::sqrt(3.0 * static_cast<double>(p.cols));
  }
  apply_rules(parameters, rules);
  ParameterTable table(std::move(parameters));
  table.adapters = list.take_adapters();
  table.lora = rules.lora;
  table.side = rules.side;
  table.num_blocks = config.num_layers;
  table.embedding = table.index_of("embedding");
  table.final_norm = table.index_of("final_norm");
  table.head = config.tie_embeddings ? table.embedding : table.index_of("head");
  table.first_trained_unit = std::ranges::find_if(table.all, &ParameterInfo::trainable)->unit;
  return table;
}

std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed, ElementRange range) {
  PARKA_REQUIRE(0 <= range.begin && range.begin <= range.end && range.end <= table.all.at(index).whole_numel());
  const double std = table.all[index].initial_std;
  const ParameterRole role = table.all[index].role;
  if (role == ParameterRole::kAdapterIn) return uniform_values(seed, index, table.all[index].cols, range);
  const bool is_zero = role != ParameterRole::kNorm && role != ParameterRole::kMix;
  const bool has_offset = role == ParameterRole::kNorm && table.all[index].unit > 0;  // a tower's norms have none
  const float offset = has_offset ? config.norm_weight_offset() : 0.0f;
  const float constant = is_zero ? 0.0f : 1.0f - offset;
  std::vector<float> values(static_cast<size_t>(range.size()), constant);
  if (std == 0) return values;
  const double cutoff = config.init == InitKind::kMitchell ? kMitchellCutoff : HUGE_VAL;
  const Normals normals{seed, index, cutoff};
  parallel_for(range.size(), 1 << 14, [&](int64_t begin, int64_t end) {
    const std::span piece = std::span(values).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    normals.fill(range.begin + begin, std, piece);
  });
  return values;
}

std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed) {
  return initial_weight(config, table, index, seed, {0, table.all.at(index).numel()});
}

}  // namespace parka
