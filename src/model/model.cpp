#include "model/model.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/elementwise/embedding.h"
#include "kernels/ops/optimizer/grad_norm.h"
#include "model/pass.h"

namespace parka {
namespace {

// The precision that evaluation = bf16 runs in: the compute format everywhere.
PrecisionConfig plain_precision(const PrecisionConfig& training) {
  PrecisionConfig plain;
  plain.compute = training.compute;
  return plain;
}

// Tables of a stack's positions, [S, D] fp32.
template <typename Ids>
Ids declare_rotations(const ModelConfig& model, int64_t sequence_length, const std::string& prefix,
                      MemoryPlan& plan) {
  const std::vector<int64_t> shape = {sequence_length, model.head_dim()};
  Ids ids;
  ids.full = plan.add("tables", prefix + "cos_sin", DType::kF32, shape);
  if (model.has_windowed_rotations()) {
    ids.windowed = plan.add("tables", prefix + "windowed_cos_sin", DType::kF32, shape);
  }
  return ids;
}

using Purpose = BufferScope::Purpose;

Purpose purpose_of_blocks(const ParameterTable& table, Purpose purpose) {
  return table.side.exists() && purpose == Purpose::kTraining ? Purpose::kForwardOnly : purpose;
}

}  // namespace

Model::Model(const ModelConfig& config, const PrecisionConfig& precision, bool decay_embeddings,
             const BatchShape& shape, int64_t logits_chunk_tokens, Use use, const Zero& zero, MemoryPlan& plan,
             const ParameterRules& rules)
    : config_(config),
      max_shape_(shape),
      table_(make_parameter_table(config, decay_embeddings, rules)
                 .placed(zero, use == Use::kTraining && precision.offload_weights ? MemoryPlace::kHost
                                                                                  : MemoryPlace::kDevice)),
      weights_(table_, Formats(precision), {kept_copies(precision, zero, rules.base), table_.first_backward_unit()},
               use == Use::kInference ? WeightUse::kForward : training_use(precision), plan) {
  rotations_ = declare_rotations<RotaryIds>(config, shape.whole_length(), "", plan);
  if (table_.side.exists()) {
    side_rotations_ =
        declare_rotations<RotaryIds>(side_stack(config, table_.side), shape.whole_length(), kSide, plan);
  }
  if (use == Use::kTraining) {
    training_ = std::make_unique<Pass>(config, precision, table_, shape, logits_chunk_tokens,
                                       BufferScope::Purpose::kTraining, plan);
  }
  const bool plain_evaluation = precision.eval == EvalNumerics::kBf16 && precision.has_fp8();
  if (plain_evaluation || use == Use::kInference) {
    evaluation_ = std::make_unique<Pass>(config, plain_evaluation ? plain_precision(precision) : precision, table_,
                                         shape, logits_chunk_tokens, BufferScope::Purpose::kEvaluation, plan);
  }
}

Model::~Model() = default;

void Model::declare_telemetry(MemoryPlan& plan) {
  PARKA_REQUIRE(training_ != nullptr && !with_telemetry_);
  training_->declare_telemetry(plan);
  with_telemetry_ = true;
}

void Model::bind(Device& device, const Arena& arena) {
  weights_.bind(arena);
  const auto filled = [&](TensorId id, double theta, const RopeScaling& scaling) {
    const TensorView table = arena[id];
    if (device.op_recorder() != nullptr) return table;  // a recording's memory is never read
    const std::vector<float> values = rope_table(table.dim[0], table.dim[1], theta, scaling);
    device.copy_to_device(table.data, values.data(), table.bytes());
    device.synchronize();  // `values` ends here
    return table;
  };
  const auto both = [&](const RotaryIds& ids) {
    Pass::RotaryTables tables;
    if (!ids.full.valid()) return tables;
    tables.full = tables.windowed = filled(ids.full, config_.rope_theta, config_.rope_scaling);
    if (ids.windowed.valid()) tables.windowed = filled(ids.windowed, config_.windowed_rope_theta(), {});
    return tables;
  };
  const Pass::RotaryTables tables = both(rotations_), side_tables = both(side_rotations_);
  if (training_) training_->bind(device, arena, weights_, tables, side_tables);
  if (with_telemetry_) training_->bind_telemetry(device);
  if (evaluation_) evaluation_->bind(device, arena, weights_, tables, side_tables);
}

void Model::set_hooks(UnitHooks* hooks) {
  if (training_) training_->set_hooks(hooks);
  if (evaluation_) evaluation_->set_hooks(hooks);
}

void Model::set_context(PeerExchange* context) {
  if (training_) training_->set_context(context);
  if (evaluation_) evaluation_->set_context(context);
}

void Model::set_experts(PeerExchange* experts) {
  if (training_) training_->set_experts(experts);
  if (evaluation_) evaluation_->set_experts(experts);
}

void Model::accumulate_gradients(Device& device, const Batch& batch, const LossOptions& options,
                                 const std::vector<TensorView>& gradients, Accumulation accumulation,
                                 Queueing queueing) {
  PARKA_REQUIRE(training_ != nullptr && gradients.size() == table_.all.size());
  StepContext step = training_->load(device, batch, /*keep=*/true);
  step.gradients = &gradients;
  step.accumulation = accumulation;
  step.router_losses = options.router;
  losses_ = training_->head().losses(step);
  if (queueing == Queueing::kWithTelemetry) {
    PARKA_REQUIRE(with_telemetry_);
    training_->start_sampling(step);
  }
  const auto work = [&] {
    training_->forward(step);
    training_->loss_and_backward(step, options);
  };
  if (queueing != Queueing::kMayReplay || training_->stack().offload().moves_blocks()) {
    work();
    return;
  }
  RecordedWith arguments{
      batch.shape, options.grad_scale, options.z_loss, options.grad_factor.data, options.sums.data,
      {},          options.router};
  for (const TensorView& gradient : gradients) arguments.gradients.push_back(gradient.data);
  if (recorded_with_ != arguments) {
    recordings_.clear();
    recorded_with_ = std::move(arguments);
  }
  device.replay(recordings_[accumulation], work);
}

int64_t Model::expert_places() const {
  int64_t most = 1;
  for (const ParameterInfo& p : table_.all) most = std::max(most, p.placement.expert_places);
  return most;
}

int64_t Model::num_sums() const {
  const RouterLoads routers(config_);
  return 1 + routers.num_blocks * routers.columns();
}

std::vector<StepScalar> Model::scalars(const std::vector<float>& sums, int64_t num_targets) const {
  std::vector<StepScalar> scalars = {
      {"loss", num_targets == 0 ? 0.0 : double{sums.front()} / static_cast<double>(num_targets)}};
  if (!config_.moe.exists()) return scalars;
  constexpr std::pair<const char*, double ExpertUse::*> kMeans[] = {{"expert_load", &ExpertUse::load},
                                                                    {"idle_experts", &ExpertUse::idle},
                                                                    {"expert_entropy", &ExpertUse::entropy},
                                                                    {"balance_loss", &ExpertUse::balance_loss},
                                                                    {"router_z_loss", &ExpertUse::z_loss}};
  const std::vector<ExpertUse> blocks = expert_use(sums);
  const auto with_experts = std::span(blocks).subspan(static_cast<size_t>(config_.moe.dense_layers));
  const auto add_mean = [&](const char* name, double ExpertUse::*number) {
    double sum = 0;
    for (const ExpertUse& block : with_experts) sum += block.*number;
    scalars.push_back({name, sum / static_cast<double>(with_experts.size())});
  };
  for (const auto& [name, number] : kMeans) add_mean(name, number);
  if (expert_places() > 1) add_mean("rank_load", &ExpertUse::rank_load);
  return scalars;
}

std::vector<ExpertUse> Model::expert_use(const std::vector<float>& sums) const {
  return RouterLoads(config_).of_blocks(std::span(sums).subspan(1), config_.moe, expert_places());
}

int64_t Model::host_bytes(const MemoryPlan& plan) const {
  return training_ != nullptr ? training_->stack().offload().host_bytes(plan) : 0;
}

TensorView Model::telemetry() const { return with_telemetry_ ? training_->telemetry().statistics() : TensorView(); }

TensorView Model::attention_telemetry() const {
  return with_telemetry_ ? training_->telemetry().attention() : TensorView();
}

void Model::evaluate(Device& device, const Batch& batch) {
  const Pass& pass = evaluating();
  const StepContext step = pass.load(device, batch, /*keep=*/false);
  pass.forward(step);
  pass.head().loss(step);
  losses_ = pass.head().losses(step);
}

std::vector<float> Model::losses(Device& device) const {
  PARKA_REQUIRE(!losses_.empty());
  std::vector<float> host(static_cast<size_t>(losses_.numel()));
  device.copy_to_host(host.data(), losses_.data, losses_.bytes());
  return host;
}

std::vector<float> Model::logits(Device& device, const Batch& batch, int64_t first_row, int64_t count) {
  const Pass& pass = evaluating();
  const StepContext step = pass.load(device, batch, /*keep=*/false);
  pass.forward(step);
  return read_logits(pass, step, first_row, count);
}

std::vector<float> Model::read_logits(const Pass& pass, const StepContext& step, int64_t first_row,
                                      int64_t count) const {
  std::vector<float> result(static_cast<size_t>(count * config_.vocab_size));
  for (int64_t done = 0; done < count;) {
    const int64_t rows = std::min(pass.head().max_rows(), count - done);
    const TensorView part = pass.head().logits(step, first_row + done, rows);
    std::vector<std::byte> host(static_cast<size_t>(part.bytes()));
    step.device.copy_to_host(host.data(), part.data, part.bytes());
    const int64_t stride = part.dim[1];  // not less than the vocabulary
    for (int64_t row = 0; row < rows; ++row) {
      float* const to = result.data() + (done + row) * config_.vocab_size;
      const std::byte* const from = host.data() + row * stride * size_of(part.dtype);
      if (part.dtype == DType::kF32) {
        std::memcpy(to, from, static_cast<size_t>(config_.vocab_size) * sizeof(float));
      } else {
        const auto* elements = reinterpret_cast<const BFloat16*>(from);
        for (int64_t v = 0; v < config_.vocab_size; ++v) to[v] = decode_bf16(elements[v]);
      }
    }
    done += rows;
  }
  return result;
}

Model::Pass::Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
                  const BatchShape& shape, int64_t logits_chunk_tokens, BufferScope::Purpose purpose,
                  MemoryPlan& plan)
    : Pass(model, precision, table, shape, logits_chunk_tokens,
           Scopes{BufferScope(precision, shape, purpose, plan),
                  BufferScope(precision, shape, purpose_of_blocks(table, purpose), plan)}) {}

