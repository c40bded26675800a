#include <cstdio>

#include <nlohmann/json.hpp>

#include "engine/commands.h"
#include "engine/config_io.h"
#include "engine/gpu_plan.h"

namespace parka {
namespace {

double gb(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

void print_table(const Config& config, const GpuPlan& plan, const PlanOptions& options) {
  std::printf("%-34s %12s %12s\n", "", "one GPU", options.num_gpus > 1 ? "each GPU" : "");
  for (const GpuPlan::Line& line : plan.lines) {
    std::printf("%-34s %9.3f GB", line.category.c_str(), gb(line.unsharded_bytes));
    if (options.num_gpus > 1) std::printf(" %9.3f GB", gb(line.bytes));
    std::printf("\n");
  }
  std::printf("%-34s %12s %9.3f GB on each of %lld GPU%s (ZeRO stage %lld, recipe %s, %lld x %lld tokens)\n",
              "total", "", gb(plan.total_bytes), static_cast<long long>(options.num_gpus),
              options.num_gpus > 1 ? "s" : "",
              static_cast<long long>(options.num_gpus > 1 ? config.distributed.zero_stage : 0),
              std::string(name_of(config.precision.recipe)).c_str(),
              static_cast<long long>(config.training.micro_batch_size),
              static_cast<long long>(config.data.sequence_length));
  std::printf("%-34s %12s %9.3f GB\n", "CUDA context and libraries", "", gb(context_bytes(options.num_gpus)));
  std::printf("%-34s %12s %9.3f GB\n", "in use on the GPU", "",
              gb(plan.total_bytes + context_bytes(options.num_gpus)));
  std::printf("kept for backward: %.1f bytes per token and block (%.2f x 2 x d_model)\n",
              plan.saved_bytes_per_token_layer,
              plan.saved_bytes_per_token_layer / (2.0 * static_cast<double>(config.model.d_model)));
}

}  // namespace

int run_plan(const PlanOptions& options) {
  const Config config = load_config(options.config_path, options.overrides);
  const GpuPlan plan = plan_for_gpus(config, options.num_gpus);
  const int64_t limit = static_cast<int64_t>(options.memory_limit_gb * 1e9) - context_bytes(options.num_gpus);
  const bool fits = plan.total_bytes <= limit;
  const std::optional<std::string> change = fits ? std::nullopt : change_that_fits(config, options.num_gpus, limit);
  if (options.json) {
    nlohmann::ordered_json json = {{"gpus", options.num_gpus},
                                   {"total_bytes", plan.total_bytes},
                                   {"context_bytes", context_bytes(options.num_gpus)},
                                   {"fits", fits}};
    for (const GpuPlan::Line& line : plan.lines) json["bytes"][line.category] = line.bytes;
    json["saved_bytes_per_token_layer"] = plan.saved_bytes_per_token_layer;
    if (change) json["change_that_fits"] = *change;
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  print_table(config, plan, options);
  std::printf("%s into %.1f GB.\n", fits ? "Fits" : "Does not fit", options.memory_limit_gb);
  if (change) std::printf("Would fit with: %s\n", change->c_str());
  if (!fits && !change)
    std::printf(
        "No change of batch, precision or sharding makes it fit: use more GPUs (--gpus) or a smaller model.\n");
  return 0;
}

}  // namespace parka
