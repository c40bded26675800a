#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <ostream>
#include <vector>

#include "kernels/ops/moe/routing.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
  int64_t T, E, k;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T " << s.T << " E " << s.E << " k " << s.k;
}

// Around the numbers of experts that lanes of a warp have, and of tokens that blocks have.
const std::vector<Shape> kShapes = {{1, 1, 1},   {17, 2, 2},   {16, 8, 2},   {33, 31, 3},  {7, 32, 4},
                                    {64, 33, 5}, {17, 64, 8},  {300, 64, 8}, {65, 100, 7}, {128, 128, 8},
                                    {9, 129, 1}, {40, 256, 6}, {5, 512, 32}, {2100, 16, 4}};

// Multiples of `step`, so that fp32 and float64 agree on which are equal.
std::vector<float> stepped_logits(int64_t count, uint64_t seed, float step) {
  std::vector<float> logits = random_normal(count, seed, 2.0f);
  for (float& l : logits) l = std::round(l / step) * step;
  return logits;
}

// ---- The router in float64 ----

std::vector<double> softmax_of(const double* l, int64_t E) {
  const double max = *std::max_element(l, l + E);
  std::vector<double> p;
  for (int64_t e = 0; e < E; ++e) p.push_back(std::exp(l[e] - max));
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

std::vector<double> scores_of(const double* l, int64_t E, RouterScore score) {
  if (score == RouterScore::kSoftmax) return softmax_of(l, E);
  std::vector<double> p;
  for (int64_t e = 0; e < E; ++e) p.push_back(1 / (1 + std::exp(-l[e])));
  return p;
}

double lse_of(const double* l, int64_t E) {
  double sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += std::exp(l[e]);
  return std::log(sum);
}

std::vector<double> weights_of(const std::vector<double>& p, const int32_t* experts, int64_t k,
                               const RouterRule& rule) {
  std::vector<double> weights;
  double sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += p[experts[j]];
  for (int64_t j = 0; j < k; ++j) {
    weights.push_back(p[experts[j]] / (rule.normalize ? sum + 1e-20 : 1.0) * rule.scaling);
  }
  return weights;
}

// The indices of the largest of `values` among `candidates`, best first. `clear` becomes false where fp32 may tell
// two otherwise that differ in float64.
std::vector<int32_t> best_of(const std::vector<double>& values, std::vector<int32_t> candidates, int64_t count,
                             bool& clear) {
  std::vector<int32_t> best;
  while (static_cast<int64_t>(best.size()) < count) {
    int32_t top = candidates.front();
    for (const int32_t c : candidates) top = values[c] > values[top] ? c : top;
    for (const int32_t c : candidates)
      clear = clear && (values[c] == values[top] || values[top] - values[c] > 4e-6);
    best.push_back(top);
    std::erase(candidates, top);
  }
  return best;
}

std::vector<int32_t> chosen_of(const std::vector<double>& p, const std::vector<float>& bias, int64_t k,
                               const RouterRule& rule, bool& clear) {
  const auto E = static_cast<int32_t>(p.size()), in_group = static_cast<int32_t>(E / rule.groups);
  std::vector<double> c = p, score;
  for (int32_t e = 0; e < E && !bias.empty(); ++e) c[e] += bias[e];
  std::vector<int32_t> groups(static_cast<size_t>(rule.groups)), candidates;
  std::iota(groups.begin(), groups.end(), 0);
  for (const int32_t g : groups) {
    std::vector<double> of_group(c.begin() + g * in_group, c.begin() + (g + 1) * in_group);
    std::sort(of_group.rbegin(), of_group.rend());
    score.push_back(of_group[0] + (in_group > 1 ? of_group[1] : 0));
  }
  std::vector<int32_t> kept = best_of(score, groups, rule.groups_kept, clear);
  std::sort(kept.begin(), kept.end());
  for (const int32_t g : kept) {
    for (int32_t e = g * in_group; e < (g + 1) * in_group; ++e) candidates.push_back(e);
  }
  return best_of(c, candidates, k, clear);
}

std::vector<RouterRule> rules_for(const Shape& s) {
  std::vector<RouterRule> rules = {{},
                                   {.normalize = true},
                                   {.score = RouterScore::kSigmoid, .scaling = 0.5f},
                                   {.score = RouterScore::kSigmoid, .normalize = true, .scaling = 2.5f}};
  for (const auto& [groups, kept] : {std::pair{2, 1}, {4, 2}, {8, 3}, {8, 8}, {32, 5}}) {
    if (s.E % groups != 0 || s.E / groups < 2 || s.E / groups * kept < s.k) continue;
    rules.push_back({.score = RouterScore::kSigmoid, .normalize = true, .groups = groups, .groups_kept = kept});
    rules.push_back({.groups = groups, .groups_kept = kept});
  }
  return rules;
}

std::vector<int32_t> integers(const TestTensor& t) {
  std::vector<int32_t> values(static_cast<size_t>(t.view().numel()));
  const std::vector<std::byte> bytes = t.bytes();
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<float> as_floats(const std::vector<int32_t>& values) { return {values.begin(), values.end()}; }
std::vector<double> as_doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

TEST_CASE("route chooses and weighs experts as float64 does", "[kernels][moe][slow]") {
  for (Device* device : devices()) {
    for (const Shape& s : kShapes) {
      for (const RouterRule& rule : rules_for(s)) {
        for (const float step : {0x1p-5f, 0.5f}) {
          const bool has_bias = step == 0.5f || rule.groups > 1;
          const std::vector<float> l = stepped_logits(s.T * s.E, 1, step), bias = stepped_logits(s.E, 2, 0.25f);
          const TestTensor logits(*device, DType::kF32, {s.T, s.E}, l),
              corrections(*device, DType::kF32, {s.E}, bias), experts(*device, DType::kI32, {s.T, s.k}),
              weights(*device, DType::kF32, {s.T, s.k}), weights_again(*device, DType::kF32, {s.T, s.k}),
              experts_again(*device, DType::kI32, {s.T, s.k});
          Route op{.logits = logits, .rule = rule, .experts = experts, .weights = weights};
          if (has_bias) op.bias = corrections;
          route(*device, op);
          op.experts = experts_again, op.weights = weights_again;
          route(*device, op);
          const std::vector<int32_t> chosen = integers(experts);
          const std::vector<float> got = weights.host();
          const std::vector<double> exact = as_doubles(l);
          int64_t wrong = 0, unclear = 0;
          for (int64_t t = 0; t < s.T; ++t) {
            const std::vector<double> p = scores_of(exact.data() + t * s.E, s.E, rule.score);
            bool clear = true;
            const std::vector<int32_t> want =
                chosen_of(p, has_bias ? bias : std::vector<float>(), s.k, rule, clear);
            unclear += !clear;
            if (clear) wrong += !std::equal(want.begin(), want.end(), chosen.begin() + t * s.k);
            const std::vector<double> want_weights = weights_of(p, chosen.data() + t * s.k, s.k, rule);
            for (int64_t j = 0; j < s.k; ++j) {
              wrong += !(std::abs(got[t * s.k + j] - want_weights[j]) <= 4e-6 * want_weights[j] + 1e-37);
            }
          }
          CAPTURE(device->name(), s, static_cast<int>(rule.score), rule.groups, rule.normalize, step);
          CHECK(wrong == 0);
          CHECK(unclear <= s.T / 4);
          CHECK((experts.bytes() == experts_again.bytes() && weights.bytes() == weights_again.bytes()));
          CHECK((logits.guard_intact() && experts.guard_intact() && weights.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("route takes NaN for the smallest, and the lower of equal experts first", "[kernels][moe]") {
  const float nan = std::nanf("");
  struct Case {
    std::vector<float> logits, bias;
    RouterRule rule;
    std::vector<int32_t> experts;
  };
  const RouterRule sigmoid{.score = RouterScore::kSigmoid};
  for (const Case& c : {
           Case{{1, 2, nan, 3, 0}, {}, {}, {0, 1, 2, 3}},
           Case{{-kInfinity, -kInfinity, -kInfinity, -kInfinity, -kInfinity}, {}, {}, {0, 1, 2, 3}},
           Case{{0, 0, 0, 0, 0}, {}, {}, {0, 1, 2, 3}},
           Case{{0, 0, 0, 0, 0}, {}, sigmoid, {0, 1, 2, 3}},
           Case{{nan, 2, nan, 3, 1}, {}, sigmoid, {3, 1, 4, 0}},
           Case{{nan, 2, 3, 0, 0}, {0, 0, -kInfinity, 0, -kInfinity}, sigmoid, {1, 3, 0, 2}},
           Case{{0, -kInfinity, kInfinity, -1, -kInfinity}, {}, sigmoid, {2, 0, 3, 1}},
           // The third group has the two largest, one of which counts by its bias; the first has the largest.
           Case{{9, nan, 1, 1, 0, 2}, {0, 0, 0, 0, 1, 0}, {RouterScore::kSigmoid, false, 1, 3, 2}, {4, 5, 2, 3}},
       }) {
    for (Device* device : devices()) {
      const auto E = static_cast<int64_t>(c.logits.size());
      const TestTensor logits(*device, DType::kF32, {1, E}, c.logits), bias(*device, DType::kF32, {E}, c.bias),
          experts(*device, DType::kI32, {1, 4}), weights(*device, DType::kF32, {1, 4});
      Route op{.logits = logits, .rule = c.rule, .experts = experts, .weights = weights};
      if (!c.bias.empty()) op.bias = bias;
      route(*device, op);
      CAPTURE(device->name(), c.logits, c.experts);
      CHECK((integers(experts) == c.experts));
    }
  }
}

// ---- Sorting ----

// Experts of tokens, all different for a token where k <= E. The lower ones have more.
std::vector<int32_t> skewed_experts(const Shape& s, uint64_t seed) {
  std::vector<int32_t> experts;
  for (int64_t t = 0; t < s.T; ++t) {
    std::vector<int32_t> left(static_cast<size_t>(s.E));
    std::iota(left.begin(), left.end(), 0);
    for (int64_t j = 0; j < s.k; ++j) {
      const double u = uniform_open(philox4x32(seed, static_cast<uint64_t>(t), static_cast<uint64_t>(j))[0]);
      const auto at = static_cast<size_t>(u * u * static_cast<double>(left.size()));
      experts.push_back(left[at]);
      left.erase(left.begin() + static_cast<int64_t>(at));
    }
  }
  return experts;
}

// One choice for each token, in any order, so that expert e has counts[e] rows.
std::vector<int32_t> experts_of_counts(const std::vector<int64_t>& counts) {
  std::vector<int32_t> experts;
  for (size_t e = 0; e < counts.size(); ++e)
    experts.insert(experts.end(), static_cast<size_t>(counts[e]), static_cast<int32_t>(e));
  for (size_t i = experts.size(); i > 1; --i) std::swap(experts[i - 1], experts[philox4x32(5, 2, i)[0] % i]);
  return experts;
}

// The tensors of sort_by_expert on a device.
struct Sorted {
  Shape s;
  TestTensor experts, weights, offsets, counts, row_of_slot, slot_of_row, row_weights;

  Sorted(Device& device, const Shape& shape, const std::vector<int32_t>& chosen)
      : s(shape),
        experts(device, DType::kI32, {s.T, s.k}, as_floats(chosen)),
        weights(device, DType::kF32, {s.T, s.k}, random_normal(s.T * s.k, 3)),
        offsets(device, DType::kI32, {s.E + 1}),
        counts(device, DType::kI32, {s.E}),
        row_of_slot(device, DType::kI32, {s.T, s.k}),
        slot_of_row(device, DType::kI32, {expert_rows(s.T * s.k, s.E)}),
        row_weights(device, DType::kF32, {expert_rows(s.T * s.k, s.E)}) {
    sort_by_expert(device, op());
  }
  SortByExpert op() const { return {experts, weights, offsets, counts, row_of_slot, slot_of_row, row_weights}; }
  std::vector<const TestTensor*> outputs() const {
    return {&offsets, &counts, &row_of_slot, &slot_of_row, &row_weights};
  }
};

void check_sorted(Device& device, const Shape& s, const std::vector<int32_t>& chosen) {
  const Sorted sorted(device, s, chosen), again(device, s, chosen);
  const std::vector<float> weights = sorted.weights.host();
  const int64_t R = expert_rows(s.T * s.k, s.E);
  std::vector<int32_t> offsets = {0}, counts, row_of_slot(chosen.size()), slot_of_row(static_cast<size_t>(R), -1);
  std::vector<float> row_weights(static_cast<size_t>(R), 0.0f);
  for (int32_t e = 0; e < s.E; ++e) {
    int32_t row = offsets.back();
    for (size_t slot = 0; slot < chosen.size(); ++slot) {
      if (chosen[slot] != e) continue;
      row_of_slot[slot] = row;
      row_weights[row] = weights[slot];
      slot_of_row[row++] = static_cast<int32_t>(slot);
    }
    counts.push_back(row - offsets.back());
    offsets.push_back((row + 127) / 128 * 128);
  }
  CAPTURE(device.name(), s);
  REQUIRE(offsets.back() <= R);
  CHECK((integers(sorted.offsets) == offsets));
  CHECK((integers(sorted.counts) == counts));
  CHECK((integers(sorted.row_of_slot) == row_of_slot));
  CHECK((integers(sorted.slot_of_row) == slot_of_row));
  CHECK((same_bits(sorted.row_weights.host(), row_weights)));
  for (size_t i = 0; i < sorted.outputs().size(); ++i) {
    CHECK((sorted.outputs()[i]->bytes() == again.outputs()[i]->bytes()));
    CHECK(sorted.outputs()[i]->guard_intact());
  }
}

TEST_CASE("sort_by_expert gives each expert the rows of its slots in order", "[kernels][moe]") {
  for (Device* device : devices()) {
    for (const Shape& s : kShapes) check_sorted(*device, s, skewed_experts(s, 4));
    for (const std::vector<int64_t>& counts :
         {std::vector<int64_t>{0, 1, 15, 16, 17, 127, 128, 129}, {129, 0, 0, 128, 1}, {0, 0, 300, 0}, {0, 0, 1}}) {
      const std::vector<int32_t> experts = experts_of_counts(counts);
      check_sorted(*device, {static_cast<int64_t>(experts.size()), static_cast<int64_t>(counts.size()), 1},
                   experts);
    }
    for (const int32_t all_to : {0, 7}) {
      check_sorted(*device, {1100, 8, 4}, std::vector<int32_t>(4400, all_to));
    }
    for (const int64_t E : {1, 8, 128}) check_sorted(*device, {0, E, 1}, {});
  }
}

// More than 256 pieces of 1024 slots, as the GPU divides them at first.
TEST_CASE("sort_by_expert sorts hundreds of thousands of slots", "[kernels][moe]") {
  for (Device* device : devices()) {
    for (const Shape& s : {Shape{40001, 16, 7}, Shape{270000, 3, 1}})
      check_sorted(*device, s, skewed_experts(s, 6));
  }
}

// ---- Rows ----

TEST_CASE("gather_tokens copies the rows of tokens, and their columns, to the rows of slots", "[kernels][moe]") {
  struct Case {
    Shape s;
    int64_t d, offset;  // of tensors, in elements: where they are not aligned
  };
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3, DType::kE5M2}) {
      for (const auto& [s, d, offset] :
           {Case{{1, 1, 1}, 1, 0}, Case{{17, 8, 2}, 7, 0}, Case{{16, 8, 3}, 16, 1}, Case{{64, 4, 1}, 24, 0},
            Case{{300, 64, 8}, 128, 0}, Case{{300, 16, 6}, 200, 0}, Case{{60, 8, 5}, 2064, 0},
            Case{{302, 5, 2}, 36, 0}, Case{{68, 5, 2}, 36, 0}, Case{{4, 5, 5}, 12, 1}, Case{{0, 3, 1}, 16, 0},
            Case{{60004, 7, 3}, 16, 0}}) {  // the GPU divides so many tokens
        const Sorted sorted(*device, s, skewed_experts(s, 7));
        const std::vector<int32_t> slots = integers(sorted.slot_of_row);
        const auto R = static_cast<int64_t>(slots.size()), size = size_of(dtype);
        const bool has_columns = size == 1;
        std::vector<uint8_t> x(static_cast<size_t>((s.T * d + offset) * size)), x_t(x);
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint8_t>(philox4x32(8, 1, i)[0]);
        for (int64_t i = 0; has_columns && i < s.T * d; ++i) x_t[offset + i % d * s.T + i / d] = x[offset + i];
        std::vector<uint8_t> want(static_cast<size_t>(R * d * size)), want_t(has_columns ? want.size() : 0);
        for (int64_t r = 0; r < R; ++r) {
          if (slots[r] < 0) continue;
          const uint8_t* row = x.data() + (offset + slots[r] / s.k * d) * size;
          std::copy(row, row + d * size, want.begin() + r * d * size);
          for (int64_t c = 0; has_columns && c < d; ++c) want_t[c * R + r] = row[c];
        }
        const TestTensor from(*device, dtype, {s.T * d + offset}), from_t(*device, dtype, {s.T * d + offset}),
            to(*device, dtype, {R * d + offset}), to_t(*device, dtype, {R * d + offset});
        upload(*device, from, x);
        upload(*device, from_t, x_t);
        const auto matrix = [&, o = offset](const TestTensor& t, int64_t rows, int64_t cols) {
          return t.view().rows(o, rows * cols).reshaped({rows, cols});
        };
        GatherTokens op{.slot_of_row = sorted.slot_of_row, .slots_per_token = s.k};
        op.x = matrix(from, s.T, d), op.out = matrix(to, R, d);
        if (has_columns) op.x_t = matrix(from_t, d, s.T), op.out_t = matrix(to_t, d, R);
        const auto got = [&, o = offset](const TestTensor& t) {
          const std::vector<std::byte> bytes = t.bytes();
          const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
          return std::vector<uint8_t>(begin + o * size, begin + bytes.size());
        };
        gather_tokens(*device, op);
        CAPTURE(device->name(), name_of(dtype), s, d, offset);
        CHECK((got(to) == want));
        CHECK((to.guard_intact() && to_t.guard_intact()));
        if (!has_columns) continue;
        CHECK((got(to_t) == want_t));
        op.x = op.out = {};
        upload(*device, to_t, std::vector<uint8_t>(want.size() + static_cast<size_t>(offset), 0x55));
        gather_tokens(*device, op);
        CHECK((got(to_t) == want_t));
      }
    }
  }
}

TEST_CASE("combine_rows adds the rows of a token's slots in order", "[kernels][moe]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const DType sum_dtype : {DType::kF32, DType::kBF16}) {
        for (const bool accumulate : {false, true}) {
          for (const auto& [s, d] : {std::pair{Shape{1, 1, 1}, 1},
                                     {Shape{17, 8, 2}, 7},
                                     {Shape{64, 16, 8}, 64},
                                     {Shape{300, 64, 9}, 24},
                                     {Shape{5, 32, 17}, 4104},
                                     {Shape{7, 4, 3}, 300}}) {
            const Sorted sorted(*device, s, skewed_experts(s, 9));
            const std::vector<int32_t> row_of_slot = integers(sorted.row_of_slot);
            const int64_t R = sorted.slot_of_row.view().numel();
            const std::vector<float> x = random_values(dtype, R * d, 10),
                                     before = random_values(sum_dtype, s.T * d, 11);
            const TestTensor rows(*device, dtype, {R, d}, x), out(*device, sum_dtype, {s.T, d}, before),
                again(*device, sum_dtype, {s.T, d}, before);
            for (const TestTensor* to : {&out, &again}) {
              combine_rows(*device, {rows, sorted.row_of_slot, *to, accumulate});
            }
            const std::vector<float> got = out.host();
            int64_t wrong = 0;
            for (int64_t i = 0; i < s.T * d; ++i) {
              float sum = 0;
              for (int64_t j = 0; j < s.k; ++j) sum += x[row_of_slot[i / d * s.k + j] * d + i % d];
              if (accumulate) sum += before[i];
              wrong += got[i] != (sum_dtype == DType::kBF16 ? decode_bf16(encode_bf16(sum)) : sum);
            }
            CAPTURE(device->name(), name_of(dtype), name_of(sum_dtype), accumulate, s, d);
            CHECK(wrong == 0);
            CHECK((out.bytes() == again.bytes() && out.guard_intact() && rows.guard_intact()));
          }
        }
      }
    }
  }
}

// Each rank's tensors of sort_by_expert, where P ranks divide the experts.
struct SortedPart {
  TestTensor offsets, counts, row_of_slot, slot_of_row, row_weights;

  SortedPart(Device& device, const Sorted& all, int64_t rank, int64_t num_ranks)
      : offsets(device, DType::kI32, {all.s.E / num_ranks + 1}),
        counts(device, DType::kI32, {all.s.E / num_ranks}),
        row_of_slot(device, DType::kI32, {all.s.T, all.s.k}),
        slot_of_row(device, DType::kI32, {rows_of(all.s, num_ranks)}),
        row_weights(device, DType::kF32, {rows_of(all.s, num_ranks)}) {
    sort_by_expert(device, {all.experts, all.weights, offsets, counts, row_of_slot, slot_of_row, row_weights,
                            rank * all.s.E / num_ranks});
  }
  static int64_t rows_of(const Shape& s, int64_t num_ranks) {
    const int64_t E = s.E / num_ranks;
    return expert_rows(s.T * std::min(s.k, E), E);
  }
};

TEST_CASE("ranks that divide experts have the rows of their own, and their sums are those of all",
          "[kernels][moe]") {
  for (Device* device : devices()) {
    for (const auto& [s, P] : {std::pair{Shape{17, 8, 2}, 2},
                               {Shape{300, 64, 9}, 8},
                               {Shape{64, 16, 8}, 16},
                               {Shape{1100, 8, 4}, 4},
                               {Shape{0, 8, 2}, 2}}) {
      const int64_t d = 24, R = expert_rows(s.T * s.k, s.E);
      const Sorted all(*device, s, skewed_experts(s, 31));
      const std::vector<int32_t> chosen = integers(all.experts), counts = integers(all.counts);
      const std::vector<float> weights = all.weights.host();
      // Whole numbers, so that sums have no order.
      std::vector<float> values(static_cast<size_t>(s.T * d)), want(values.size()), sums(values.size());
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 61);
      for (size_t i = 0; i < values.size(); ++i) want[i] = static_cast<float>(s.k) * values[i];
      const TestTensor x(*device, DType::kF32, {s.T, d}, values);
      int64_t wrong = 0;
      for (int64_t rank = 0; rank < P; ++rank) {
        const int64_t E = s.E / P, rows = SortedPart::rows_of(s, P);
        const SortedPart part(*device, all, rank, P), again(*device, all, rank, P);
        const std::vector<int32_t> own_counts = integers(part.counts), row_of_slot = integers(part.row_of_slot),
                                   offsets = integers(part.offsets), slot_of_row = integers(part.slot_of_row);
        const std::vector<float> row_weights = part.row_weights.host();
        for (int64_t e = 0; e < E; ++e) wrong += own_counts[e] != counts[rank * E + e];
        for (size_t slot = 0; slot < chosen.size(); ++slot) {
          const int64_t e = chosen[slot] - rank * E;
          if (e < 0 || e >= E) {
            wrong += row_of_slot[slot] != -1;
            continue;
          }
          const int32_t row = row_of_slot[slot];
          const bool is_of_expert = row >= offsets[e] && row < offsets[e] + own_counts[e];
          wrong +=
              !is_of_expert || slot_of_row[row] != static_cast<int32_t>(slot) || row_weights[row] != weights[slot];
        }
        int64_t used = 0;
        for (const int32_t slot : slot_of_row) used += slot >= 0 ? 1 : 0;
        for (const int32_t count : own_counts) used -= count;
        wrong += used != 0;
        const TestTensor gathered(*device, DType::kF32, {rows, d}), out(*device, DType::kF32, {s.T, d});
        gather_tokens(*device, {.slot_of_row = part.slot_of_row, .slots_per_token = s.k, .x = x, .out = gathered});
        combine_rows(*device, {.rows = gathered, .row_of_slot = part.row_of_slot, .out = out});
        const std::vector<float> of_part = out.host();
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_part[i];
        CHECK((part.row_of_slot.bytes() == again.row_of_slot.bytes() && part.slot_of_row.guard_intact()));
      }
      CAPTURE(device->name(), s, P);
      CHECK(wrong == 0);
      CHECK((sums == want));

      // The gradients of weights by slots are those by rows.
      if (s.T == 0) continue;
      const TestTensor logits(*device, DType::kF32, {s.T, s.E}, random_normal(s.T * s.E, 32)),
          by_row(*device, DType::kF32, {R}, random_normal(R, 33)), by_slot(*device, DType::kF32, {s.T * s.k}),
          d_l(*device, DType::kF32, {s.T, s.E}), d_l_by_slot(*device, DType::kF32, {s.T, s.E});
      combine_rows(*device, {.rows = by_row.view().reshaped({R, 1}),
                             .row_of_slot = all.row_of_slot.view().reshaped({s.T * s.k, 1}),
                             .out = by_slot.view().reshaped({s.T * s.k, 1})});
      RouteBackward backward{.logits = logits,
                             .experts = all.experts,
                             .row_of_slot = all.row_of_slot,
                             .d_row_weights = by_row,
                             .d_logits = d_l};
      route_backward(*device, backward);
      backward.row_of_slot = {}, backward.d_row_weights = by_slot, backward.d_logits = d_l_by_slot;
      route_backward(*device, backward);
      CHECK((d_l.bytes() == d_l_by_slot.bytes()));
    }
  }
}

TEST_CASE("rows gathered and combined with weights of one are k times the token's", "[kernels][moe]") {
  for (Device* device : devices()) {
    for (const Shape& s : kShapes) {
      const int64_t d = 40, R = expert_rows(s.T * s.k, s.E);
      const std::vector<float> values = random_bf16(s.T * d, 12);  // so that multiples are exact in fp32
      const Sorted sorted(*device, s, skewed_experts(s, 13));
      const TestTensor x(*device, DType::kBF16, {s.T, d}, values), rows(*device, DType::kBF16, {R, d}),
          out(*device, DType::kF32, {s.T, d});
      gather_tokens(*device, {.slot_of_row = sorted.slot_of_row, .slots_per_token = s.k, .x = x, .out = rows});
      combine_rows(*device, {.rows = rows, .row_of_slot = sorted.row_of_slot, .out = out});
      std::vector<float> want = values;
      for (float& v : want) v *= static_cast<float>(s.k);
      CAPTURE(device->name(), s);
      CHECK((out.host() == want));
    }
  }
}

// ---- Losses and backward ----

TEST_CASE("router_load sums choices, probabilities and squares as float64 does", "[kernels][moe]") {
  std::vector<Shape> shapes = kShapes;
  shapes.push_back({9001, 64, 8});
  shapes.push_back({0, 8, 2});
  for (Device* device : devices()) {
    for (const Shape& s : shapes) {
      for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
        const std::vector<float> l = random_normal(s.T * s.E, 14, 3.0f);
        const std::vector<int32_t> chosen = skewed_experts(s, 15);
        const std::vector<double> exact = as_doubles(l);
        std::vector<double> want(static_cast<size_t>(2 * s.E + 1));
        for (const int32_t e : chosen) ++want[e];
        for (int64_t t = 0; t < s.T; ++t) {
          const std::vector<double> p = scores_of(exact.data() + t * s.E, s.E, score);
          const double sum = std::accumulate(p.begin(), p.end(), 0.0);
          for (int64_t e = 0; e < s.E; ++e) want[s.E + e] += p[e] / sum;
          want[2 * s.E] += std::pow(lse_of(exact.data() + t * s.E, s.E), 2);
        }
        const TestTensor logits(*device, DType::kF32, {s.T, s.E}, l),
            experts(*device, DType::kI32, {s.T, s.k}, as_floats(chosen)), load(*device, DType::kF32, {2 * s.E + 1}),
            again(*device, DType::kF32, {2 * s.E + 1});
        for (const TestTensor* to : {&load, &again}) router_load(*device, {logits, experts, score, *to});
        const std::vector<float> got = load.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i <= 2 * s.E; ++i) {
          // Sums of at most 36 numbers of one sign in a piece, each within 4e-6; lse may pass through 0.
          const double bound =
              i < s.E ? 0.0 : 1e-5 * want[i] + (i == 2 * s.E ? 1e-6 * static_cast<double>(s.T) : 0.0);
          wrong += !(std::abs(got[i] - want[i]) <= bound);
        }
        CAPTURE(device->name(), s, static_cast<int>(score));
        CHECK(wrong == 0);
        CHECK((load.bytes() == again.bytes() && load.guard_intact()));
      }
    }
  }
}

