#pragma once
#include <map>
#include <optional>
#include <string>

#include "engine/config/config.h"

// How pictures become the squares that a model with a tower sees; scripts/image_data/pictures.py makes them.
namespace parka {

// The files that a run keeps in place of those in the folder `of_model` of its model's tokenizer, by name with
// their content: with them its processor of images makes what its data have. There is one, the
// preprocessor_config.json which scripts/prepare_images.py has left beside the first of data.train that has one,
// with the run's mean and deviation of pixels. None if the model's processor makes the same squares.
std::map<std::string, std::string> processor_of_data(const Config& config,
                                                     const std::optional<std::string>& of_model);

// Warns where the data.json of scripts/prepare_images.py beside data.train says another geometry, mean or deviation
// of pixels than prompts will have: the run would be shown other pictures than it has learned from. Call it when
// the run has its tokenizer.
void warn_of_image_geometry(const Config& config);

}  // namespace parka
