#include "engine/step/telemetry.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace parka {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();  // null in a record

// Rounds a number for a record: more digits would be noise. Numbers that are not finite become null.
double rounded(double x) { return std::isfinite(x) ? std::stod(fmt::format("{:.5g}", x)) : x; }

// One tensor of all blocks, with nulls for those that have none: gradients where no block below is trained.
ordered_json tensor_record(const std::vector<QuantizationTotals>& tensors, QuantizedTensor which) {
  ordered_json record;
  bool is_quantized = false, has_scale = false;
  for (size_t i = static_cast<size_t>(which); i < tensors.size(); i += kNumQuantizedTensors) {
    is_quantized = is_quantized || tensors[i].elements != 0;
    has_scale = has_scale || tensors[i].scale != 0;
  }
  if (!is_quantized) return record;
  for (size_t i = static_cast<size_t>(which); i < tensors.size(); i += kNumQuantizedTensors) {
    const QuantizationTotals& t = tensors[i];
    if (t.elements == 0) {
      for (const char* key : {"error", "saturated", "underflowed", "not_finite", "amax"})
        record[key].push_back(nullptr);
      if (has_scale) record["scale"].push_back(nullptr);
      continue;
    }
    record["error"].push_back(rounded(double{t.error_norm} / t.norm));  // 0 / 0 for zeros: null
    record["saturated"].push_back(rounded(double{t.saturated} / t.elements));
    record["underflowed"].push_back(rounded(double{t.underflowed} / t.elements));
    record["not_finite"].push_back(rounded(double{t.not_finite} / t.elements));
    record["amax"].push_back(rounded(t.amax));
    if (t.scale != 0) record["scale"].push_back(rounded(t.scale));
  }
  return record;
}

// All blocks.
ordered_json attention_record(const std::vector<AttentionTotals>& attention) {
  ordered_json record;
  for (const AttentionTotals& t : attention) {
    record["imbalance"].push_back(rounded(imbalance(t)));
    record["gradient_share"].push_back(rounded(double{t.sum_norm} / t.norm));  // 0 / 0 for zeros: null
    record["score_rms"].push_back(rounded(double{t.score_norm} / std::sqrt(double{t.rows})));
    record["largest_score"].push_back(t.rows == 0 ? kNoNumber : rounded(t.largest_score));
    record["not_finite"].push_back(rounded(double{t.not_finite} / (double{t.rows} + t.not_finite)));
  }
  return record;
}

// "qkv" of "blocks.3.qkv"; the names of parameters outside of blocks as they are.
std::string_view kind_of(std::string_view name) {
  constexpr std::string_view kBlocks = "blocks.";
  return name.starts_with(kBlocks) ? name.substr(name.find('.', kBlocks.size()) + 1) : name;
}

// The smallest k that at least this share of all groups does not exceed; NaN without groups.
double k_quantile(const TelemetryReport::Moment& moment, double share) {
  const auto total = static_cast<double>(std::accumulate(moment.counts.begin(), moment.counts.end(), int64_t{0}));
  const double wanted = std::max(1.0, share * total);
  int64_t seen = 0;
  for (size_t exponent = 0; exponent < moment.counts.size(); ++exponent) {
    seen += moment.counts[exponent];
    if (static_cast<double>(seen) >= wanted) return static_cast<double>(exponent) / 16;
  }
  return kNoNumber;
}

double k_mean(const TelemetryReport::Moment& moment) {
  double sum = 0, total = 0;
  for (size_t exponent = 0; exponent < moment.counts.size(); ++exponent) {
    sum += static_cast<double>(moment.counts[exponent]) * static_cast<double>(exponent) / 16;
    total += moment.counts[exponent];
  }
  return sum / total;
}

