#pragma once
#include <string>

#include "engine/config/config.h"

// How pictures become the squares that a model with a tower sees; scripts/image_data/pictures.py makes them.
namespace parka {

// "crop", "pad" or "stretch": that of preprocessor_config.json or processor_config.json in the folder, as
// scripts/image_helper.py reads them, or else with which towers of that kind are trained. The folder may be empty,
// for none.
std::string image_geometry(const std::string& folder, TowerKind kind);

// Warns where the data.json of scripts/prepare_images.py beside data.train says another geometry, mean or deviation
// of pixels than prompts will have: the run would be shown other pictures than it has learned from. Call it when
// the run has its tokenizer.
void warn_of_image_geometry(const Config& config);

}  // namespace parka
