#pragma once
#include <cstdint>

namespace parka::cpu {

// out[i] = exp(x[i]), vectorised; `out` may be x. Each result depends on x[i] alone, not on its place in the row.
// Within 2 units in the last place for |x| < 20 and 5 everywhere; below 2^-126 it is 0; exp(NaN) is NaN.
void exp_elements(const float* x, int64_t count, float* out);

// out[i] = 1 / (1 + exp(-x[i])); the same promises. `out` must not be x.
void sigmoid_elements(const float* x, int64_t count, float* out);

}  // namespace parka::cpu