Model::Pass::Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
                  const BatchShape& shape, int64_t logits_chunk_tokens, Scopes&& scopes)
    : precision_(precision),
      table_(table),
      max_shape_(shape),
      window_(model.sliding_window),
      head_unit_(table.head_unit()),
      first_trained_unit_(table.first_trained_unit),
      stack_(model, table, kDecoder, table.block_unit(0), scopes.blocks),
      embedding_(model, table, scopes.own),
      head_(model, table, logits_chunk_tokens, scopes.own) {
  sample_needs_ = scopes.blocks.sample_needs();
  BufferScope& scope = scopes.own;
  if (model.vision.exists() && shape.images_per_sequence > 0) images_.emplace(model, table, scope);
  if (table.side.exists()) side_.emplace(model, table, scope);
  if (shape.separate_documents) first_keys_ = scope.batch("first_keys", DType::kI32, {shape.num_whole_tokens()});
  if (window_ > 0 && window_ < shape.whole_length()) {
    windowed_first_keys_ = scope.batch("windowed_first_keys", DType::kI32, {shape.num_whole_tokens()});
  }
  if (table.lora.dropout > 0 && scope.has_backward()) {
    dropout_position_ = scope.batch("dropout_position", DType::kI32, {3});
  }
}

void Model::Pass::bind(Device& device, const Arena& arena, const ModelWeights& weights, const RotaryTables& tables,
                       const RotaryTables& side_tables) {
  stack_.bind(device, arena);
  if (images_) images_->bind(device, arena);
  arena_ = &arena;
  weights_ = &weights;
  tables_ = tables;
  side_tables_ = side_tables;
}

