#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/memory/host_memory.h"
#include "core/tensor.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_io.h"
#include "engine/config/given_keys.h"
#include "engine/files/shell_word.h"
#include "engine/planning/changed_step.h"
#include "engine/planning/gpu_plan.h"
#include "engine/planning/memory_fit.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

constexpr int64_t kGpusPerNode = 8;

int64_t gpus_of_node(const PlanOptions& options) {
  const int64_t per_node = options.nodes > 0 ? options.num_gpus / options.nodes : kGpusPerNode;
  return std::clamp<int64_t>(per_node, 1, options.num_gpus);
}

// Of the plan, for each GPU.
MemoryBytes limit_of(const PlanOptions& options) {
  const int64_t gpus = gpus_of_node(options);
  MemoryBytes limit;
  limit.gpu = static_cast<int64_t>(options.memory_limit_gb * 1e9) - context_bytes(options.num_gpus);
  std::optional<int64_t> host;
  if (options.host_memory_gb > 0) host = static_cast<int64_t>(options.host_memory_gb * 1e9);
  if (options.host_memory_gb == 0 && num_cuda_devices() >= gpus) host = available_host_bytes();
  if (host) limit.host = std::max<int64_t>(0, *host - kHostReserveBytes) / gpus;
  return limit;
}

// A run that fits.
struct Fit {
  MemoryAdvice advice;
  GpuPlan plan;  // with the changes
  Config config;
  bool saves_beside_training = true;     // there is host memory for that
  std::optional<StepPrediction> step;    // where a measurement tells
  double tokens_per_second_per_gpu = 0;  // likewise
  std::string command;
};

std::string train_command(const PlanOptions& options, const MemoryAdvice& advice) {
  // Beyond one host, ranks are started on all of them (docs/cluster.md).
  const bool one_host = options.num_gpus <= gpus_of_node(options);
  std::string command =
      one_host ? "parka train " : fmt::format("scripts/launch.sh -np {} -- parka train ", options.num_gpus);
  command += shell_word(options.write_path.empty() ? options.config_path : options.write_path);
  if (one_host && options.num_gpus > 1) command += fmt::format(" --gpus {}", options.num_gpus);
  if (!options.write_path.empty()) return command;
  for (const std::string& override : options.overrides) command += " --set " + shell_word(override);
  return advice.changes.empty() ? command : command + " " + advice.arguments();
}

[[noreturn]] void throw_nothing_fits(const PlanOptions& options, const GivenConfig& given,
                                     const MemoryBytes& limit) {
  const auto limit_on = [&](int64_t gpus) {
    PlanOptions more = options;
    more.num_gpus = gpus;
    if (options.nodes > 0) more.nodes = ceil_div(gpus, gpus_of_node(options));  // hosts of as many as now
    return limit_of(more);
  };
  const std::optional<MemoryAdvice> more = fewest_gpus(given, options.num_gpus, limit_on, MoreGpus::kWithChanges);
  const std::string host =
      limit.host == MemoryBytes::kUnlimited
          ? ""
          : fmt::format(" and {:.1f} GB of host memory", 1e-9 * static_cast<double>(limit.host));
  throw_bad_input("{}: no set of changes makes it fit into {:.1f} GB{} for each of {} GPU{}; {}",
                  options.config_path, options.memory_limit_gb, host, options.num_gpus,
                  options.num_gpus == 1 ? "" : "s",
                  more ? fmt::format("use at least {} GPUs (--gpus {})", more->num_gpus, more->num_gpus)
                       : advice_without_gpus(given.with({}), options.num_gpus));
}

Fit find_fit(const PlanOptions& options) {
  const Config as_given = load_config(options.config_path, options.overrides);
  require_whole_micro_batches(as_given, options.num_gpus);
  if (as_given.device.kind != DeviceChoice::kCpu) check_head_dims(as_given, DeviceKind::kCuda);
  const GivenConfig given = GivenConfig::read(options.config_path, options.overrides);
  FitRequest request{.config = given, .num_gpus = options.num_gpus, .limit = limit_of(options)};
  request.any_results = options.any_results;
  std::optional<StepMeasurement> one;
  std::optional<ChangedSteps> steps;
  if (!options.measured_path.empty()) {
    one = read_step_measurement(options.measured_path);
    steps.emplace(*one, as_given, links_of(options, one->copy_bandwidth), options.num_gpus,
                  1 + 0.01 * options.slowest_gpu);
    request.seconds = [&](const Config& changed) -> std::optional<double> {
      const std::optional<StepPrediction> step = steps->predict(changed);
      return step ? std::optional(step->seconds) : std::nullopt;
    };
  }
  std::optional<MemoryAdvice> advice = cheapest_fit(request);
  if (!advice) throw_nothing_fits(options, given, request.limit);

  Fit fit;
  fit.advice = std::move(*advice);
  fit.config = given.with(fit.advice.overrides());
  fit.plan = plan_for_gpus(fit.config, options.num_gpus);
  fit.saves_beside_training = fit.advice.planned.host <= request.limit.host - fit.plan.staging_bytes;
  if (steps) fit.step = steps->predict(fit.config);
  if (fit.step) {
    const TrainingConfig& training = fit.config.training;
    const auto tokens = static_cast<double>(training.global_batch_size * fit.config.data.sequence_length);
    fit.tokens_per_second_per_gpu = tokens / fit.step->seconds / static_cast<double>(options.num_gpus);
  }
  fit.command = train_command(options, fit.advice);
  return fit;
}

