#include "engine/device_setup.h"

#include <optional>
#include <string>

#include <spdlog/spdlog.h>

#include "engine/gemm_tuning_file.h"
#include "engine/gpu_plan.h"

namespace parka {
namespace {

// Why a GPU cannot run the config; empty when it can.
std::string beyond_gpu(const Config& config) {
  if (config.precision.has_fp8()) {
    return fmt::format("precision.recipe = {} has FP8 activations or GEMMs, which run on the CPU only so far",
                       name_of(config.precision.recipe));
  }
  if (is_float8(config.optimizer.states)) {
    return fmt::format("optimizer.states = {} runs on the CPU only so far", name_of(config.optimizer.states));
  }
  return {};
}

}  // namespace

std::unique_ptr<Device> make_device(const Config& config) {
  const DeviceChoice choice = config.device.kind;
  if (choice == DeviceChoice::kCpu) return make_cpu_device();
  const std::string problem = beyond_gpu(config);
  if (choice == DeviceChoice::kAuto) {
    if (num_cuda_devices() == 0) return make_cpu_device();
    if (!problem.empty()) {
      spdlog::warn("not using the GPU: {}", problem);
      return make_cpu_device();
    }
  }
  if (!problem.empty()) throw_bad_input("device.kind = cuda: {}", problem);
  std::unique_ptr<Device> device = make_cuda_device();
  if (!config.device.gemm_tuning.empty()) {
    choose_gemm_algorithms(*device, read_gemm_tuning(config.device.gemm_tuning, *device));
  }
  return device;
}

void check_memory(const Config& config, const Device& device) {
  if (device.kind() != DeviceKind::kCuda) return;
  const int64_t free = device.memory_use().free_bytes, planned = plan_for_gpus(config, 1).total_bytes;
  if (planned <= free) return;
  const std::optional<std::string> change = change_that_fits(config, 1, free);
  throw_bad_input("{}: the run needs {:.2f} GB and {:.2f} GB are free; {}", device.name(),
                  static_cast<double>(planned) * 1e-9, static_cast<double>(free) * 1e-9,
                  change ? "it would fit with " + *change : "no change of batch or precision makes it fit");
}

}  // namespace parka
