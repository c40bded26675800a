#include "model/parameter_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "core/error.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/tensor.h"
#include "kernels/ops/adamw.h"

namespace parka {
namespace {

constexpr double kMitchellCutoff = 3.0;  // standard deviations
constexpr double kMostParameters = 1e13;

// Standard normals from the stream of one parameter: each is the first within the cutoff of its element's draws.
struct Normals {
  uint64_t seed;
  size_t parameter;
  double cutoff;

  // Those of element `first` and following, times `std`.
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

}  // namespace

int64_t ParameterTable::num_parameters() const {
  int64_t sum = 0;
  for (const ParameterInfo& p : all) sum += p.numel();
  return sum;
}

int64_t ParameterTable::num_compute_parameters() const {
  return ties_head() ? num_parameters() : num_parameters() - all[static_cast<size_t>(embedding)].numel();
}

std::vector<int> ParameterTable::unit(int index) const {
  std::vector<int> members;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].unit == index) members.push_back(static_cast<int>(i));
  }
  return members;
}

std::vector<int> ParameterTable::linear_weights(int unit) const {
  std::vector<int> members = this->unit(unit);
  std::erase_if(members, [&](int i) { return all[static_cast<size_t>(i)].role != ParameterRole::kLinear; });
  return members;
}

ParameterTable make_parameter_table(const ModelConfig& config, bool decay_embeddings) {
  ParameterTable table;
  int64_t next_element = 0;
  int unit = 0;
  const auto add = [&](std::string name, int64_t rows, int64_t cols, ParameterRole role, bool decayed, double std) {
    const double end = static_cast<double>(next_element) + static_cast<double>(rows) * static_cast<double>(cols);
    if (end > kMostParameters) {
      throw_bad_input(
          "the model has {:.3g} parameters up to {}, more than {:.0e}; make model.d_model, d_ffn, num_layers or "
          "vocab_size smaller",
          end, name, kMostParameters);
    }
    table.all.push_back({std::move(name), rows, cols, role, decayed, next_element, unit, std});
    next_element += ceil_div(rows * cols, kMomentGroup) * kMomentGroup;
    return static_cast<int>(table.all.size()) - 1;
  };
  const bool has_norm_weights = config.norm == NormKind::kRmsNorm;
  const auto add_norm = [&](std::string name) {
    return has_norm_weights ? add(std::move(name), 1, config.d_model, ParameterRole::kNorm, false, 0.0) : -1;
  };
  const int64_t d = config.d_model, f = config.d_ffn;
  // Of a weight whose `fan_in` inputs are summed, into the residual after `depth` others: 0 for what goes
  // elsewhere.
  const auto std_of = [&](int64_t fan_in, double depth) {
    if (config.init == InitKind::kNormal) return config.init_std;
    return 1.0 / std::sqrt((depth == 0 ? 1.0 : depth) * static_cast<double>(fan_in));
  };
  const auto add_linear = [&](std::string name, int64_t rows, int64_t cols, double std) {
    return add(std::move(name), rows, cols, ParameterRole::kLinear, true, std);
  };
  const ParameterRole embedding = config.tie_embeddings ? ParameterRole::kTiedEmbedding : ParameterRole::kEmbedding;
  table.embedding = add("embedding", config.vocab_size, d, embedding, decay_embeddings, std_of(d, 0));
  for (int64_t l = 0; l < config.num_layers; ++l) {
    const std::string prefix = fmt::format("blocks.{}.", l);
    const double depth = 2.0 * static_cast<double>(l + 1);
    BlockParameters block;
    ++unit;
    block.attention_norm = add_norm(prefix + "attention_norm");
    block.qkv = add_linear(prefix + "qkv", config.d_qkv(), d, std_of(d, 0));
    block.attention_out = add_linear(prefix + "attention_out", d, config.d_heads(), std_of(d, depth));
    block.ffn_norm = add_norm(prefix + "ffn_norm");
    block.up_gate = add_linear(prefix + "up_gate", 2 * f, d, std_of(d, 0));
    block.down = add_linear(prefix + "down", d, f, std_of(f, depth));
    table.blocks.push_back(block);
  }
  ++unit;
  table.final_norm = add_norm("final_norm");
  table.head = config.tie_embeddings ? table.embedding
                                     : add("head", config.vocab_size, d, ParameterRole::kHead, true, std_of(d, 0));
  return table;
}

std::vector<float> initial_weight(const ModelConfig& config, const ParameterTable& table, size_t index,
                                  uint64_t seed, ElementRange range) {
  PARKA_REQUIRE(0 <= range.begin && range.begin <= range.end && range.end <= table.all.at(index).numel());
  const double std = table.all[index].initial_std;
  std::vector<float> values(static_cast<size_t>(range.size()), 1.0f);
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
