#include "engine/commands/device_setup.h"

#include <algorithm>
#include <optional>
#include <string>

#include <spdlog/spdlog.h>

#include "engine/files/gemm_tuning_file.h"
#include "engine/planning/gpu_plan.h"
#include "engine/planning/memory_advice.h"

namespace parka {
namespace {

// Products of two E5M2 matrices have no tensor-core form: cuBLASLt refuses them, and Parka's own kernel is slow.
bool multiplies_e5m2_by_e5m2(const PrecisionConfig& precision) {
  return precision.gemm != GemmPrecision::kCompute && precision.forward_format == DType::kE5M2;
}

}  // namespace

bool wants_gpu(const Config& config) {
  const DeviceChoice choice = config.device.kind;
  return choice == DeviceChoice::kCuda || (choice == DeviceChoice::kAuto && num_cuda_devices() > 0);
}

int num_local_ranks(const StartedRanks& started) { return std::max({1, started.ranks, started.gpus}); }

bool wants_gpu(const Config& config, const StartedRanks& started) {
  const bool wanted = wants_gpu(config);
  if (started.gpus > 0 && !wanted) {
    throw_bad_input(
        "--gpus {}: this run computes on the CPU, because {}; --ranks {} starts ranks on the CPU", started.gpus,
        config.device.kind == DeviceChoice::kCpu ? "device.kind is cpu" : "no GPU was found", started.gpus);
  }
  return wanted;
}

std::unique_ptr<Device> make_device(const Config& config, int gpu) {
  if (!wants_gpu(config)) return make_cpu_device();
  if (multiplies_e5m2_by_e5m2(config.precision)) {
    spdlog::warn(
        "precision.forward_format = e5m2: GPUs have no tensor cores for products of two e5m2 matrices, "
        "so this is slow");
  }
  std::unique_ptr<Device> device = make_cuda_device(gpu);
  if (!config.device.gemm_tuning.empty()) {
    choose_gemm_algorithms(*device, read_gemm_tuning(config.device.gemm_tuning, *device));
  }
  return device;
}

void check_memory(const Config& config, const nlohmann::json& given, const Device& device, int64_t num_gpus) {
  if (device.kind() != DeviceKind::kCuda) return;
  const int64_t free = device.memory_use().free_bytes, planned = planned_bytes(config, num_gpus);
  if (planned <= free) return;
  const std::optional<MemoryAdvice> advice = cheapest_changes(given, num_gpus, free);
  throw_bad_input("{}: the run needs {:.2f} GB, but {:.2f} GB are free; {}", device.name(),
                  static_cast<double>(planned) * 1e-9, static_cast<double>(free) * 1e-9,
                  advice ? "it would fit with " + advice->arguments()
                         : "no change of batch, precision or sharding makes it fit: use more GPUs");
}

}  // namespace parka
