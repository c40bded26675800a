#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch/launch.h"
#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "kernels/device/device.h"
#include "kernels/device/gemm_tuning.h"

namespace parka {

// True if config.device asks for a GPU; `auto` does where there is one.
bool wants_gpu(const Config& config);

// The options with which a command starts its ranks: none if their number does not go with the config.
LaunchOptions launch_options(const std::string& config_path, const std::vector<std::string>& overrides,
                             const StartedRanks& started);

// wants_gpu(config). Throws Error(kBadInput) if it does not after --gpus.
bool wants_gpu(const Config& config, const StartedRanks& started);

// Throws Error(kBadInput) if the model, its tower or its side network has heads too wide for such a device.
void check_head_dims(const Config& config, DeviceKind device);

// The device that config.device asks for, ready for ops: GPU number `gpu` of those that this process sees, or the
// CPU. Throws Error(kBadInput) without it, or where check_head_dims() or the config's tuning file does not fit.
std::unique_ptr<Device> make_device(const Config& config, int gpu = 0);
// The same for what uses a checkpoint and does not train, with inference_gemms().
std::unique_ptr<Device> make_inference_device(const Config& config, const std::vector<std::string>& overrides);
// The same as make_device(), whatever device.gemm_tuning says: cuBLASLt's first choices.
std::unique_ptr<Device> make_untuned_device(const Config& config, int gpu = 0);

// The algorithms of the tuning file that `config` names, which is that of a checkpoint changed by `overrides`.
// Throws Error(kBadInput) if an override names a file that cannot be used. One that the checkpoint names was for
// its training: where that cannot be used there are none, and the log says why.
std::vector<GemmChoice> inference_gemms(const Config& config, const std::vector<std::string>& overrides,
                                        const Device& device);

// If device.gemm_tuning is auto, makes the GPU use the file for it that a run of the config would take, if there
// is one. Returns `config` with the value used in its place: that file, or off.
Config use_found_tuning(const Config& config, const std::string& config_path, Device& device, int64_t num_ranks);

// The algorithms that a run of `config` uses for its GEMMs.
struct DecidedGemms {
  std::string source = {};  // the file with the algorithms; empty: cuBLASLt's first choices
  std::string line = {};    // what the log says of it; empty: nothing
};
// decide_run_gemms() on rank 0, and the decision on all ranks: from here on their GPUs use it. All ranks of a run
// on GPUs must call it, before the device's first op. It may replace the device by a new one.
DecidedGemms decide_gemms(const Config& config, const std::string& config_path, Launch& launch, int gpu,
                          std::unique_ptr<Device>& device);

// Throws Error(kBadInput), with the cheapest changes that would fit, if a rank of this run of `config`, read from
// `given`, does not fit into the free memory of the GPU. Call it before anything is allocated.
void check_memory(const Config& config, const GivenConfig& given, const Device& device, int64_t num_gpus = 1);

}  // namespace parka
