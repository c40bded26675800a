#pragma once
#include <cstdint>

namespace parka {

// A target with this value is ignored: nothing is predicted there, and loss and gradient are 0.
inline constexpr int32_t kIgnoreTarget = -100;

}  // namespace parka
