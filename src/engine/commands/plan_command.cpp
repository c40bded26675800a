#include <algorithm>
#include <cstdio>
#include <optional>

#include <nlohmann/json.hpp>

#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "engine/planning/gpu_plan.h"
#include "engine/planning/step_measurement.h"
#include "engine/planning/step_model.h"

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
  if (plan.host_bytes > 0) {
    std::printf("%-34s %12s %9.3f GB for what %lld blocks keep for backward\n", "in host memory, for each GPU", "",
                gb(plan.host_bytes), static_cast<long long>(config.precision.offload_blocks));
  }
  if (plan.staging_bytes > 0) {
    std::printf("%-34s %12s %9.3f GB pinned, to save beside the training (checkpoint.async)\n",
                "in host memory, for each GPU", "", gb(plan.staging_bytes));
  }
  std::printf("kept for backward: %.1f bytes per token and block (%.2f x 2 x d_model)\n",
              plan.saved_bytes_per_token_layer,
              plan.saved_bytes_per_token_layer / (2.0 * static_cast<double>(config.model.d_model)));
}

// What a step of the run is expected to take, beside what was measured.
struct StepPlan {
  Links links;
  StepMeasurement one;
  StepPrediction prediction;
  int64_t num_gpus = 1, num_micro_batches = 1;
  double tokens_per_step = 0;
  std::optional<StepMeasurement> measured;  // of this very run

  double tokens_per_second_per_gpu() const {
    return tokens_per_step / prediction.seconds / static_cast<double>(num_gpus);
  }
  double efficiency() const { return tokens_per_second_per_gpu() / one.tokens_per_second_per_gpu(); }
  double error() const { return prediction.seconds / measured->step_seconds - 1; }
};

Links links_of(const PlanOptions& options) {
  constexpr int64_t kGpusPerNode = 8;
  Links links;
  links.nodes = options.nodes > 0 ? options.nodes : (options.num_gpus + kGpusPerNode - 1) / kGpusPerNode;
  if (options.num_gpus % links.nodes != 0) {
    throw_bad_input("command line: --gpus {} is not a multiple of --nodes {}; change one of them", options.num_gpus,
                    links.nodes);
  }
  links.link_bandwidth = 1e9 * options.link_bandwidth;
  links.network_bandwidth = 1e9 * options.network_bandwidth;
  links.start_latency = 1e-6 * options.start_latency;
  links.link_latency = 1e-6 * options.link_latency;
  links.network_latency = 1e-6 * options.network_latency;
  links.interference = options.interference;
  return links;
}

StepPlan plan_step(const Config& config, const PlanOptions& options) {
  const int64_t per_micro_batch = options.num_gpus * config.training.micro_batch_size;
  if (config.training.global_batch_size % per_micro_batch != 0) {
    throw_bad_input(
        "training.global_batch_size {} is not a positive multiple of training.micro_batch_size {} x {} GPUs; "
        "change one of them",
        config.training.global_batch_size, config.training.micro_batch_size, options.num_gpus);
  }
  constexpr int64_t kMostMicroBatches = 16384;
  if (config.training.global_batch_size / per_micro_batch > kMostMicroBatches) {
    throw_bad_input(
        "training.global_batch_size {} is {} micro-batches on each GPU, and a step of more than {} is not "
        "predicted: make it smaller",
        config.training.global_batch_size, config.training.global_batch_size / per_micro_batch, kMostMicroBatches);
  }
  StepPlan plan;
  plan.links = links_of(options);
  plan.one = read_step_measurement(options.measured_path);
  plan.links.memory_bandwidth = plan.one.copy_bandwidth;
  plan.num_gpus = options.num_gpus;
  plan.num_micro_batches = config.training.global_batch_size / per_micro_batch;
  plan.tokens_per_step = static_cast<double>(config.training.global_batch_size * config.data.sequence_length);
  const std::vector<StepAction> actions =
      step_actions_by(plan.one, config, options.num_gpus, 1 + 0.01 * options.slowest_gpu);
  plan.prediction = predict_step(actions, plan.links, options.num_gpus, config.distributed.shard_size);
  if (!options.compare_path.empty()) {
    plan.measured = read_step_measurement(options.compare_path);
    require_measurement_of(*plan.measured, config, options.num_gpus);
  }
  return plan;
}