// Null: of a frozen parameter.
void add_moment(const TelemetryReport::Moment* moment, ordered_json& record) {
  constexpr std::pair<const char*, double> kQuantiles[] = {
      {"min", 0.0}, {"lower_quartile", 0.25}, {"median", 0.5}, {"upper_quartile", 0.75}, {"max", 1.0}};
  for (const auto& [name, share] : kQuantiles) {
    record["k"][name].push_back(moment == nullptr ? kNoNumber : k_quantile(*moment, share));
  }
  record["k"]["mean"].push_back(moment == nullptr ? kNoNumber : rounded(k_mean(*moment)));
  const bool any = moment != nullptr && moment->largest_amax > 0;
  const double of_zeros = moment == nullptr ? kNoNumber : 0.0;
  record["amax"]["min"].push_back(any ? rounded(moment->smallest_amax) : of_zeros);
  record["amax"]["max"].push_back(any ? rounded(moment->largest_amax) : of_zeros);
}

// By kind of parameter: of those of which any is trained, in every block.
ordered_json moment_records(const std::vector<TelemetryReport::Moment>& moments, const ParameterTable& table) {
  ordered_json records = ordered_json::object();
  std::map<std::pair<size_t, std::string_view>, const TelemetryReport::Moment*> by_parameter;
  std::map<std::string, std::set<std::string>, std::less<>> names;  // of the states of each kind
  for (const TelemetryReport::Moment& moment : moments) {
    by_parameter[{moment.parameter, moment.name}] = &moment;
    names[std::string(kind_of(table.all[moment.parameter].name))].insert(moment.name);
  }
  for (size_t parameter = 0; parameter < table.all.size(); ++parameter) {
    const auto kind = names.find(kind_of(table.all[parameter].name));
    if (kind == names.end()) continue;
    for (const std::string& name : kind->second) {
      const auto found = by_parameter.find({parameter, name});
      add_moment(found == by_parameter.end() ? nullptr : found->second, records[kind->first][name]);
    }
  }
  return records;
}

// By kind of parameter: in every block a number of each of its matrices, none of a frozen one.
ordered_json update_records(const std::vector<TelemetryReport::Update>& updates, const ParameterTable& table) {
  ordered_json records = ordered_json::object();
  for (const TelemetryReport::Update& update : updates) {
    records[std::string(kind_of(table.all[update.parameter].name))] = ordered_json::object();
  }
  auto next = updates.begin();
  for (size_t i = 0; i < table.all.size(); ++i) {
    const auto record = records.find(std::string(kind_of(table.all[i].name)));
    if (record == records.end()) continue;
    ordered_json rms = ordered_json::array(), singular_values = ordered_json::array();
    for (; next != updates.end() && next->parameter == i; ++next) {
      rms.push_back(rounded(next->rms));
      singular_values.push_back(rounded(next->singular_value));
    }
    (*record)["rms"].push_back(std::move(rms));
    (*record)["singular_value"].push_back(std::move(singular_values));
  }
  return records;
}

// A fresh router may be far from balance for some tens of steps.
constexpr int kStepsOfCollapse = 50;

// The load of the busiest expert where all tokens choose it, over the mean.
double largest_load(const MoeConfig& moe) {
  return moe.exists() ? static_cast<double>(moe.num_experts) / static_cast<double>(moe.experts_per_token) : 1.0;
}

}  // namespace

ordered_json routing_record(const std::vector<ExpertUse>& blocks, int64_t step) {
  ordered_json lists, loads = ordered_json::array();
  for (const ExpertUse& block : blocks) {
    loads.push_back(ordered_json::array());
    for (const double load : block.loads) loads.back().push_back(rounded(load));
    lists["expert_load"].push_back(rounded(block.load));
    lists["idle_experts"].push_back(rounded(block.idle));
    lists["expert_entropy"].push_back(rounded(block.entropy));
  }
  return {{"kind", "routing"}, {"step", step}, {"blocks", std::move(lists)}, {"loads", std::move(loads)}};
}

double imbalance(const AttentionTotals& totals) {
  if (totals.rows == 0) return kNoNumber;
  return totals.sum_norm == 0 ? 0.0 : double{totals.sum_norm} / totals.delta_norm;
}

