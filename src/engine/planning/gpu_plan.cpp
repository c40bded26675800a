#include "engine/planning/gpu_plan.h"

#include <algorithm>
#include <array>
#include <map>

#include "engine/step/declared_run.h"
#include "engine/training/training_run.h"
#include "model/buffer_scope.h"

namespace parka {

namespace {

int64_t group_bytes(const Config& config, const Zero& zero, int64_t num_gpus) {
  const std::array<int64_t, 3> sizes = {zero.shard.size, num_gpus / zero.shard.size,
                                        config.distributed.context_parallel};
  return kNcclGroupBytes * std::ranges::count_if(sizes, [&](int64_t size) { return size > 1 && size < num_gpus; });
}

}  // namespace

int64_t group_bytes(const Config& config, int64_t num_gpus) {
  return group_bytes(config, zero_of(config, 0, num_gpus), num_gpus);
}

GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus) {
  const Zero zero = zero_of(config, 0, num_gpus);
  const DeclaredRun run(config, DeviceKind::kCuda, zero);
  Config whole = config;
  whole.distributed.context_parallel = 1;
  const DeclaredRun alone(whole, DeviceKind::kCuda);
  std::map<std::string, int64_t> unsharded;
  for (const MemoryPlan::CategoryTotal& total : alone.plan.summary()) unsharded[total.category] = total.bytes;
  GpuPlan result;
  result.host_bytes = run.model.host_bytes(run.plan);
  result.host_lines = run.plan.host_summary();
  result.staging_bytes = staging_bytes(config, run, zero, num_gpus / zero.shard.size);
  for (const MemoryPlan::CategoryTotal& total : run.plan.summary()) {
    result.lines.push_back({total.category, unsharded[total.category], total.bytes});
    result.total_bytes += total.bytes;
    if (total.category == kSavedActivationsCategory) {
      const auto tokens = static_cast<double>(config.micro_batch_shape().num_tokens());
      result.saved_bytes_per_token_layer = static_cast<double>(total.bytes + result.host_bytes) / tokens /
                                           static_cast<double>(config.model.num_layers);
    }
  }
  if (const int64_t bytes = group_bytes(config, zero, num_gpus); bytes > 0) {
    result.lines.push_back({"NCCL of groups of GPUs", 0, bytes});
    result.total_bytes += bytes;
  }
  return result;
}

MemoryBytes planned_memory(const Config& config, int64_t num_gpus) {
  const Zero zero = zero_of(config, 0, num_gpus);
  const DeclaredRun run(config, DeviceKind::kCuda, zero);
  return {.gpu = run.plan.total_bytes() + group_bytes(config, zero, num_gpus),
          .host = run.model.host_bytes(run.plan) + run.plan.total_host_bytes()};
}

int64_t planned_bytes(const Config& config, int64_t num_gpus) { return planned_memory(config, num_gpus).gpu; }

}  // namespace parka
