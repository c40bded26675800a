#include "engine/commands/device_setup.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "core/heartbeat.h"
#include "core/log/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/commands/version.h"
#include "engine/config/config_checks.h"
#include "engine/files/gemm_tuning_file.h"
#include "engine/planning/memory_advice.h"
#include "engine/products/product_scratch.h"
#include "engine/products/run_gemms.h"
#include "engine/step/declared_run.h"
#include "engine/step/recorded_step.h"
#include "kernels/ops/attention/attention.h"

namespace parka {
namespace {

bool names_tuning_file(const Config& config) {
  return !config.device.gemm_tuning_is_auto() && !config.device.gemm_tuning_is_off();
}

void warn_of_file(const std::string& message) { log_line(LogLevel::kWarning, message); }

RunGemmsOptions run_gemms_options(const Config& config, const std::string& config_path, const Launch& launch,
                                  Device& device) {
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(config.checkpoint.folder);
  const int64_t done = checkpoints.empty() ? 0 : checkpoints.front().step;
  return {.tuning_folders = tuning_folders(config_file(config_path)),
          .num_ranks = launch.size(),
          .has_checkpoint = !checkpoints.empty(),
          .steps = std::max<int64_t>(0, config.training.steps - done),
          .tune =
              [&device](const std::vector<RecordedProduct>& products) {
                log_info("tuning {} GEMMs, once, for up to {:.0f} s (device.gemm_tuning=off: never)",
                         products.size(), kRunTuningSeconds);
                return tune_products(device, products,
                                     {.max_candidates = 32, .rounds = 2, .budget_seconds = kRunTuningSeconds});
              },
          .warn = warn_of_file};
}

}  // namespace

bool wants_gpu(const Config& config) {
  const DeviceChoice choice = config.device.kind;
  return choice == DeviceChoice::kCuda || (choice == DeviceChoice::kAuto && num_cuda_devices() > 0);
}

LaunchOptions launch_options(const std::string& config_path, const std::vector<std::string>& overrides,
                             const StartedRanks& started) {
  LaunchOptions options;
  options.version = parka_version();
  options.local_ranks = std::max({1, started.ranks, started.gpus});
  options.check_size = [=](int size) {
    const Config config = load_config(config_path, overrides);
    zero_of(config, 0, size);
    require_whole_micro_batches(config, size);
  };
  return options;
}

bool wants_gpu(const Config& config, const StartedRanks& started) {
  const bool wanted = wants_gpu(config);
  if (started.gpus > 0 && !wanted) {
    throw_bad_input(
        "--gpus {}: this run computes on the CPU, because {}; --ranks {} starts ranks on the CPU", started.gpus,
        config.device.kind == DeviceChoice::kCpu ? "device.kind is cpu" : "no GPU was found", started.gpus);
  }
  return wanted;
}

void check_head_dims(const Config& config, DeviceKind device) {
  if (device == DeviceKind::kCpu) return;
  const auto check = [](std::string_view key, int64_t width) {
    if (width <= kMaxGpuHeadDim) return;
    throw_bad_input(
        "{} = {}: attention on a GPU takes heads of up to {} columns; use more and narrower heads, or device.kind = cpu",
        key, width, kMaxGpuHeadDim);
  };
  const ModelConfig& model = config.model;
  check(model.given_head_dim == 0 ? "model.d_model / model.num_heads" : "model.head_dim", model.head_dim());
  if (model.vision.exists()) {
    const TowerConfig& tower = model.vision.tower;
    check("model.vision.width / model.vision.num_heads", tower.width / tower.num_heads);
  }
}

std::unique_ptr<Device> make_untuned_device(const Config& config, int gpu) {
  check_head_dims(config, wants_gpu(config) ? DeviceKind::kCuda : DeviceKind::kCpu);
  if (!wants_gpu(config)) return make_cpu_device();
  return make_cuda_device(gpu);
}

std::unique_ptr<Device> make_device(const Config& config, int gpu) {
  std::unique_ptr<Device> device = make_untuned_device(config, gpu);
  if (device->kind() == DeviceKind::kCuda && names_tuning_file(config)) {
    choose_gemm_algorithms(*device, read_gemm_tuning(config.device.gemm_tuning, *device));
  }
  return device;
}

std::vector<GemmChoice> inference_gemms(const Config& config, const std::vector<std::string>& overrides,
                                        const Device& device) {
  if (!names_tuning_file(config)) return {};
  const bool is_given = is_overridden(overrides, "device.gemm_tuning");
  try {
    return read_gemm_tuning(config.device.gemm_tuning, device);
  } catch (const Error& error) {
    if (is_given) throw;
    log_warning("GEMM algorithms: cuBLASLt's first choices; those of the training cannot be used: {}",
                error.what());
    return {};
  }
}

std::unique_ptr<Device> make_inference_device(const Config& config, const std::vector<std::string>& overrides) {
  std::unique_ptr<Device> device = make_untuned_device(config);
  if (device->kind() == DeviceKind::kCuda) {
    const std::vector<GemmChoice> choices = inference_gemms(config, overrides, *device);
    if (!choices.empty()) choose_gemm_algorithms(*device, choices);
  }
  return device;
}

Config use_found_tuning(const Config& config, const std::string& config_path, Device& device, int64_t num_ranks) {
  if (!config.device.gemm_tuning_is_auto() || device.kind() != DeviceKind::kCuda) return config;
  Config used = config;
  used.device.gemm_tuning = "off";
  if (!config.divides_batch(num_ranks)) return used;  // refused when the run begins
  const std::string found = find_tuning(tuning_folders(config_file(config_path)), device,
                                        record_products(config, num_ranks), warn_of_file);
  if (found.empty()) return used;
  choose_gemm_algorithms(device, read_gemm_tuning(found, device));
  used.device.gemm_tuning = found;
  return used;
}

DecidedGemms decide_gemms(const Config& config, const std::string& config_path, Launch& launch, int gpu,
                          std::unique_ptr<Device>& device) {
  if (config.device.gemm_tuning_is_off() || !config.divides_batch(launch.size())) return {};
  const std::string own = fmt::format("{} with cuBLASLt {}", device->name(), gemm_library_version());
  for (const std::string& other : launch.hosts().gather_text(own)) {
    if (other == own || !config.device.gemm_tuning_is_auto()) continue;
    return {.line = fmt::format("GEMM algorithms: cuBLASLt's first choices, for ranks have {} and {}", own, other)};
  }
  heartbeat("tuning GEMMs");
  json decision;
  if (launch.rank() == 0) {
    const RunGemms gemms =
        decide_run_gemms(config, *device, run_gemms_options(config, config_path, launch, *device));
    decision = {{"tuning", gemms.tuning}, {"source", gemms.source}, {"line", gemms.line}};
    if (gemms.ran_products) {
      device.reset();
      device = make_cuda_device(gpu);
    }
  }
  decision = json::parse(launch.hosts().gather_text(decision.dump()).front());
  const auto text = decision.at("tuning").get<std::string>(), source = decision.at("source").get<std::string>();
  if (!text.empty()) {
    GemmTuningFile file = parse_gemm_tuning(text, source);
    require_for(file, *device, source);
    choose_gemm_algorithms(*device, file.choices);
  }
  return {source, decision.at("line").get<std::string>()};
}

void check_memory(const Config& config, const GivenConfig& given, const Device& device, int64_t num_gpus) {
  if (device.kind() != DeviceKind::kCuda) return;
  const int64_t free = device.memory_use().free_bytes, planned = planned_bytes(config, num_gpus);
  if (planned <= free) return;
  // Nothing of NCCL is on the device yet.
  const std::optional<MemoryAdvice> advice =
      cheapest_changes(given, num_gpus, {.gpu = free - nccl_bytes(num_gpus)});
  throw_bad_input("{}: the run needs {:.2f} GB, but {:.2f} GB are free; {}", device.name(),
                  static_cast<double>(planned) * 1e-9, static_cast<double>(free) * 1e-9,
                  advice ? "it would fit with " + advice->arguments()
                         : "no change of batch, precision or sharding makes it fit: use more GPUs");
}

}  // namespace parka
