#include "optim/rules/muon.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/optimizer/grad_norm.h"
#include "kernels/ops/optimizer/muon.h"
#include "optim/rules/update_rule.h"

namespace parka {
namespace {

constexpr double kMomentum = 0.95;  // of every published recipe
// Elements of the matrices that are orthogonalized at a time, if there are as many of one shape: products of small
// ones alone would leave most of a GPU idle.
constexpr int64_t kBatchElements = int64_t{1} << 26;
// Rows of a symmetric matrix from which computing it in halves is faster whatever the batch
// (docs/kernels/newton_schulz.md). A choice by the batch would have ranks, which own different numbers of matrices,
// differ in bits.
constexpr int64_t kLeastRowsInHalves = 4096;

// The rows of a parameter's matrices.
std::vector<int64_t> matrix_rows(const ParameterInfo& p) {
  return p.fused_rows.empty() ? std::vector<int64_t>{p.rows} : p.fused_rows;
}

// Multiply-adds of an orthogonalization, up to a factor: r^2 s of each matrix.
double cost_of(const ParameterInfo& p) {
  double cost = 0;
  for (const int64_t rows : matrix_rows(p)) {
    cost += static_cast<double>(rows * p.cols) * static_cast<double>(std::min(rows, p.cols));
  }
  return cost;
}

// The RMS of AdamW's updates is about 0.2, and that of an orthogonal matrix 1 / sqrt(max(m, n)).
double update_scale(int64_t m, int64_t n) { return 0.2 * std::sqrt(static_cast<double>(std::max(m, n))); }

// True if its matrices have one shape, so that those of several such parameters can be one batch.
bool are_alike(const ParameterInfo& p) {
  return std::ranges::all_of(p.fused_rows, [&](int64_t rows) { return rows == p.fused_rows[0]; });
}

}  // namespace

MatrixUpdates::MatrixUpdates(const OptimizerConfig& config, const std::vector<ParameterInfo>& parameters,
                             MemoryPlan& plan, PhaseMask phases)
    : config_(config), parameters_(parameters) {
  using Shape = std::tuple<int, Peers, int64_t, int64_t, std::vector<int64_t>>;
  std::map<Shape, std::vector<size_t>> alike;
  std::vector<Shape> order;
  std::map<Peers, std::vector<double>> costs;  // of each rank
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    if (!p.trainable || rule_of(config_, p) != UpdateRule::kMuon) continue;
    costs[p.placement.peers()].resize(static_cast<size_t>(p.placement.states.size));
    // Gradients that are released are those of one unit at a time.
    const Shape shape = {config_.release_gradients ? p.unit : 0, p.placement.peers(), p.rows, p.cols, p.fused_rows};
    if (!alike.contains(shape)) order.push_back(shape);
    alike[shape].push_back(i);
  }
  // The most expensive ones first, so that what is left over evens the ranks out.
  std::ranges::stable_sort(order, std::greater(),
                           [&](const Shape& s) { return cost_of(parameters_[alike[s][0]]); });
  for (const Shape& shape : order) add_groups(std::move(alike[shape]), costs[std::get<Peers>(shape)]);

  int64_t elements = 0, squares = 0;
  bool any_divided = false;
  for (const UpdateGroup& group : groups_) {
    const ParameterInfo& p = first_of(group);
    const auto rows = static_cast<int64_t>(group.owned.size()) / p.placement.states.size;
    any_divided |= p.placement.states.size > 1;
    elements = std::max(elements, rows * p.placement.states.padded(p.numel()));
    for (const int64_t m : matrix_rows(p)) {
      const int64_t r = std::min(m, p.cols), most = are_alike(p) ? rows * (p.rows / m) : 1;
      squares = std::max(squares, r * r * most);
    }
  }
  const auto add = [&](const char* name, int64_t count) {
    return plan.add("orthogonalization", name, DType::kBF16, {count}, phases);
  };
  if (elements == 0) return;
  pieces_id_ = add("directions", elements);
  if (any_divided) whole_id_ = add("whole_directions", elements);
  other_id_ = add("next_directions", elements);
  gram_id_ = add("gram", squares);
  polynomial_id_ = add("polynomial", squares);
}

