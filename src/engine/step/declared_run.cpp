#include "engine/step/declared_run.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "engine/step/recorded_step.h"
#include "model/phases.h"

namespace parka {
namespace {

void require_one_micro_batch(const Config& config, int64_t num_ranks) {
  const TrainingConfig& t = config.training;
  if (config.divides_batch(num_ranks) && config.micro_batches_per_step(num_ranks) == 1) return;
  throw_bad_input(
      "optimizer.release_gradients = true needs steps of one micro-batch, and training.micro_batch_size = {} is "
      "not global_batch_size / {} = {} / {}; change one of them, or set release_gradients = false",
      t.micro_batch_size,
      config.distributed.context_parallel > 1 ? "groups of ranks that share sequences" : "ranks",
      t.global_batch_size, config.data_parallel(num_ranks));
}

void require_context_groups(const Config& config, int64_t num_ranks) {
  const int64_t shared_by = config.distributed.context_parallel;
  if (num_ranks % shared_by == 0) return;
  throw_bad_input(
      "distributed.context_parallel = {} does not divide the {} rank{} of the run; start a multiple of it, or set it "
      "to 1",
      shared_by, num_ranks, num_ranks == 1 ? "" : "s");
}

void require_expert_groups(const Config& config, int64_t num_ranks, int64_t group) {
  const int64_t divided_by = config.distributed.expert_parallel;
  if (num_ranks % divided_by != 0) {
    throw_bad_input(
        "distributed.expert_parallel = {} does not divide the {} rank{} of the run; start a multiple of it, or set it "
        "to 1",
        divided_by, num_ranks, num_ranks == 1 ? "" : "s");
  }
  if (group % divided_by != 0) {
    throw_bad_input(
        "distributed.expert_parallel = {} does not divide distributed.shard_size = {}; change one of them, or set "
        "shard_size to 0",
        divided_by, group);
  }
}

}  // namespace

Zero zero_of(const Config& config, int64_t rank, int64_t size) {
  require_context_groups(config, size);
  if (config.optimizer.release_gradients) require_one_micro_batch(config, size);
  const int64_t shard_size = config.distributed.shard_size;
  const int64_t group = shard_size == 0 || size == 1 ? size : shard_size;
  if (size % group != 0) {
    throw_bad_input(
        "distributed.shard_size = {} does not divide the {} ranks of the run; set it to the number of GPUs of a "
        "node, or to 0",
        group, size);
  }
  require_expert_groups(config, size, group);
  // Where nothing is divided flat, the ranks that divide the experts are those whose pieces differ.
  const int64_t stage = group == 1 ? 0 : config.distributed.zero_stage,
                experts = config.distributed.expert_parallel;
  const int64_t shards = stage > 0 ? group : experts > 1 ? experts : size;
  const Zero zero = {stage,
                     {static_cast<int>(rank), static_cast<int>(size), static_cast<int>(shards),
                      static_cast<int>(config.distributed.context_parallel), static_cast<int>(experts)}};
  if (config.finetune.base != BaseFormat::kCompute && zero.shards_weights()) {
    throw_bad_input(
        "finetune.base = {} keeps all codes on every rank, and distributed.zero_stage = 3 divides weights; use "
        "zero_stage = 2, or base = compute",
        name_of(config.finetune.base));
  }
  return zero;
}

namespace {

// Bytes of the exchange buffer that Communicator::all_gather_columns() may need: the transposed codes of the
// largest weight that is gathered so. If most weights are frozen, their gradients need less.
int64_t gathered_code_bytes(const Model& model) {
  int64_t largest = 0;
  for (const ParameterInfo& p : model.parameters().all) {
    if (p.role == ParameterRole::kLinear && model.weights().has_pieces_for_backward(p.unit))
      largest = std::max(largest, p.numel());
  }
  return largest;
}

}  // namespace

DeclaredRun::DeclaredRun(const Config& config, DeviceKind device, const Zero& zero)
    : DeclaredRun(config, device, zero, device == DeviceKind::kCuda ? record_workspace_bytes(config, zero) : 0) {}

DeclaredRun::DeclaredRun(const Config& config, DeviceKind device, const Zero& zero, int64_t workspace_bytes)
    : model(config.model, config.precision, config.optimizer.decay_embeddings, config.micro_batch_shape(),
            config.training.logits_chunk_tokens, Model::Use::kTraining, zero, plan, config.parameter_rules()),
      optimizer(config.optimizer, config.precision.compute, model.parameters().all, plan,
                /*is_alone=*/zero.mesh.size(Peers::kAll) == 1, StateStream::kPartElements,
                config.optimizer.release_gradients ? kStep | kUpdate : PhaseMask{kUpdate}, model.num_sums()),
      checks(config.reliability, model.parameters().all.size(), plan) {
  if (config.telemetry.interval > 0) telemetry.emplace(config, model, optimizer, plan);
  if (workspace_bytes > 0) workspace = plan.add(kWorkspaceCategory, "op_workspace", DType::kU8, {workspace_bytes});
  const bool divides_experts = zero.expert_places() > 1;
  if (device == DeviceKind::kCuda && (zero.shards_gradients() || divides_experts)) {
    // For what other ranks have of all gradients of a unit, so that none has to wait for the sum of another.
    std::vector<int64_t> of_units(static_cast<size_t>(model.parameters().num_units()));
    for (const ParameterInfo& p : model.parameters().all) {
      if (!p.trainable) continue;
      of_units[static_cast<size_t>(p.unit)] +=
          p.placement.gradient.padded(p.numel()) - p.placement.gradient.piece(p.numel());
    }
    // And for what others' experts have made of this rank's tokens.
    const int64_t of_tokens = divides_experts ? (zero.expert_places() - 1) * model.shape().num_tokens() *
                                                    config.model.d_model * size_of(config.precision.compute)
                                              : 0;
    const int64_t largest =
        std::max(*std::max_element(of_units.begin(), of_units.end()),
                 ceil_div(std::max(gathered_code_bytes(model), of_tokens), size_of(config.optimizer.gradient)));
    exchange_buffer = plan.add("gradient buckets", "exchange_buffer", config.optimizer.gradient, {largest});
  }
  // The same condition as in TokenFiles::targets_vary().
  if (config.data.loss_mask || config.data.documents == DocumentMode::kSeparate || config.model.vision.exists()) {
    target_share = plan.add("batch", "target_share", DType::kF32, {1});
  }
  plan.finish();
}

}  // namespace parka
