#pragma once
#include "engine/config/config.h"

// How pictures become the squares that a model with a tower sees; scripts/image_data/pictures.py makes them.
namespace parka {

// Warns where the data.json of scripts/prepare_images.py beside data.train says another geometry, mean or deviation
// of pixels than prompts will have: the run would be shown other pictures than it has learned from. Call it when
// the run has its tokenizer.
void warn_of_image_geometry(const Config& config);

}  // namespace parka