void print_step(const StepPlan& plan) {
  const StepPrediction& step = plan.prediction;
  std::printf("\nmeasured on one %s: %.2f ms for %lld micro-batch%s, %.0f tok/s\n", plan.one.device.c_str(),
              1e3 * plan.one.step_seconds, static_cast<long long>(plan.one.num_micro_batches()),
              plan.one.num_micro_batches() == 1 ? "" : "es", plan.one.tokens_per_second_per_gpu());
  std::printf("expected on %lld GPU%s in %lld node%s, %lld micro-batch%s each:\n",
              static_cast<long long>(plan.num_gpus), plan.num_gpus == 1 ? "" : "s",
              static_cast<long long>(plan.links.nodes), plan.links.nodes == 1 ? "" : "s",
              static_cast<long long>(plan.num_micro_batches), plan.num_micro_batches == 1 ? "" : "es");
  std::printf("%-18s %9.2f ms\n", "own work", 1e3 * step.compute_seconds);
  std::printf("%-18s %9.2f ms slowdown by communication beside it\n", "", 1e3 * step.slowed_seconds);
  std::printf("%-18s %9.2f ms waiting for communication\n", "", 1e3 * step.exposed_seconds);
  std::printf("%-18s %9.2f ms\n", "step", 1e3 * step.seconds);
  std::printf("%-18s %9.2f ms, %.1f %% of it hidden, %.2f GB sent by each GPU\n", "communication",
              1e3 * step.communication_seconds, 100 * step.hidden_fraction(), 1e-9 * step.communicated_bytes);
  std::printf("%-18s %9.0f tok/s per GPU, %.0f in total\n", "speed", plan.tokens_per_second_per_gpu(),
              plan.tokens_per_second_per_gpu() * static_cast<double>(plan.num_gpus));
  std::printf("%-18s %9.1f %% of the measured GPU's speed\n", "efficiency", 100 * plan.efficiency());
  if (!plan.measured) return;
  std::printf("%-18s %9.2f ms in %s: the prediction is %+.1f %% off\n", "measured",
              1e3 * plan.measured->step_seconds, plan.measured->path.c_str(), 100 * plan.error());
}

nlohmann::ordered_json step_json(const StepPlan& plan) {
  const StepPrediction& step = plan.prediction;
  nlohmann::ordered_json json = {
      {"nodes", plan.links.nodes},
      {"micro_batches", plan.num_micro_batches},
      {"seconds", step.seconds},
      {"compute_seconds", step.compute_seconds},
      {"slowed_seconds", step.slowed_seconds},
      {"exposed_seconds", step.exposed_seconds},
      {"communication_seconds", step.communication_seconds},
      {"hidden_fraction", step.hidden_fraction()},
      {"communicated_bytes", step.communicated_bytes},
      {"tokens_per_second_per_gpu", plan.tokens_per_second_per_gpu()},
      {"tokens_per_second", plan.tokens_per_second_per_gpu() * static_cast<double>(plan.num_gpus)},
      {"efficiency", plan.efficiency()}};
  if (plan.measured) {
    json["measured_seconds"] = plan.measured->step_seconds;
    json["error"] = plan.error();
  }
  return json;
}

}  // namespace

int run_plan(const PlanOptions& options) {
  const Config config = load_config(options.config_path, options.overrides);
  std::optional<StepPlan> step;
  if (!options.measured_path.empty()) step = plan_step(config, options);
  const GpuPlan plan = plan_for_gpus(config, options.num_gpus);
  const int64_t limit = static_cast<int64_t>(options.memory_limit_gb * 1e9) - context_bytes(options.num_gpus);
  const bool fits = plan.total_bytes <= limit;
  const std::optional<std::string> change = fits ? std::nullopt : change_that_fits(config, options.num_gpus, limit);
  if (options.json) {
    nlohmann::ordered_json json = {{"gpus", options.num_gpus},
                                   {"micro_batch_size", config.training.micro_batch_size},
                                   {"total_bytes", plan.total_bytes},
                                   {"context_bytes", context_bytes(options.num_gpus)},
                                   {"fits", fits}};
    for (const GpuPlan::Line& line : plan.lines) json["bytes"][line.category] = line.bytes;
    if (plan.host_bytes > 0) json["host_bytes"] = plan.host_bytes;
    if (plan.staging_bytes > 0) json["staging_bytes"] = plan.staging_bytes;
    json["saved_bytes_per_token_layer"] = plan.saved_bytes_per_token_layer;
    if (change) json["change_that_fits"] = *change;
    if (step) json["step"] = step_json(*step);
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  print_table(config, plan, options);
  std::printf("%s into %.1f GB.\n", fits ? "Fits" : "Does not fit", options.memory_limit_gb);
  if (change) std::printf("Would fit with: %s\n", change->c_str());
  if (!fits && !change)
    std::printf(
        "No change of batch, precision or sharding makes it fit: use more GPUs (--gpus) or a smaller model.\n");
  const int64_t per_micro_batch = options.num_gpus * config.training.micro_batch_size;
  if (config.training.global_batch_size % per_micro_batch != 0) {
    std::printf(
        "This batch cannot be divided: training.global_batch_size %lld is not a multiple of "
        "training.micro_batch_size %lld x %lld GPUs.\n",
        static_cast<long long>(config.training.global_batch_size),
        static_cast<long long>(config.training.micro_batch_size), static_cast<long long>(options.num_gpus));
  }
  if (step) print_step(*step);
  return 0;
}

}  // namespace parka
