#pragma once
#include <cstdint>
#include <vector>

#include "data/token_files.h"

namespace parka {

// The images of a micro-batch of sequences, in the order of their slots, padded to a fixed number, so that plans
// and graphs of a step stay as they are.
struct ImageBatch {
  int64_t num_images = 0;       // that are there; the others are padding
  std::vector<uint8_t> pixels;  // [max_images, 3, size, size]; 0 in padding
  // [max_images, slots]: which token of the micro-batch [rows, S], counted through all rows, is the slot of each of
  // an image's tokens; -1 for those without one: beyond the end of a cut conversation, and in padding.
  std::vector<int32_t> positions;
};

// The images of these sequences, one for each row of a micro-batch; they have no more than `max_images`. Throws
// Error(kBadInput), naming the file, if the pixels of one are damaged, Error(kIo) if reading fails.
ImageBatch read_image_batch(const TokenFiles& files, const std::vector<int64_t>& sequences, int64_t max_images);

}  // namespace parka