// Rows of one parameter for each rank; the last row's go to those with the least to do.
void MatrixUpdates::add_groups(std::vector<size_t> alike, std::vector<double>& costs) {
  const ParameterInfo& p = parameters_[alike[0]];
  const size_t ranks = costs.size(),
               most_rows = static_cast<size_t>(std::max<int64_t>(1, kBatchElements / p.numel()));
  for (size_t first = 0; first < alike.size(); first += most_rows * ranks) {
    const size_t end = std::min(alike.size(), first + most_rows * ranks);
    UpdateGroup& group = groups_.emplace_back();
    group.unit = parameters_[alike[first]].unit;
    group.peers = p.placement.peers();
    for (size_t row = first; row < end; row += ranks) {
      std::vector<size_t> places(ranks);
      std::iota(places.begin(), places.end(), size_t{0});
      std::ranges::stable_sort(places, {}, [&](size_t place) { return costs[place]; });
      std::vector<size_t> owned(ranks, UpdateGroup::kNone);
      for (size_t i = row; i < std::min(end, row + ranks); ++i) {
        owned[places[i - row]] = alike[i];
        costs[places[i - row]] += cost_of(p);
        if (parameters_[alike[i]].own_elements().size() > 0) group.parameters.push_back(alike[i]);
      }
      group.owned.insert(group.owned.end(), owned.begin(), owned.end());
    }
  }
}

const ParameterInfo& MatrixUpdates::first_of(const UpdateGroup& group) const {
  return parameters_[*std::ranges::find_if(group.owned, [](size_t i) { return i != UpdateGroup::kNone; })];
}

void MatrixUpdates::bind(const Arena& arena) {
  if (!pieces_id_.valid()) return;
  sums_ = arena[sums_id_];
  vectors_ = arena[vectors_id_];
  pieces_ = arena[pieces_id_];
  if (whole_id_.valid()) whole_ = arena[whole_id_];
  other_ = arena[other_id_];
  gram_ = arena[gram_id_];
  polynomial_ = arena[polynomial_id_];
}

MatrixUpdates::Directions MatrixUpdates::directions(const UpdateGroup& group) const {
  const ParameterInfo& p = first_of(group);
  const Shard& states = p.placement.states;
  const int64_t rows = static_cast<int64_t>(group.owned.size()) / states.size, piece = states.piece(p.numel());
  const auto shaped = [&](const TensorView& buffer) {
    return buffer.rows(0, rows * states.size * piece).reshaped({rows, states.size, piece});
  };
  return {shaped(pieces_), shaped(states.size > 1 ? whole_ : pieces_)};
}

TensorView MatrixUpdates::direction(const UpdateGroup& group, size_t parameter) const {
  const ParameterInfo& p = parameters_[parameter];
  const auto slot = std::ranges::find(group.owned, parameter) - group.owned.begin();
  return pieces_.rows(slot * p.placement.states.piece(p.numel()), p.own_elements().size());
}

void MatrixUpdates::orthogonalize(Device& device, const UpdateGroup& group) const {
  const ParameterInfo& p = first_of(group);
  const Shard& states = p.placement.states;
  const auto ranks = static_cast<size_t>(states.size), place = static_cast<size_t>(states.rank);
  const int64_t numel = p.numel(), padded = states.padded(numel);
  const TensorView whole = ranks > 1 ? whole_ : pieces_;
  // The last row alone may have none for this rank.
  int64_t rows = static_cast<int64_t>(group.owned.size() / ranks);
  if (group.owned[static_cast<size_t>(rows - 1) * ranks + place] == UpdateGroup::kNone) --rows;
  if (rows > 0 && are_alike(p) && padded == numel) {
    const int64_t m = matrix_rows(p)[0];
    orthogonalize(device, whole.rows(0, rows * numel).reshaped({rows * p.rows / m, m, p.cols}));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    int64_t begin = row * padded;
    for (const int64_t m : matrix_rows(p)) {
      orthogonalize(device, whole.rows(begin, m * p.cols).reshaped({1, m, p.cols}));
      begin += m * p.cols;
    }
  }
}

void MatrixUpdates::orthogonalize(Device& device, const TensorView& matrices) const {
  const int64_t count = matrices.dim[0], m = matrices.dim[1], n = matrices.dim[2], r = std::min(m, n);
  const auto given = newton_schulz_steps(config_.orthogonalization);
  std::vector<NewtonSchulzStep> steps(given.begin(), given.end());
  const auto scale = static_cast<float>(update_scale(m, n));
  for (float* const factor : {&steps.back().a, &steps.back().b, &steps.back().c}) *factor *= scale;
  const auto square = [&](const TensorView& buffer) {
    return buffer.rows(0, count * r * r).reshaped({count, r, r});
  };
  parka::orthogonalize(device, {.matrices = matrices,
                                .other = other_.rows(0, matrices.numel()).reshaped({count, m, n}),
                                .gram = square(gram_),
                                .polynomial = square(polynomial_),
                                .steps = steps,
                                .safety = orthogonalization_safety(config_.orthogonalization),
                                .in_halves = r >= kLeastRowsInHalves});
}

double MatrixUpdates::Matrix::rms(const float* sums) const {
  return std::sqrt(double{sums[0]} / static_cast<double>(m * n));
}