std::vector<ordered_json> telemetry_records(const TelemetryReport& report, int64_t step,
                                            const ParameterTable& table) {
  ordered_json tensors = ordered_json::object();
  for (const auto& [which, name] : EnumNames<QuantizedTensor>::kAll) {
    ordered_json record = tensor_record(report.tensors, which);
    if (!record.empty()) tensors[std::string(name)] = std::move(record);
  }
  ordered_json moments = moment_records(report.moments, table);
  std::vector<ordered_json> records;
  if (!tensors.empty()) {
    records.push_back({{"kind", "quantization"},
                       {"step", step},
                       {"sampled_tokens", report.tokens},
                       {"tensors", std::move(tensors)}});
  }
  if (!report.attention.empty()) {
    records.push_back({{"kind", "attention"},
                       {"step", step},
                       {"sampled_tokens", report.tokens},
                       {"blocks", attention_record(report.attention)}});
  }
  if (!moments.empty()) {
    records.push_back({{"kind", "moments"}, {"step", step}, {"parameters", std::move(moments)}});
  }
  if (!report.updates.empty()) {
    records.push_back({{"kind", "updates"}, {"step", step}, {"parameters", update_records(report.updates, table)}});
  }
  return records;
}

TelemetryReport PendingTelemetry::wait() {
  if (tensors) {
    std::memcpy(report.tensors.data(), tensors->wait(), report.tensors.size() * sizeof(QuantizationTotals));
  }
  if (attention) {
    std::memcpy(report.attention.data(), attention->wait(), report.attention.size() * sizeof(AttentionTotals));
  }
  if (counts) {
    const auto* of_moment = static_cast<const int32_t*>(counts->wait());
    const auto* range = static_cast<const float*>(amax->wait());
    for (TelemetryReport::Moment& moment : report.moments) {
      std::copy_n(of_moment, kNumMomentExponents, moment.counts.begin());
      moment.smallest_amax = range[0];
      moment.largest_amax = range[1];
      of_moment += kNumMomentExponents;
      range += 2;
    }
  }
  if (sums) {
    const auto* of_matrix = static_cast<const float*>(sums->wait());
    for (const MatrixUpdates::Matrix& matrix : matrices) {
      report.updates.push_back({matrix.parameter, matrix.rms(of_matrix), matrix.singular_value(of_matrix)});
      of_matrix += MatrixUpdates::kSums;
    }
  }
  return std::move(report);
}

Telemetry::Telemetry(const Config& config, Model& model, Optimizer& optimizer, MemoryPlan& plan)
    : interval_(config.telemetry.interval),
      tokens_(std::min(config.micro_batch_shape().num_tokens(), kTelemetryRows)) {
  model.declare_telemetry(plan);
  optimizer.matrices().declare_telemetry(plan);
  if (config.optimizer.states != StateFormat::kFp8Expanded) return;
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    for (size_t k = 0; k < optimizer.kinds(i).size(); ++k) {
      if (is_float8(optimizer.kinds(i)[k].format)) moments_.emplace_back(i, k);
    }
  }
  const auto moments = static_cast<int64_t>(moments_.size());
  counts_id_ = plan.add("telemetry", "moment_exponents", DType::kI32, {moments, kNumMomentExponents});
  amax_id_ = plan.add("telemetry", "moment_amax", DType::kF32, {moments, 2});
}

void Telemetry::bind(const Arena& arena) {
  counts_ = arena[counts_id_];
  amax_ = arena[amax_id_];
}

