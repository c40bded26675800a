#include "kernels/ops/moe/routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/exp.h"

namespace parka::cpu {
namespace {

constexpr int64_t kTokenGrain = 32;

// What a token's logits become.
struct TokenScores {
  std::vector<float> p, softmax;
  float lse = 0, sum = 0;  // log-sum-exp of the logits; sum of p

  TokenScores(const TensorView& logits, int64_t t, RouterScore score)
      : p(static_cast<size_t>(logits.dim[1])), softmax(p) {
    const int64_t E = logits.dim[1];
    const float* l = logits.as<float>() + t * E;
    float max = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t e = 0; e < E; ++e) max = std::fmax(max, l[e]);
    for (int64_t e = 0; e < E; ++e) softmax[e] = l[e] - max;
    exp_elements(softmax.data(), E, softmax.data());
    for (const float x : softmax) total += x;
    for (float& x : softmax) x /= total;
    lse = max + std::log(total);
    if (score == RouterScore::kSoftmax) {
      p = softmax;
    } else {
      sigmoid_elements(l, E, p.data());
    }
    for (const float x : p) sum += x;
  }
};

// The indices of the `count` largest values, the larger first and, of equal ones, the lower index.
std::vector<int32_t> largest(const std::vector<float>& values, int64_t count) {
  std::vector<int32_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

float without_nan(float x) { return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x; }

std::vector<int32_t> chosen_experts(const std::vector<float>& p, const Route& a) {
  const auto E = static_cast<int64_t>(p.size()), in_group = E / a.rule.groups;
  const float* bias = a.bias.empty() ? nullptr : a.bias.as<float>();
  std::vector<float> c(p);
  for (int64_t e = 0; e < E; ++e) c[e] = without_nan(bias == nullptr ? p[e] : p[e] + bias[e]);
  if (a.rule.groups == 1) return largest(c, a.experts.dim[1]);
  std::vector<float> score;
  for (int64_t g = 0; g < a.rule.groups; ++g) {
    const std::vector<float> group(c.begin() + g * in_group, c.begin() + (g + 1) * in_group);
    const std::vector<int32_t> best = largest(group, 2);
    score.push_back(without_nan(group[best[0]] + group[best[1]]));
  }
  std::vector<int32_t> kept = largest(score, a.rule.groups_kept), candidates, chosen;
  std::sort(kept.begin(), kept.end());
  std::vector<float> values;
  for (const int32_t g : kept) {
    for (int64_t e = g * in_group; e < (g + 1) * in_group; ++e) {
      candidates.push_back(static_cast<int32_t>(e));
      values.push_back(c[e]);
    }
  }
  for (const int32_t i : largest(values, a.experts.dim[1])) chosen.push_back(candidates[i]);
  return chosen;
}

// The divisor of a token's weights.
float weight_divisor(const std::vector<float>& p, std::span<const int32_t> experts, const RouterRule& rule) {
  if (!rule.normalize) return 1.0f;
  float sum = 0;
  for (const int32_t e : experts) sum += p[e];
  return sum + 1e-20f;
}

std::span<const int32_t> experts_of(const TensorView& experts, int64_t t) {
  const int64_t k = experts.dim[1];
  return {experts.as<int32_t>() + t * k, static_cast<size_t>(k)};
}

void check_index(const char* op, int64_t index, int64_t end) {
  if (index < 0 || index >= end) throw_internal("{}: index {} is outside of [0, {})", op, index, end);
}

// The gradient of a token's p, from its weights and the balance loss.
std::vector<float> score_gradient(const RouteBackward& a, const TokenScores& scores, int64_t t) {
  const std::span<const int32_t> experts = experts_of(a.experts, t);
  const auto k = static_cast<int64_t>(experts.size());
  std::vector<float> d_weights;
  for (int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
    const int64_t row = a.row_of_slot.empty() ? slot : a.row_of_slot.as<int32_t>()[slot];
    check_index("route_backward", row, a.d_row_weights.dim[0]);
    d_weights.push_back(a.d_row_weights.as<float>()[row]);
  }
  const float divisor = weight_divisor(scores.p, experts, a.rule);
  std::vector<float> d_p(scores.p.size());
  if (a.balance_factor != 0) {
    const float* load = a.load.as<float>();
    const bool is_share = a.rule.score == RouterScore::kSigmoid;  // p / sum is what counts
    float mean = 0;
    for (size_t e = 0; e < d_p.size(); ++e) mean += load[e] * (scores.p[e] / scores.sum);
    for (size_t e = 0; e < d_p.size(); ++e) {
      d_p[e] = a.balance_factor * (is_share ? (load[e] - mean) / scores.sum : load[e]);
    }
  }
  float mean = 0;  // of the weights' gradients, by the weights
  for (size_t j = 0; j < experts.size(); ++j) {
    if (a.rule.normalize) mean += scores.p[experts[j]] / divisor * d_weights[j];
  }
  for (size_t j = 0; j < experts.size(); ++j) {
    d_p[experts[j]] += a.rule.scaling * (d_weights[j] - mean) / divisor;
  }
  return d_p;
}

}  // namespace

void route(Device&, const Route& a) {
  const int64_t k = a.experts.dim[1];
  parallel_for(a.logits.dim[0], kTokenGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const std::vector<float> p = TokenScores(a.logits, t, a.rule.score).p;
      const std::vector<int32_t> chosen = chosen_experts(p, a);
      const float divisor = weight_divisor(p, chosen, a.rule);
      for (int64_t j = 0; j < k; ++j) {
        a.experts.as<int32_t>()[t * k + j] = chosen[j];
        a.weights.as<float>()[t * k + j] = p[chosen[j]] / divisor * a.rule.scaling;
      }
    }
  });
}