// What route_backward differentiates, of one token's logits.
struct TokenLoss {
  Shape s;
  RouterRule rule;
  const int32_t* experts;
  std::vector<double> d_weights, load;
  double balance_factor, z_factor;

  double operator()(const std::vector<double>& l) const {
    const std::vector<double> p = scores_of(l.data(), s.E, rule.score), w = weights_of(p, experts, s.k, rule);
    const double sum = rule.score == RouterScore::kSigmoid ? std::accumulate(p.begin(), p.end(), 0.0) : 1.0;
    double loss = z_factor * std::pow(lse_of(l.data(), s.E), 2);
    for (int64_t j = 0; j < s.k; ++j) loss += d_weights[j] * w[j];
    for (int64_t e = 0; e < s.E; ++e) loss += balance_factor * load[e] * p[e] / sum;
    return loss;
  }
};

TEST_CASE("route_backward is the gradient of weights, balance loss and z-loss", "[kernels][moe][slow]") {
  struct Factors {
    float balance, z;
  };
  for (Device* device : devices()) {
    for (const Shape& s :
         {Shape{1, 1, 1}, {5, 2, 2}, {17, 8, 2}, {9, 33, 5}, {11, 64, 8}, {3, 128, 8}, {2, 300, 7}}) {
      for (const RouterRule& rule : rules_for(s)) {
        if (rule.groups > 1) continue;  // the choice is not differentiated
        for (const auto& [balance, z] :
             {Factors{0, 0}, Factors{0.01f, 0}, Factors{0, 0.003f}, Factors{-0.02f, 0.01f}}) {
          const std::vector<float> l = random_normal(s.T * s.E, 16, 1.5f);
          const std::vector<int32_t> chosen = skewed_experts(s, 17);
          const Sorted sorted(*device, s, chosen);
          const std::vector<int32_t> row_of_slot = integers(sorted.row_of_slot);
          const int64_t R = sorted.slot_of_row.view().numel();
          const std::vector<float> d_w = random_normal(R, 18);
          std::vector<float> load_values(static_cast<size_t>(2 * s.E + 1), std::nanf(""));
          for (int64_t e = 0; e < s.E; ++e) load_values[e] = static_cast<float>(philox4x32(19, 1, e)[0] % 40);
          const TestTensor logits(*device, DType::kF32, {s.T, s.E}, l), d_weights(*device, DType::kF32, {R}, d_w),
              load(*device, DType::kF32, {2 * s.E + 1}, load_values), d_l(*device, DType::kF32, {s.T, s.E}),
              again(*device, DType::kF32, {s.T, s.E}), d_l_bf16(*device, DType::kBF16, {s.T, s.E});
          for (const TestTensor* to : {&d_l, &again, &d_l_bf16}) {
            const TensorView counts = balance == 0 ? TensorView() : load;
            route_backward(*device, {.logits = logits,
                                     .experts = sorted.experts,
                                     .row_of_slot = sorted.row_of_slot,
                                     .d_row_weights = d_weights,
                                     .load = counts,
                                     .rule = rule,
                                     .balance_factor = balance,
                                     .z_factor = z,
                                     .d_logits = *to});
          }
          const std::vector<float> got = d_l.host(), rounded = d_l_bf16.host();
          int64_t wrong = 0;
          double largest = 0;
          for (int64_t t = 0; t < s.T; ++t) {
            TokenLoss loss{s, rule, chosen.data() + t * s.k, {}, as_doubles(load_values), balance, z};
            for (int64_t j = 0; j < s.k; ++j) loss.d_weights.push_back(d_w[row_of_slot[t * s.k + j]]);
            std::vector<double> at = as_doubles({l.begin() + t * s.E, l.begin() + (t + 1) * s.E});
            for (int64_t e = 0; e < s.E; ++e) {
              constexpr double kStep = 1e-4;  // errors of kStep^2 and of 1e-16 / kStep
              const double middle = at[e];
              at[e] = middle + kStep;
              const double above = loss(at);
              at[e] = middle - kStep;
              const double want = (above - loss(at)) / (2 * kStep);
              at[e] = middle;
              largest = std::max(largest, std::abs(want));
              wrong += !(std::abs(got[t * s.E + e] - want) <= 2e-6 * rule.scaling + 1e-5 * std::abs(want));
              wrong += rounded[t * s.E + e] != decode_bf16(encode_bf16(got[t * s.E + e]));
            }
          }
          CAPTURE(device->name(), s, static_cast<int>(rule.score), rule.normalize, balance, z);
          CHECK(wrong == 0);
          CHECK((s.E == 1 || largest > 1e-3));
          CHECK((d_l.bytes() == again.bytes() && d_l.guard_intact() && d_l_bf16.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("ops of a router show bad values in their own token, and take no tokens", "[kernels][moe]") {
  const Shape s{3, 8, 2};
  for (Device* device : devices()) {
    std::vector<float> l = random_normal(s.T * s.E, 20);
    l[s.E + 3] = std::nanf("");
    const Sorted sorted(*device, s, skewed_experts(s, 21));
    const TestTensor logits(*device, DType::kF32, {s.T, s.E}, l), d_l(*device, DType::kF32, {s.T, s.E}),
        d_weights(*device, DType::kF32, {expert_rows(s.T * s.k, s.E)},
                  random_normal(expert_rows(s.T * s.k, s.E), 22)),
        experts(*device, DType::kI32, {s.T, s.k}), weights(*device, DType::kF32, {s.T, s.k});
    route(*device, {.logits = logits, .experts = experts, .weights = weights});
    route_backward(*device, {.logits = logits,
                             .experts = sorted.experts,
                             .row_of_slot = sorted.row_of_slot,
                             .d_row_weights = d_weights,
                             .d_logits = d_l});
    const std::vector<float> w = weights.host(), d = d_l.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < s.T * s.k; ++i) wrong += std::isfinite(w[i]) != (i / s.k != 1);
    for (int64_t i = 0; i < s.T * s.E; ++i) wrong += std::isfinite(d[i]) != (i / s.E != 1);
    CAPTURE(device->name());
    CHECK(wrong == 0);

    const Sorted none(*device, {0, s.E, s.k}, {});
    const TestTensor no_logits(*device, DType::kF32, {0, s.E}), no_rows(*device, DType::kF32, {0, 16}),
        rows(*device, DType::kF32, {expert_rows(0, s.E), 16});
    route(*device, {.logits = no_logits, .experts = none.experts, .weights = none.weights});
    combine_rows(*device, {.rows = rows, .row_of_slot = none.row_of_slot, .out = no_rows});
    route_backward(*device, {.logits = no_logits,
                             .experts = none.experts,
                             .row_of_slot = none.row_of_slot,
                             .d_row_weights = none.row_weights,
                             .d_logits = no_logits});
    CHECK((no_logits.guard_intact() && no_rows.guard_intact()));
  }
}

TEST_CASE("ops of a router give the same bits on any number of threads", "[kernels][moe]") {
  Device& device = cpu_device();
  const Shape s{300, 24, 3};
  const int64_t R = expert_rows(s.T * s.k, s.E), d = 70;
  const std::vector<float> l = random_normal(s.T * s.E, 23), x = random_bf16(R * d, 24);
  CHECK(same_on_one_thread([&] {
    const TestTensor logits(device, DType::kF32, {s.T, s.E}, l), load(device, DType::kF32, {2 * s.E + 1});
    const Sorted sorted(device, s, skewed_experts(s, 25));
    router_load(device, {.logits = logits, .experts = sorted.experts, .load = load});
    return load.bytes();
  }));
  CHECK(same_on_one_thread([&] {
    const TestTensor rows(device, DType::kBF16, {R, d}, x), out(device, DType::kBF16, {s.T, d});
    const Sorted sorted(device, s, skewed_experts(s, 26));
    combine_rows(device, {.rows = rows, .row_of_slot = sorted.row_of_slot, .out = out});
    return out.bytes();
  }));
}

TEST_CASE("ops of a router refuse wrong arguments", "[kernels][moe]") {
  Device& device = cpu_device();
  const TestTensor logits(device, DType::kF32, {4, 6}), half(device, DType::kBF16, {4, 6}),
      experts(device, DType::kI32, {4, 2}), weights(device, DType::kF32, {4, 2}), one(device, DType::kI32, {4, 1}),
      many(device, DType::kI32, {4, 7}, std::vector<float>(28, 1 << 20)), many_weights(device, DType::kF32, {4, 7}),
      bias(device, DType::kF32, {6}), shorter(device, DType::kF32, {5});
  const auto route_error = [&](auto change) {
    Route op{.logits = logits, .experts = experts, .weights = weights};
    change(op);
    return internal_error([&] { route(device, op); });
  };
  CHECK(contains(route_error([&](auto& op) { op.logits = half; }), "route: logits is bf16"));
  CHECK(contains(route_error([&](auto& op) { op.bias = shorter; }), "route: bias is fp32 [5]"));
  CHECK(contains(route_error([&](auto& op) { op.experts = one; }), "route: weights is fp32 [4, 2]"));
  CHECK(contains(route_error([&](auto& op) { op.experts = many, op.weights = many_weights; }),
                 "route: 7 experts chosen of 6"));
  const auto groups_error = [&](int64_t groups, int64_t kept) {
    return route_error([&](auto& op) { op.rule.groups = groups, op.rule.groups_kept = kept; });
  };
  for (const auto& [groups, kept] : {std::pair{4, 1}, {6, 6}, {0, 1}, {-1, 1}}) {
    CHECK(contains(groups_error(groups, kept), "groups of 6 experts"));
  }
  for (const auto& [groups, kept] : {std::pair{2, 0}, {2, 3}, {1, 2}}) {
    CHECK(contains(groups_error(groups, kept), "groups_kept is"));
  }

  const std::vector<int32_t> chosen = {0, 1, 2, 3, 4, 5, 0, 1};
  const Sorted sorted(device, {4, 6, 2}, chosen);
  const int64_t R = expert_rows(8, 6);
  const TestTensor fewer(device, DType::kI32, {R - 128}), fewer_weights(device, DType::kF32, {R - 128}),
      outside(device, DType::kI32, {4, 2}, {0, 1, 2, 3, 4, 6, 0, 1}), codes(device, DType::kE4M3, {4, 16}),
      rows(device, DType::kF32, {R, 16}), code_rows(device, DType::kE4M3, {R, 16}), x(device, DType::kF32, {4, 16}),
      x_t(device, DType::kF32, {16, 4}), out_t(device, DType::kF32, {16, R}), load(device, DType::kF32, {5});
  const auto sort_error = [&](auto change) {
    SortByExpert op = sorted.op();
    change(op);
    return internal_error([&] { sort_by_expert(device, op); });
  };
  CHECK(
      contains(sort_error([&](auto& op) { op.weights = many_weights; }), "sort_by_expert: weights is fp32 [4, 7]"));
  CHECK(contains(sort_error([&](auto& op) { op.offsets = op.counts; }), "sort_by_expert: offsets is int32 [6]"));
  CHECK(contains(sort_error([&](auto& op) { op.slot_of_row = fewer, op.row_weights = fewer_weights; }),
                 "sort_by_expert: slot_of_row has"));
  CHECK(contains(sort_error([&](auto& op) { op.experts = outside; }), "sort_by_expert: index 6"));

  const auto gather_error = [&](int64_t slots_per_token, const TensorView& from, const TensorView& to,
                                const TensorView& from_t = {}, const TensorView& to_t = {}) {
    const GatherTokens op{sorted.slot_of_row, slots_per_token, from, to, from_t, to_t};
    return internal_error([&] { gather_tokens(device, op); });
  };
  CHECK(contains(gather_error(0, x, rows), "gather_tokens: slots_per_token is 0"));
  CHECK(contains(gather_error(2, x, {}), "gather_tokens: neither out nor out_t"));
  CHECK(contains(gather_error(2, codes, rows), "gather_tokens: out is fp32"));
  CHECK(contains(gather_error(2, {}, rows), "gather_tokens: x"));
  CHECK(contains(gather_error(2, {}, {}, x_t, out_t), "gather_tokens: x_t is fp32"));
  CHECK(contains(gather_error(1, x, rows), "gather_tokens: index"));

  const auto combine_error = [&](const TensorView& from, const TensorView& row_of_slot, const TensorView& out) {
    return internal_error([&] { combine_rows(device, {.rows = from, .row_of_slot = row_of_slot, .out = out}); });
  };
  CHECK(contains(combine_error(code_rows, sorted.row_of_slot, x), "combine_rows: rows is e4m3"));
  CHECK(contains(combine_error(rows, many, x), "combine_rows: index"));
  CHECK(contains(combine_error(rows, sorted.row_of_slot, x_t), "combine_rows: row_of_slot"));

  const auto load_error = [&](const TensorView& to) {
    return internal_error([&] { router_load(device, {.logits = logits, .experts = experts, .load = to}); });
  };
  CHECK(contains(load_error(load), "router_load: load is fp32 [5]"));

  const auto backward_error = [&](auto change) {
    RouteBackward op{.logits = logits,
                     .experts = sorted.experts,
                     .row_of_slot = sorted.row_of_slot,
                     .d_row_weights = sorted.row_weights,
                     .d_logits = half};
    change(op);
    return internal_error([&] { route_backward(device, op); });
  };
  CHECK(contains(backward_error([&](auto& op) { op.d_row_weights = fewer_weights; }),
                 "route_backward: d_row_weights has"));
  CHECK(contains(backward_error([&](auto& op) { op.balance_factor = 1; }), "route_backward: balance_factor is 1"));
  CHECK(contains(backward_error([&](auto& op) { op.load = load; }), "route_backward: load is fp32 [5]"));
  CHECK(contains(backward_error([&](auto& op) { op.d_logits = experts; }), "route_backward: d_logits is int32"));
  CHECK(contains(backward_error([&](auto& op) { op.experts = outside; }), "route_backward: index 6"));
}

}  // namespace