Positions Model::Pass::positions(const TensorView& table, const TensorView& first_keys,
                                 const BatchShape& shape) const {
  const int64_t S = shape.sequence_length;
  if (shape.context_size == 1) return {.rotations = table.rows(0, S), .first_keys = first_keys};
  return {table.rows(context_->place() * S, S), table.rows(0, shape.whole_length()), first_keys};
}

StepContext Model::Pass::load(Device& device, const Batch& batch, bool keep) const {
  const BatchShape& shape = batch.shape;
  PARKA_REQUIRE(shape.num_tokens() <= max_shape_.num_tokens() &&
                shape.sequence_length <= max_shape_.sequence_length);
  PARKA_REQUIRE((batch.first_keys != nullptr) == shape.separate_documents);
  PARKA_REQUIRE(shape.context_size == max_shape_.context_size);
  PARKA_REQUIRE(shape.context_size == 1 || (context_ != nullptr && shape.padding == 0));
  PARKA_REQUIRE(shape.num_images() <= max_shape_.num_images());
  PARKA_REQUIRE(!keep || !images_ || shape.num_images() > 0);  // all gradients are written
  StepContext step{.device = device, .arena = *arena_, .weights = *weights_, .hooks = hooks_};
  step.shape = shape;
  if (shape.context_size > 1) step.context = context_;
  step.experts = experts_;
  step.keep = keep;
  PARKA_REQUIRE(!shape.separate_documents || max_shape_.separate_documents);
  load_first_keys(step, batch.first_keys);
  step.positions = positions(tables_.full, step.positions.first_keys, shape);
  step.windowed_positions = positions(tables_.windowed, step.windowed_positions.first_keys, shape);
  if (side_) {
    step.side_positions = positions(side_tables_.full, step.positions.first_keys, shape);
    step.side_windowed_positions = positions(side_tables_.windowed, step.windowed_positions.first_keys, shape);
  }
  if (keep && dropout_position_.valid()) step.dropout_position = (*arena_)[dropout_position_];
  if (device.op_recorder() != nullptr) return step;  // its memory is never read
  if (!step.dropout_position.empty()) {
    const int32_t position[] = {batch.place.step, batch.place.first_sequence, batch.place.stride};
    device.copy_to_device(step.dropout_position.data, position, sizeof(position));
  }
  load_tokens(step, batch);
  head_.load(step, batch.targets);
  return step;
}

