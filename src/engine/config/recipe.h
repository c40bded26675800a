#pragma once
#include "engine/config/config.h"

namespace parka {

// Sets every key that precision.recipe has a say in: the whole precision section, and optimizer.states,
// optimizer.master and optimizer.gradient.
void apply_recipe(Recipe recipe, Config& config);

}  // namespace parka
