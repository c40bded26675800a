#include "model/model.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "kernels/ops/attention/rope.h"
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

ParameterTable with_linear_weights_in(MemoryPlace place, ParameterTable table) {
  for (ParameterInfo& p : table.all) {
    if (p.role == ParameterRole::kLinear) p.place = place;
  }
  return table;
}

}  // namespace

Model::Model(const ModelConfig& config, const PrecisionConfig& precision, bool decay_embeddings,
             const BatchShape& shape, int64_t logits_chunk_tokens, Use use, const Zero& zero, MemoryPlan& plan,
             const ParameterRules& rules)
    : config_(config),
      max_shape_(shape),
      table_(with_linear_weights_in(
          use == Use::kTraining && precision.offload_weights ? MemoryPlace::kHost : MemoryPlace::kDevice,
          make_parameter_table(config, decay_embeddings, rules))),
      weights_(table_, Formats(precision), {kept_copies(precision, zero, rules.base), table_.first_backward_unit()},
               use == Use::kInference ? WeightUse::kForward : training_use(precision), zero, plan) {
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

void Model::set_context(ContextExchange* context) {
  if (training_) training_->set_context(context);
  if (evaluation_) evaluation_->set_context(context);
}

void Model::accumulate_gradients(Device& device, const Batch& batch, const LossOptions& options,
                                 const std::vector<TensorView>& gradients, Accumulation accumulation,
                                 bool may_replay) {
  PARKA_REQUIRE(training_ != nullptr && gradients.size() == table_.all.size());
  StepContext step = training_->load(device, batch, /*keep=*/true);
  step.gradients = &gradients;
  step.accumulation = accumulation;
  losses_ = training_->losses(step);
  const auto work = [&] {
    training_->forward(step);
    training_->loss_and_backward(step, options);
  };
  if (!may_replay || training_->offload().moves_blocks()) {
    work();
    return;
  }
  RecordedWith arguments{
      batch.shape, options.grad_scale, options.z_loss, options.grad_factor.data, options.loss_sum.data, {}};
  for (const TensorView& gradient : gradients) arguments.gradients.push_back(gradient.data);
  if (recorded_with_ != arguments) {
    recordings_.clear();
    recorded_with_ = std::move(arguments);
  }
  device.replay(recordings_[accumulation], work);
}

void Model::accumulate_gradients_with_telemetry(Device& device, const Batch& batch, const LossOptions& options,
                                                const std::vector<TensorView>& gradients,
                                                Accumulation accumulation) {
  PARKA_REQUIRE(with_telemetry_ && gradients.size() == table_.all.size());
  StepContext step = training_->load(device, batch, /*keep=*/true);
  step.gradients = &gradients;
  step.accumulation = accumulation;
  losses_ = training_->losses(step);
  training_->start_sampling(step);
  training_->forward(step);
  training_->loss_and_backward(step, options);
}

int64_t Model::host_bytes(const MemoryPlan& plan) const {
  return training_ != nullptr ? training_->offload().host_bytes(plan) : 0;
}

TensorView Model::telemetry() const { return with_telemetry_ ? training_->telemetry_statistics() : TensorView(); }

TensorView Model::attention_telemetry() const {
  return with_telemetry_ ? training_->attention_telemetry() : TensorView();
}

void Model::evaluate(Device& device, const Batch& batch) {
  const Pass& pass = evaluating();
  const StepContext step = pass.load(device, batch, /*keep=*/false);
  pass.forward(step);
  pass.loss(step);
  losses_ = pass.losses(step);
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
    const int64_t rows = std::min(pass.max_logit_rows(), count - done);
    const TensorView part = pass.logits(step, first_row + done, rows);
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

}  // namespace parka
