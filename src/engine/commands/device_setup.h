#pragma once
#include <memory>

#include <nlohmann/json.hpp>

#include "engine/commands/commands.h"
#include "engine/config/config.h"
#include "kernels/device/device.h"

namespace parka {

// Whether config.device asks for a GPU; `auto` does where there is one.
bool wants_gpu(const Config& config);

// LaunchOptions::local_ranks of a command.
int num_local_ranks(const StartedRanks& started);

// wants_gpu(config). Throws Error(kBadInput) if it does not after --gpus.
bool wants_gpu(const Config& config, const StartedRanks& started);

// The device that config.device asks for, ready for ops: GPU number `gpu` of those that this process sees, or the
// CPU. Throws Error(kBadInput) when the device cannot be had, or its tuning file does not fit.
std::unique_ptr<Device> make_device(const Config& config, int gpu = 0);

// Throws Error(kBadInput), with the cheapest changes that would fit, if a rank of this run of `config` does not fit
// into the free memory of the device. `given` is what the config was read from (given_keys()). Call it before
// anything is allocated. It does not check a CPU.
void check_memory(const Config& config, const nlohmann::json& given, const Device& device, int64_t num_gpus = 1);

}  // namespace parka
