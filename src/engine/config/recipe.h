#pragma once
#include "engine/config/config.h"

namespace parka {

// Sets every key that depends on precision.recipe: the whole precision section, and optimizer.states,
// optimizer.master and optimizer.gradient.
void apply_recipe(Recipe recipe, Config& config);

}  // namespace parka
