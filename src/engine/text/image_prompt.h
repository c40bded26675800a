#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/text/text_codec.h"
#include "model/vision/vision_config.h"

namespace parka {

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
// empty: that of the processor of images in the folder `processor`, or else the usual one of the tower. Throws
// Error(kBadInput) for a picture that cannot be used, for another number of <image>, and where a text has the id of
// image slots.
ImagePrompt make_image_prompt(const std::string& text, const std::vector<std::string>& paths,
                              const std::string& geometry, const std::string& processor, const VisionConfig& vision,
                              TextCodec& codec);

}  // namespace parka
