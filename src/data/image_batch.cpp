#include "data/image_batch.h"

#include <algorithm>

#include "core/error.h"

namespace parka {

ImageBatch read_image_batch(const TokenFiles& files, const std::vector<int64_t>& sequences, int64_t max_images) {
  const ImageRules& rules = files.rules().images;
  PARKA_REQUIRE(rules.any() && max_images >= 0);
  const int64_t S = files.sequence_length(), bytes = 3 * rules.size * rules.size;
  ImageBatch batch;
  batch.pixels.resize(static_cast<size_t>(max_images * bytes));
  batch.positions.assign(static_cast<size_t>(max_images * rules.slots), -1);
  for (size_t row = 0; row < sequences.size(); ++row) {
    for (const ImagePlace& place : files.images_of(sequences[row])) {
      PARKA_REQUIRE(batch.num_images < max_images);
      files.read_pixels(place, batch.pixels.data() + batch.num_images * bytes);
      int32_t* positions = batch.positions.data() + batch.num_images * rules.slots;
      for (int64_t k = std::max<int64_t>(0, -place.first); k < place.slots && place.first + k < S; ++k) {
        positions[k] = static_cast<int32_t>(static_cast<int64_t>(row) * S + place.first + k);
      }
      ++batch.num_images;
    }
  }
  return batch;
}

}  // namespace parka