PendingTelemetry Telemetry::queue(Device& device, const Model& model, const Optimizer& optimizer) const {
  device.section(StepSection::kTelemetry);
  const auto read = [&](const TensorView& view) {
    return view.empty() ? nullptr : device.copy_to_host_later(view.data, view.bytes());
  };
  TelemetryReport report;
  report.tokens = tokens_;
  const TensorView tensors = model.telemetry();
  if (!tensors.empty()) report.tensors.resize(static_cast<size_t>(tensors.dim[0]));
  const TensorView attention = model.attention_telemetry();
  report.attention.resize(static_cast<size_t>(attention.dim[0]));
  for (int64_t i = 0; i < counts_.dim[0]; ++i) {
    const auto [parameter, kind] = moments_[static_cast<size_t>(i)];
    report.moments.push_back({.parameter = parameter, .name = std::string(optimizer.kinds(parameter)[kind].name)});
    moment_statistics(device, {.moment = optimizer.state(parameter, kind),
                               .counts = counts_.rows(i, 1).reshaped({kNumMomentExponents}),
                               .amax = amax_.rows(i, 1).reshaped({2})});
  }
  const MatrixUpdates& updates = optimizer.matrices();
  return {std::move(report), updates.measured(), read(tensors),       read(attention),
          read(counts_),     read(amax_),        read(updates.sums())};
}

BlockWatch BlockWatch::of_attention(const Config& config) {
  const double limit = config.model.qk_norm == QkNormKind::kNone ? 0.01 : 0.1;
  constexpr Kind kKind = {
      .about = "attention",
      .key = "imbalance",
      .raised =
          "step {}: the gradients of attention's scores do not add up to zero: imbalance {:.3g} in block {} "
          "(more than {:g}); such a run may follow a good one for long and then diverge: see docs/telemetry.md",
      .lifted = "step {}: the gradients of attention's scores add up to zero again: imbalance {:.3g} in block {}",
      .reports = 3};
  return {kKind, limit, limit / 2};
}

// `share` of the way from `equal` loads to those where all tokens choose the same experts. Never lifted.
BlockWatch BlockWatch::of_routing(const Config& config, const char* key, const char* raised, double share,
                                  double equal, double same) {
  const Kind kind = {key, key, raised, "", kStepsOfCollapse, config.optimizer.schedule.warmup_steps};
  return {kind, equal + share * (same - equal), -1};
}

BlockWatch BlockWatch::of_expert_load(const Config& config) {
  return of_routing(
      config, "expert_load",
      "step {}: routing collapses: the busiest expert has {:.3g} times the mean load in block {} (more "
      "than {:.3g}); raise training.balance_loss, or training.router_bias_rate with model.moe.correction_bias: see "
      "docs/moe.md",
      0.5, 1, largest_load(config.model.moe));
}

BlockWatch BlockWatch::of_idle_experts(const Config& config) {
  return of_routing(
      config, "idle_experts",
      "step {}: routing collapses: a share {:.3g} of the experts has no token in block {} (more than "
      "{:.3g}); raise training.balance_loss, or training.router_bias_rate with model.moe.correction_bias: "
      "see docs/moe.md",
      0.25, 0, 1 - 1 / largest_load(config.model.moe));
}

std::optional<Warning> BlockWatch::add(std::span<const double> blocks, int64_t step) {
  const auto largest = std::ranges::max_element(blocks, {}, [](double x) { return std::isnan(x) ? -1.0 : x; });
  if (step <= kind_.warmup_steps || largest == blocks.end() || std::isnan(*largest)) return std::nullopt;
  const bool speaks_for = raised_ ? *largest < lifted_below_ : *largest > raised_above_;
  in_a_row_ = speaks_for ? in_a_row_ + 1 : 0;
  if (in_a_row_ < kind_.reports) return std::nullopt;
  in_a_row_ = 0;
  raised_ = !raised_;
  const int64_t block = largest - blocks.begin();
  return Warning{
      raised_,
      {{"kind", "warning"},
       {"step", step},
       {"about", kind_.about},
       {"raised", raised_},
       {"block", block},
       {kind_.key, *largest},
       {"limit", raised_above_}},
      fmt::format(fmt::runtime(raised_ ? kind_.raised : kind_.lifted), step, *largest, block, raised_above_)};
}

}  // namespace parka
