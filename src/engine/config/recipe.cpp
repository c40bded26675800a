#include "engine/config/recipe.h"

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

}  // namespace

void apply_recipe(Recipe recipe, Config& config) {
  config.precision = precision_recipe(recipe);
  config.optimizer.states = states_of(recipe);
  config.optimizer.master = master_of(recipe);
  config.optimizer.gradient = DType::kF32;
}

}  // namespace parka
