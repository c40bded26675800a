#pragma once
#include <cstdint>

namespace parka {

// In place of a target: nothing is to be predicted here, and loss and gradient are 0.
inline constexpr int32_t kIgnoreTarget = -100;

}  // namespace parka
