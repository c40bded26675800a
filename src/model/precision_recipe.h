#pragma once
#include "model/model_config.h"

namespace parka {

// The keys that precision.recipe stands for, before keys given beside it override some of them.
PrecisionConfig precision_recipe(Recipe recipe);

// For parts of a model that compute in the compute format under every recipe, towers and side networks: everything
// that is said of FP8 is left out.
PrecisionConfig without_fp8(const PrecisionConfig& precision);

}  // namespace parka