double MatrixUpdates::Matrix::singular_value(const float* sums) const {
  return std::sqrt(double{sums[2]} / double{sums[1]}) / update_scale(m, n);
}

void MatrixUpdates::declare_telemetry(MemoryPlan& plan) {
  int64_t longest = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    if (!p.trainable || rule_of(config_, p) != UpdateRule::kMuon) continue;
    for (int64_t place = 0; place < p.placement.expert_places; ++place) {
      for (const int64_t m : matrix_rows(p)) measured_.push_back({i, m, p.cols});
    }
    longest = std::max({longest, p.rows, p.cols});
  }
  if (measured_.empty()) return;
  sums_id_ = plan.add("telemetry", "update_sums", DType::kF32, {std::ssize(measured_), kSums});
  vectors_id_ =
      plan.add("telemetry", "update_vectors", DType::kBF16, {3, ceil_div(longest, kMomentGroup) * kMomentGroup});
}

// The power method begins with a vector of random signs, which no matrix is orthogonal to.
void MatrixUpdates::begin_telemetry(Device& device, bool measures) {
  measures_ = measures && !sums_.empty();
  if (!measures_) return;
  device.fill_zero(sums_.data, sums_.bytes());
  std::vector<BFloat16> signs(static_cast<size_t>(vectors_.dim[1]));
  for (size_t i = 0; i < signs.size(); ++i) signs[i] = encode_bf16(philox4x32(0, 0, i)[0] % 2 == 0 ? 1.0f : -1.0f);
  device.copy_to_device(vectors_.data, signs.data(), vectors_.rows(0, 1).bytes());
}

void MatrixUpdates::measure(Device& device, const UpdateGroup& group, bool count_whole) const {
  if (!measures_) return;
  const Directions d = directions(group);
  const Shard& states = first_of(group).placement.states;
  for (int64_t row = 0; row < d.whole.dim[0]; ++row) {
    const size_t i = group.owned[static_cast<size_t>(row * states.size + states.rank)];
    if (i == UpdateGroup::kNone) continue;
    const ParameterInfo& p = parameters_[i];
    if (!count_whole && states.size == 1 && !p.placement.is_by_expert()) continue;
    const auto first = std::ranges::lower_bound(measured_, i, {}, &Matrix::parameter) - measured_.begin();
    int64_t at = first + p.placement.expert_place * std::ssize(matrix_rows(p)), begin = 0;
    const TensorView parameter = d.whole.rows(row, 1).reshaped({d.whole.numel() / d.whole.dim[0]});
    for (const int64_t m : matrix_rows(p)) {
      measure(device, parameter.rows(begin, m * p.cols).reshaped({m, p.cols}),
              sums_.rows(at++, 1).reshaped({kSums}));
      begin += m * p.cols;
    }
  }
}

// Two steps of the power method, u = O v and v = O^T u: |v| / |u| is at most the largest singular value.
void MatrixUpdates::measure(Device& device, const TensorView& matrix, const TensorView& sums) const {
  const auto vector = [&](int64_t i, int64_t count) {
    return vectors_.rows(i, 1).reshaped({vectors_.dim[1]}).rows(0, count).reshaped({1, count});
  };
  const TensorView signs = vector(0, matrix.dim[1]), u = vector(1, matrix.dim[0]), v = vector(2, matrix.dim[1]);
  for (const TensorView& from : {signs, v}) {
    gemm(device, {.a = from, .b = matrix, .out = u});
    gemm(device, {.a = u, .b = matrix, .b_transposed = true, .out = v});
  }
  sum_of_squares(device, {.parts = {matrix, u, v}, .partial = sums.rows(0, 3), .result = sums.rows(3, 1)});
}

void muon_momentum(Device& device, const RuleStep& s, const TensorView& direction) {
  parka::muon_momentum(device, {.gradient = s.gradient,
                                .momentum = s.part.states[0],
                                .mu = kMomentum,
                                .grad_scale = s.grad_scale,
                                .direction = direction});
}

void muon(Device& device, const RuleStep& s, const TensorView& direction) {
  muon_step(device, {.weight = s.part.weight,
                     .master = s.part.master,
                     .master_form = s.config.master,
                     .direction = direction,
                     .lr = static_cast<float>(s.update.lr * s.parameter.lr_factor),
                     .weight_decay = s.parameter.decayed ? static_cast<float>(s.config.weight_decay) : 0.0f,
                     .grad_scale = s.grad_scale,
                     .weight_amax = s.weight_amax,
                     .seed = s.update.seed,
                     .step = static_cast<uint64_t>(s.update.step),
                     .first_element = s.first_element()});
}

}  // namespace parka
