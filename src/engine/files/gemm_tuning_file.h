#pragma once
#include <string>
#include <vector>

#include "kernels/device/gemm_tuning.h"

namespace parka {

// The file that `parka tune` writes: the chosen algorithms, with the GPU and the library version that they are for.
void write_gemm_tuning(const std::string& path, const std::vector<GemmChoice>& choices, const Device& device);

// Throws Error(kBadInput) when the file cannot be read or is for another GPU or library version.
std::vector<GemmChoice> read_gemm_tuning(const std::string& path, const Device& device);

}  // namespace parka
