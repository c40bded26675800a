#pragma once
#include "model/model_config.h"

namespace parka {

// The keys that precision.recipe stands for, before keys given beside it override some of them.
PrecisionConfig precision_recipe(Recipe recipe);

// For towers and side networks, which never compute in FP8: everything that is said of it is left out.
PrecisionConfig without_fp8(const PrecisionConfig& precision);

}  // namespace parka
