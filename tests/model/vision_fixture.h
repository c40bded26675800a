#pragma once
#include <map>
#include <string>

#include "model/vision/vision_tower.h"

namespace parka::test {

// The tower that a fixture of transformers' vision models says it has; of class tokens it does not say in all of
// them.
inline TowerConfig fixture_tower(const std::map<std::string, std::string>& metadata) {
  const auto number = [&](const char* key) { return std::stoll(metadata.at(key)); };
  const bool is_clip = metadata.at("tower") == "clip";
  TowerConfig tower;
  tower.kind = is_clip ? TowerKind::kClip : TowerKind::kSiglip;
  tower.activation = is_clip ? Activation::kQuickGelu : Activation::kGeluTanh;
  tower.width = number("width");
  tower.num_layers = number("num_layers");
  tower.num_heads = number("num_heads");
  tower.d_ffn = number("d_ffn");
  tower.image_size = number("image_size");
  tower.patch_size = number("patch_size");
  tower.norm_eps = std::stod(metadata.at("norm_eps"));
  tower.feature_layer = number("feature_layer");
  if (!is_clip) tower.pixel_mean = tower.pixel_deviation = {0.5, 0.5, 0.5};
  return tower;
}

}  // namespace parka::test
