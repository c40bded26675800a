#pragma once
#include <memory>

#include "engine/config.h"
#include "kernels/device.h"

namespace parka {

// The device that config.device asks for, ready for ops. `auto` takes a GPU where there is one, but the CPU, with a
// warning, for a config that needs what the GPU cannot do. Throws Error(kBadInput) when the device cannot be had,
// or its tuning file does not fit.
std::unique_ptr<Device> make_device(const Config& config);

// Throws Error(kBadInput), with what would fit, when a run of `config` does not fit into the memory that is free on
// the device. To be asked before anything is allocated. The CPU is not asked.
void check_memory(const Config& config, const Device& device);

}  // namespace parka
