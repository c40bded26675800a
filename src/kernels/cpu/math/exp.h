#pragma once
#include <cstdint>

namespace parka::cpu {

// out[i] = exp(x[i]), vectorised; `out` may be x. Each result depends on x[i] alone, not on its place in the row,
// so a value computed again is equal bit for bit. Within 2 units in the last place for |x| < 20 and 5 everywhere;
// results below 2^-126 are 0; exp(NaN) is NaN.
void exp_elements(const float* x, int64_t count, float* out);

// out[i] = 1 / (1 + exp(-x[i])); the same promises. `out` must not be x.
void sigmoid_elements(const float* x, int64_t count, float* out);

}  // namespace parka::cpu