const char* words_of(MemoryChange::Results results) {
  switch (results) {
    case MemoryChange::Results::kSameBits: return "";
    case MemoryChange::Results::kOtherSums: return "sums in another order: ";
    case MemoryChange::Results::kOtherPrecision: return "other results: ";
  }
  throw_internal("unknown results {}", static_cast<int>(results));
}

const char* name_of(MemoryChange::Results results) {
  switch (results) {
    case MemoryChange::Results::kSameBits: return "same bits";
    case MemoryChange::Results::kOtherSums: return "other sums";
    case MemoryChange::Results::kOtherPrecision: return "other precision";
  }
  throw_internal("unknown results {}", static_cast<int>(results));
}

void print_fit(const Fit& fit, const PlanOptions& options) {
  const auto gigabytes = [](int64_t bytes) { return 1e-9 * static_cast<double>(bytes); };
  fmt::print("recipe {}, {} x {} tokens on {} GPU{}\n", name_of(fit.config.precision.recipe),
             fit.config.training.micro_batch_size, fit.config.data.sequence_length, options.num_gpus,
             options.num_gpus == 1 ? "" : "s");
  fmt::print("{} into {:.1f} GB{}\n", fit.advice.changes.empty() ? "Fits as it is" : "Fits",
             options.memory_limit_gb, fit.advice.changes.empty() ? "." : " with these changes, the cheapest:");
  for (const MemoryChange& change : fit.advice.changes) {
    fmt::print("    --set {:<36}  # {}{}\n", change.override, words_of(change.results), change.cost);
  }
  fmt::print("{:<24} {:9.3f} GB{}\n", "in use on the GPU",
             gigabytes(fit.advice.planned.gpu + context_bytes(options.num_gpus)),
             options.num_gpus == 1 ? "" : ", on each");
  fmt::print("{:<24} {:9.3f} GB for each GPU", "in host memory", gigabytes(fit.advice.planned.host));
  if (fit.plan.staging_bytes > 0 && fit.saves_beside_training) {
    fmt::print(", and {:.3f} GB to save beside the training", gigabytes(fit.plan.staging_bytes));
  }
  fmt::print("\n");
  if (!fit.saves_beside_training)
    fmt::print("Training waits for saves: they would need {:.3f} GB of host memory more.\n",
               gigabytes(fit.plan.staging_bytes));
  if (fit.step) {
    fmt::print("{:<24} {:9.0f} tok/s per GPU, {:.0f} in total\n", "expected speed", fit.tokens_per_second_per_gpu,
               fit.tokens_per_second_per_gpu * static_cast<double>(options.num_gpus));
  } else if (!options.measured_path.empty()) {
    fmt::print("{:<24} unknown: {} has not these number formats\n", "expected speed", options.measured_path);
  }
  fmt::print("{}\n", fit.command);
}

void print_fit_json(const Fit& fit, const PlanOptions& options) {
  nlohmann::ordered_json changes = nlohmann::ordered_json::array();
  for (const MemoryChange& change : fit.advice.changes) {
    changes.push_back({{"set", change.override}, {"results", name_of(change.results)}, {"cost", change.cost}});
  }
  nlohmann::ordered_json json = {{"gpus", options.num_gpus},
                                 {"micro_batch_size", fit.config.training.micro_batch_size},
                                 {"changes", changes},
                                 {"total_bytes", fit.advice.planned.gpu},
                                 {"context_bytes", context_bytes(options.num_gpus)},
                                 {"host_bytes", fit.advice.planned.host},
                                 {"staging_bytes", fit.saves_beside_training ? fit.plan.staging_bytes : 0},
                                 {"command", fit.command}};
  if (fit.step) {
    json["step"] = {{"seconds", fit.step->seconds},
                    {"host_exposed_seconds", fit.step->host_exposed_seconds},
                    {"tokens_per_second_per_gpu", fit.tokens_per_second_per_gpu},
                    {"tokens_per_second", fit.tokens_per_second_per_gpu * static_cast<double>(options.num_gpus)}};
  }
  std::printf("%s\n", json.dump(2).c_str());
}

}  // namespace

Links links_of(const PlanOptions& options, double memory_bandwidth) {
  Links links;
  links.nodes = options.nodes > 0 ? options.nodes : ceil_div(options.num_gpus, kGpusPerNode);
  if (options.nodes <= 0 && options.num_gpus > kGpusPerNode && options.num_gpus % kGpusPerNode != 0) {
    throw_bad_input("command line: --gpus {} is no number of whole nodes of {} GPUs; give --nodes",
                    options.num_gpus, kGpusPerNode);
  }
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
  links.memory_bandwidth = memory_bandwidth;
  links.host_bandwidth = 1e9 * options.host_bandwidth;
  return links;
}

int run_fit(const PlanOptions& options) {
  require_config_writable(options.write_path, options.config_path);
  const Fit fit = find_fit(options);
  if (!options.write_path.empty()) {
    std::vector<std::string> overrides = options.overrides;
    for (const std::string& override : fit.advice.overrides()) overrides.push_back(override);
    write_given_keys(options.write_path, options.config_path, overrides);
  }
  if (options.json) {
    print_fit_json(fit, options);
  } else {
    print_fit(fit, options);
  }
  return 0;
}

}  // namespace parka
