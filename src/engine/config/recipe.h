#pragma once
#include <string>

#include "engine/config/config.h"

namespace parka {

// Sets every key that depends on precision.recipe: the whole precision section, and optimizer.states,
// optimizer.master and optimizer.gradient.
void apply_recipe(Recipe recipe, Config& config);

// True if recipes set the key, of which `path` is the dotted name, to different values.
bool depends_on_recipe(const std::string& path);

}  // namespace parka