// The ids of tokens in whose place are rows of images belong to no embedding.
void Model::Pass::load_tokens(const StepContext& step, const Batch& batch) const {
  if (step.shape.num_images() == 0) {
    embedding_.load(step, batch.tokens);
    return;
  }
  std::vector<int32_t> tokens(batch.tokens, batch.tokens + step.num_tokens());
  for (int64_t i = 0; i < step.shape.num_images() * images_->num_slots(); ++i) {
    if (batch.image_positions[i] >= 0) tokens.at(static_cast<size_t>(batch.image_positions[i])) = kImageSlot;
  }
  embedding_.load(step, tokens.data());
  images_->load(step, batch.pixels, batch.image_positions);
}

// Windows that are not shorter than the sequences leave what documents do, for which attention is faster.
void Model::Pass::load_first_keys(StepContext& step, const int32_t* of_documents) const {
  const int64_t T = step.shape.num_whole_tokens(), S = step.shape.whole_length();
  const bool is_recorded = step.device.op_recorder() != nullptr;
  TensorView &full = step.positions.first_keys, &windowed = step.windowed_positions.first_keys;
  if (of_documents != nullptr) {
    full = step.vector(first_keys_, T);
    if (!is_recorded) step.device.copy_to_device(full.data, of_documents, full.bytes());
  }
  if (window_ == 0 || window_ >= S) {
    windowed = full;
    return;
  }
  windowed = step.vector(windowed_first_keys_, T);
  if (is_recorded) return;
  std::vector<int32_t> first_keys(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const auto of_window = static_cast<int32_t>(std::max<int64_t>(t % S - window_ + 1, 0));
    first_keys[t] = of_documents == nullptr ? of_window : std::max(of_window, of_documents[t]);
  }
  step.device.copy_to_device(windowed.data, first_keys.data(), windowed.bytes());
}

