#pragma once
#include <cstdint>

namespace parka::cpu {

// Rotates one head of D elements by the angles of its position, a row of rope_table; sign -1 rotates it back.
void rotate_head(float* head, const float* cos_sin_D, float sign, int64_t D);

}  // namespace parka::cpu
