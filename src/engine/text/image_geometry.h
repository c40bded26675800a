#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/text/text_codec.h"
#include "model/vision/vision_config.h"

// How pictures become the squares that a model with a tower sees; scripts/image_data/pictures.py makes them.
namespace parka {

// The files that a run keeps in place of those in the folder `of_model` of its model's tokenizer, by name with
// their content: with them its processor of images makes what its data have. There is one, the
// preprocessor_config.json which parka prepare-images has left beside the first of data.train that has one,
// with the run's mean and deviation of pixels. None if the model's processor makes the same squares.
std::map<std::string, std::string> processor_of_data(const Config& config,
                                                     const std::optional<std::string>& of_model);

// Warns where the data.json of parka prepare-images beside data.train says another geometry, mean or deviation
// of pixels than prompts will have: the run learns from other pictures. Call it when the run has its tokenizer.
void warn_of_image_geometry(const Config& config);

// The images of a prompt.
struct PromptImages {
  std::vector<uint8_t> pixels;       // [n, 3, size, size]
  std::vector<int64_t> first_slots;  // [n] where in the prompt the rows of each begin
  int64_t num_slots = 0;             // rows of each
};

// A prompt of text and images.
struct ImagePrompt {
  std::vector<int32_t> tokens;  // with the id of image slots in the place of images
  PromptImages images;
};

// Puts the pictures in the files `paths` in the places of <image> in `text`, or, where it has none, in front of it,
// a line end behind each. A process of scripts/image_helper.py reads them. `geometry` is crop, pad, stretch, or
// empty: that of the processor of images in the folder `processor`, or else the tower's usual one. Throws
// Error(kBadInput) for an unusable picture, another number of <image>, and a text with the id of image slots.
ImagePrompt make_image_prompt(const std::string& text, const std::vector<std::string>& paths,
                              const std::string& geometry, const std::string& processor, const VisionConfig& vision,
                              TextCodec& codec);

}  // namespace parka
