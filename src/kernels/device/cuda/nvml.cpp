#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "core/error.h"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/device/power_counter.h"

// NVIDIA's management library, which comes with the driver and not with the toolkit: what is used of it is declared
// here as its header nvml.h does, and the library is looked for at run time.
namespace parka {
namespace cuda {
namespace {

using NvmlDevice = struct nvmlDevice_st*;
using NvmlReturn = int;
constexpr NvmlReturn kNvmlSuccess = 0;
constexpr int kNvmlClockSm = 1;     // of nvmlClockType_t
constexpr unsigned kNvmlMigOn = 1;  // NVML_DEVICE_MIG_ENABLE
constexpr double kMilli = 1e-3, kMega = 1e6;

// The functions of the library; `missing` says why it cannot be used.
struct Nvml {
  NvmlReturn (*init)() = nullptr;
  const char* (*error_string)(NvmlReturn) = nullptr;
  NvmlReturn (*device_by_bus_id)(const char*, NvmlDevice*) = nullptr;
  NvmlReturn (*mig_mode)(NvmlDevice, unsigned*, unsigned*) = nullptr;
  NvmlReturn (*total_energy)(NvmlDevice, unsigned long long*) = nullptr;  // millijoules
  NvmlReturn (*clock_info)(NvmlDevice, int, unsigned*) = nullptr;         // megahertz
  NvmlReturn (*enforced_limit)(NvmlDevice, unsigned*) = nullptr;          // milliwatts
  std::string missing;

  Nvml() {
    constexpr const char* kName = "libnvidia-ml.so.1";
    void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = fmt::format("{} of the driver was not found", kName);
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr && missing.empty()) missing = fmt::format("{} has no {}", kName, name);
    };
    find(init, "nvmlInit_v2");
    find(error_string, "nvmlErrorString");
    find(device_by_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
    find(mig_mode, "nvmlDeviceGetMigMode");
    find(total_energy, "nvmlDeviceGetTotalEnergyConsumption");
    find(clock_info, "nvmlDeviceGetClockInfo");
    find(enforced_limit, "nvmlDeviceGetEnforcedPowerLimit");
    if (!missing.empty()) return;
    const NvmlReturn status = init();
    if (status != kNvmlSuccess) missing = fmt::format("{} does not start: {}", kName, error_string(status));
  }
};

const Nvml& nvml() {
  static const Nvml library;
  return library;
}

class NvmlCounter final : public PowerCounter {
 public:
  explicit NvmlCounter(NvmlDevice card) : card_(card) {}
  std::optional<double> joules() override {
    unsigned long long millijoules = 0;
    if (nvml().total_energy(card_, &millijoules) != kNvmlSuccess) return std::nullopt;
    return kMilli * static_cast<double>(millijoules);
  }
  std::optional<double> clock() override {
    unsigned megahertz = 0;
    if (nvml().clock_info(card_, kNvmlClockSm, &megahertz) != kNvmlSuccess) return std::nullopt;
    return kMega * megahertz;
  }
  std::optional<double> limit() override {
    unsigned milliwatts = 0;
    if (nvml().enforced_limit(card_, &milliwatts) != kNvmlSuccess) return std::nullopt;
    return kMilli * milliwatts;
  }

 private:
  NvmlDevice card_;
};

PowerSource find_counter(const cudaDeviceProp& gpu) {
  if (!nvml().missing.empty()) return {nullptr, nvml().missing};
  const std::string bus_id = fmt::format("{:08x}:{:02x}:{:02x}.0", gpu.pciDomainID, gpu.pciBusID, gpu.pciDeviceID);
  NvmlDevice card = nullptr;
  NvmlReturn status = nvml().device_by_bus_id(bus_id.c_str(), &card);
  if (status != kNvmlSuccess) {
    return {nullptr, fmt::format("the driver does not show the card {}: {}", bus_id, nvml().error_string(status))};
  }
  unsigned mig = 0, pending = 0;  // not supported by most cards
  if (nvml().mig_mode(card, &mig, &pending) == kNvmlSuccess && mig == kNvmlMigOn) {
    return {nullptr, "the card is divided (MIG), and its counter is of all parts"};
  }
  unsigned long long millijoules = 0;
  status = nvml().total_energy(card, &millijoules);
  if (status != kNvmlSuccess) {
    return {nullptr, fmt::format("the card's energy counter cannot be read: {}", nvml().error_string(status))};
  }
  return {std::make_unique<NvmlCounter>(card), ""};
}

}  // namespace
}  // namespace cuda

PowerSource find_power_counter(const Device& device) {
  if (device.kind() != DeviceKind::kCuda) return {nullptr, "only that of a GPU is read"};
  return cuda::find_counter(static_cast<const cuda::CudaDevice&>(device).properties());
}

}  // namespace parka
