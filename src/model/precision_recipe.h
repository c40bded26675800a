#pragma once
#include "model/model_config.h"

namespace parka {

// What precision.recipe stands for, before keys given beside it override parts of it.
PrecisionConfig precision_recipe(Recipe recipe);

}  // namespace parka
