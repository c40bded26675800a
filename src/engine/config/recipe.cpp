#include "engine/config/recipe.h"

#include <algorithm>

#include "engine/config/config_table.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

StateFormat states_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::kCoatOptimizer:
    case Recipe::kCoat:
    case Recipe::kParka: return StateFormat::kFp8Expanded;
    default: return StateFormat::kFp32;
  }
}

MasterForm master_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::kFp32: return MasterForm::kNone;
    case Recipe::kParka: return MasterForm::kFp32Split;
    default: return MasterForm::kFp32;
  }
}

std::string value_text(Config& config, const std::string& path) {
  return get_field(*make_config_table(config).find(path)).dump();
}

}  // namespace

void apply_recipe(Recipe recipe, Config& config) {
  config.precision = precision_recipe(recipe);
  config.optimizer.states = states_of(recipe);
  config.optimizer.master = master_of(recipe);
  config.optimizer.gradient = DType::kF32;
}

bool depends_on_recipe(const std::string& path) {
  Config standard;
  if (path == "precision.recipe") return false;
  const std::string value = value_text(standard, path);
  return std::any_of(std::begin(EnumNames<Recipe>::kAll), std::end(EnumNames<Recipe>::kAll),
                     [&](const auto& entry) {
                       Config config;
                       apply_recipe(entry.value, config);
                       return value_text(config, path) != value;
                     });
}

}  // namespace parka