void Model::Pass::forward(const StepContext& step) const {
  step.device.section(StepSection::kEmbedding);
  step.before_forward(0);
  embedding_.forward(step, stack_.input(step));
  if (step.shape.num_images() > 0) images_->forward(step, stack_.input(step));
  step.device.section(StepSection::kBlockForward);
  if (!side_) {
    stack_.forward(step);
  } else {  // both at a time, block by block, so that weights are gathered once
    StepContext frozen = step;
    frozen.keep = false;
    stack_.forward(frozen, [&](int64_t l, TensorView& residual, TensorView& branch) {
      side_->forward(step, l, residual, branch);
    });
  }
  step.device.section(StepSection::kHead);
  step.before_forward(head_unit_);
  if (!side_) {
    head_.forward(step, stack_.residual(step), stack_.branch(step));
    return;
  }
  head_.forward(step, side_->frozen_output(step), {});
  side_->forward_output(step, head_.hidden(step));
}

void Model::Pass::loss_and_backward(const StepContext& step, const LossOptions& options) const {
  PARKA_REQUIRE(step.keep && step.gradients != nullptr);
  const ResidualStream& stream = stack_.stream();
  step.before_backward(head_unit_);
  if (side_) {
    head_.loss_and_backward(step, options, side_->d_hidden(step));
    side_->backward_output(step);
  } else {
    head_.loss_and_backward(step, options, stream, stack_.reads_fp8_gradient());
  }
  if (!options.sums.empty()) {
    add_sum(step.device, {.x = head_.losses(step), .total = options.sums.rows(0, 1)});
    if (const RouterLoads& routers = stack_.router_loads(); routers.exists()) {
      const int64_t count = routers.num_blocks * routers.columns();
      add(step.device, {.x = routers.all(step).reshaped({count}), .total = options.sums.rows(1, count)});
    }
  }
  step.after_backward(head_unit_);  // which may look at the loss
  if (first_trained_unit_ == head_unit_) return;
  step.device.section(StepSection::kBlockBackward);
  side_ ? side_->backward(step) : stack_.backward(step);
  if (first_trained_unit_ > 0) return;
  step.device.section(StepSection::kEmbedding);
  step.before_backward(0);
  if (side_) {
    side_->backward_input(step);
  } else {
    embedding_.backward(step, stream.d_residual(step));
  }
  if (images_) images_->backward(step, stream.d_residual(step));
  step.after_backward(0);
}

void Model::Pass::declare_telemetry(MemoryPlan& plan) {
  telemetry_.declare(stack_.num_blocks(), max_shape_.num_tokens(), precision_.has_fp8(), sample_needs_, plan);
}

void Model::Pass::start_sampling(StepContext& step) const {
  step.samples = telemetry_.start(step.device, step.num_tokens());
  if (!step.samples.active() || precision_.gemm == GemmPrecision::kCompute) return;
  using enum QuantizedTensor;
  for (int64_t l = 0; l < stack_.num_blocks(); ++l) {
    const auto sample = [&](QuantizedTensor which, std::string_view name, bool is_more = false) {
      const int weight = table_.index_of(block_prefix(kDecoder, l) + std::string(name));
      if (weight < 0 || !table_.all[static_cast<size_t>(weight)].quantized_forward) return;
      const int64_t n = table_.all[static_cast<size_t>(weight)].num_stacked;
      const TensorView x = weights_->operand(step.device, weight);
      const ScaledView& q = weights_->quantized(step.device, weight);
      for (int64_t e = 0; e < n; ++e) {
        step.samples.add_whole(step.device, l, which, matrix_of(x, e, n), matrix_of(q, e, n), is_more || e > 0);
      }
    };
    sample(kQkvWeight, "qkv");
    sample(kAttentionOutWeight, "attention_out");
    // A block has one of the first two, and a shared expert beside the second alone.
    for (const auto& [prefix, is_more] : {std::pair("", false), {"experts.", false}, {"shared.", true}}) {
      sample(kUpGateWeight, std::string(prefix) + "up_gate", is_more);
      sample(kDownWeight, std::string(prefix) + "down", is_more);
    }
  }
}

}  // namespace parka