void sort_by_expert(Device&, const SortByExpert& a) {
  const int64_t S = a.experts.numel(), E = a.counts.dim[0], R = a.slot_of_row.dim[0];
  const bool has_all = a.first_expert == SortByExpert::kAllExperts;
  std::vector<int64_t> experts(a.experts.as<int32_t>(), a.experts.as<int32_t>() + S);
  const auto* weights = a.weights.as<float>();
  auto *counts = a.counts.as<int32_t>(), *offsets = a.offsets.as<int32_t>();
  for (int64_t& e : experts) {
    if (has_all) check_index("sort_by_expert", e, E);
    if (!has_all) e = e < a.first_expert || e >= a.first_expert + E ? -1 : e - a.first_expert;
  }
  std::fill_n(counts, E, 0);
  std::fill_n(a.slot_of_row.as<int32_t>(), R, -1);
  std::fill_n(a.row_weights.as<float>(), R, 0.0f);
  for (const int64_t e : experts) {
    if (e >= 0) ++counts[e];
  }
  offsets[0] = 0;
  for (int64_t e = 0; e < E; ++e) {
    offsets[e + 1] = offsets[e] + static_cast<int32_t>(ceil_div(counts[e], kExpertRows) * kExpertRows);
  }
  std::vector<int32_t> next(offsets, offsets + E);
  for (int64_t s = 0; s < S; ++s) {
    const int32_t row = experts[s] < 0 ? -1 : next[experts[s]]++;
    a.row_of_slot.as<int32_t>()[s] = row;
    if (row < 0) continue;
    a.slot_of_row.as<int32_t>()[row] = static_cast<int32_t>(s);
    a.row_weights.as<float>()[row] = weights[s];
  }
}

