#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/memory/host_memory.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/planning/memory_advice.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

int64_t gpus_of_host(int64_t num_gpus) { return std::min<int64_t>(kGpusPerNode, num_gpus); }

// The limits of a plan, for each GPU.
MemoryBytes limit_of(const PlanOptions& options, int64_t num_gpus) {
  const int64_t gpus = gpus_of_host(num_gpus);
  MemoryBytes limit;
  limit.gpu = static_cast<int64_t>(options.memory_limit_gb * 1e9) - context_bytes(num_gpus);
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
  bool saves_beside_training = true;  // there is host memory for that
  std::string command;
};

std::string train_command(const PlanOptions& options, const MemoryAdvice& advice) {
  // Beyond one host, ranks are started on all of them (docs/cluster.md).
  const bool one_host = options.num_gpus <= kGpusPerNode;
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
  const auto limit_on = [&](int64_t gpus) { return limit_of(options, gpus); };
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
  const MemoryBytes limit = limit_of(options, options.num_gpus);
  std::optional<MemoryAdvice> advice =
      cheapest_changes(given, options.num_gpus, limit, ChangeOrder::kSameBitsFirst);
  if (!advice) throw_nothing_fits(options, given, limit);

  Fit fit;
  fit.advice = std::move(*advice);
  fit.config = given.with(fit.advice.overrides());
  fit.plan = plan_for_gpus(fit.config, options.num_gpus);
  fit.saves_beside_training = fit.advice.planned.host <= limit.host - fit.plan.staging_bytes;
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
  fmt::print("{}\n", fit.command);
}

void print_fit_json(const Fit& fit, const PlanOptions& options) {
  ordered_json changes = ordered_json::array();
  for (const MemoryChange& change : fit.advice.changes) {
    changes.push_back({{"set", change.override}, {"results", name_of(change.results)}, {"cost", change.cost}});
  }
  ordered_json json = {{"gpus", options.num_gpus},
                       {"micro_batch_size", fit.config.training.micro_batch_size},
                       {"changes", changes},
                       {"total_bytes", fit.advice.planned.gpu},
                       {"context_bytes", context_bytes(options.num_gpus)},
                       {"host_bytes", fit.advice.planned.host},
                       {"staging_bytes", fit.saves_beside_training ? fit.plan.staging_bytes : 0},
                       {"command", fit.command}};
  std::printf("%s\n", json.dump(2).c_str());
}

}  // namespace

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
