#pragma once
#include <string_view>

namespace parka {

// True if code for one of `architectures` runs on a GPU of compute capability major.minor. They are what
// PARKA_CUDA_ARCHITECTURES lists, with commas between:
// - "80" is machine code, which runs on later minor versions of the same major one too;
// - "90a" is machine code that runs on exactly this version;
// - "90-virtual" is PTX, which the driver of any GPU of this version or a later one compiles when it loads it.
bool runs_on_gpu(std::string_view architectures, int major, int minor);

// True if the code that runs there, the latest that can, is of compute capability `version` (90: 9.0) or later.
bool runs_code_of(int version, std::string_view architectures, int major, int minor);

}  // namespace parka