void gather_tokens(Device&, const GatherTokens& a) {
  const int64_t R = a.slot_of_row.dim[0], T = a.out.empty() ? a.x_t.dim[1] : a.x.dim[0];
  std::vector<int64_t> token(static_cast<size_t>(R), -1);
  for (int64_t r = 0; r < R; ++r) {
    const int64_t slot = a.slot_of_row.as<int32_t>()[r];
    if (slot < 0) continue;
    token[r] = slot / a.slots_per_token;
    check_index("gather_tokens", token[r], T);
  }
  if (!a.out.empty()) {
    const int64_t row_bytes = a.x.dim[1] * size_of(a.x.dtype);
    const auto* x = static_cast<const std::byte*>(a.x.data);
    auto* out = static_cast<std::byte*>(a.out.data);
    parallel_for(R, kTokenGrain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (token[r] < 0) {
          std::memset(out + r * row_bytes, 0, static_cast<size_t>(row_bytes));
        } else {
          std::memcpy(out + r * row_bytes, x + token[r] * row_bytes, static_cast<size_t>(row_bytes));
        }
      }
    });
  }
  if (a.out_t.empty()) return;
  const auto* x_t = static_cast<const uint8_t*>(a.x_t.data);
  auto* out_t = static_cast<uint8_t*>(a.out_t.data);
  parallel_for(a.x_t.dim[0], kTokenGrain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t r = 0; r < R; ++r) out_t[c * R + r] = token[r] < 0 ? uint8_t{0} : x_t[c * T + token[r]];
    }
  });
}

void combine_rows(Device&, const CombineRows& a) {
  const int64_t d = a.rows.dim[1];
  parallel_for(a.out.dim[0], kTokenGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(d)), row(sum);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (const int32_t r : experts_of(a.row_of_slot, t)) {
        if (r == -1) continue;
        check_index("combine_rows", r, a.rows.dim[0]);
        decode_elements(a.rows, r * d, d, row.data());
        for (int64_t c = 0; c < d; ++c) sum[c] += row[c];
      }
      if (a.accumulate) {
        decode_elements(a.out, t * d, d, row.data());
        for (int64_t c = 0; c < d; ++c) sum[c] += row[c];
      }
      encode_elements(sum.data(), t * d, d, a.out);
    }
  });
}

void router_load(Device&, const RouterLoad& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1], size = 2 * E + 1;
  std::vector<double> pieces(static_cast<size_t>(ceil_div(T, kTokenGrain) * size)),
      total(static_cast<size_t>(size));
  parallel_for(T, kTokenGrain, [&](int64_t begin, int64_t end) {
    double* const sum = pieces.data() + begin / kTokenGrain * size;
    for (int64_t t = begin; t < end; ++t) {
      const TokenScores scores(a.logits, t, a.score);
      const float divisor = a.score == RouterScore::kSigmoid ? scores.sum : 1.0f;
      for (const int32_t e : experts_of(a.experts, t)) {
        check_index("router_load", e, E);
        ++sum[e];
      }
      for (int64_t e = 0; e < E; ++e) sum[E + e] += scores.p[e] / divisor;
      sum[2 * E] += scores.lse * scores.lse;
    }
  });
  for (size_t i = 0; i < pieces.size(); ++i) total[i % total.size()] += pieces[i];
  for (int64_t i = 0; i < size; ++i) a.load.as<float>()[i] = static_cast<float>(total[i]);
}

void route_backward(Device&, const RouteBackward& a) {
  const int64_t E = a.logits.dim[1];
  for (int64_t s = 0; s < a.experts.numel(); ++s) check_index("route_backward", a.experts.as<int32_t>()[s], E);
  parallel_for(a.logits.dim[0], kTokenGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> d_l(static_cast<size_t>(E));
    for (int64_t t = begin; t < end; ++t) {
      const TokenScores scores(a.logits, t, a.rule.score);
      const std::vector<float> d_p = score_gradient(a, scores, t);
      float mean = 0;
      for (int64_t e = 0; e < E; ++e) mean += scores.p[e] * d_p[e];
      const float of_lse = 2 * a.z_factor * scores.lse;
      for (int64_t e = 0; e < E; ++e) {
        const float p = scores.p[e];
        const bool is_softmax = a.rule.score == RouterScore::kSoftmax;
        d_l[e] = p * (is_softmax ? d_p[e] - mean : d_p[e] * (1 - p));
        if (a.z_factor != 0) d_l[e] += of_lse * scores.softmax[e];
      }
      encode_elements(d_l.data(), t * E, E, a.d_logits);
    }
  });
}

}  // namespace parka::cpu
