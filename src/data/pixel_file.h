#pragma once
#include <cstdint>
#include <string>

#include "data/read_only_file.h"

namespace parka {

// A file of pixels, as scripts/prepare_images.py makes it: images of one size, each as planes of red, green and
// blue (docs/vision.md). Threads may read at the same time.
class PixelFile {
 public:
  // Throws Error(kBadInput), naming the file, if it is missing, is no file of pixels, or its size contradicts its
  // header.
  explicit PixelFile(const std::string& path);

  const ReadOnlyFile& file() const { return file_; }
  int64_t num_images() const { return num_images_; }
  int64_t height() const { return height_; }
  int64_t width() const { return width_; }
  int64_t image_bytes() const { return 3 * height_ * width_; }

  // Writes [3, height, width] of an image to `out`. Throws Error(kBadInput), naming file and image, if the XXH3-64
  // of its pixels is not `checksum`, Error(kIo) if reading fails.
  void read(int64_t image, uint64_t checksum, uint8_t* out) const;

 private:
  ReadOnlyFile file_;
  int64_t num_images_ = 0, height_ = 0, width_ = 0;
};

}  // namespace parka
