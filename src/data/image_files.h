#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "data/image_references.h"
#include "data/read_only_file.h"

namespace parka {

// A file of pixels, as parka prepare-images makes it: images of one size, each as planes of red, green and
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

// An image with slots in a sequence.
struct ImagePlace {
  int64_t first;      // the position of its first slot; negative where the image begins in the sequence before
  int64_t slots;      // from there on, which may be beyond the end of the sequence
  size_t pixel_file;  // of ImageFiles
  int64_t image;      // in that file
  uint64_t checksum;  // of its pixels
};

// The images of a list of token files. Threads may read at the same time.
class ImageFiles {
 public:
  explicit ImageFiles(const ImageRules& rules) : rules_(rules) {}

  // Adds the images of the next token file: opens its file of references, and the files of pixels that these name,
  // in the same folder. A token file without a file of references has no images. Throws Error(kBadInput), naming
  // the file and what to do, for files that are missing, damaged or do not fit.
  void add(const std::string& token_path, int64_t num_tokens);

  // The images with a slot among the S tokens from `first_token` on of the `token_file`-th token file that was
  // added.
  std::vector<ImagePlace> in_sequence(size_t token_file, int64_t first_token, int64_t sequence_length) const;
  // The most that a sequence [S i, S (i + 1)) of that token file has.
  int64_t most_in_a_sequence(size_t token_file, int64_t num_sequences, int64_t sequence_length) const;

  // Throws Error(kBadInput), naming the token file's token, unless in this sequence the slots of `places`, and only
  // they, have the id of slots.
  void check_slots(size_t token_file, const std::string& token_path, int64_t first_token,
                   const std::vector<ImagePlace>& places, const int32_t* tokens, int64_t sequence_length) const;

  // Writes uint8 [3, size, size] to `out`. Throws as PixelFile::read() does.
  void read(const ImagePlace& place, uint8_t* out) const;

  // The files of references, in order, and those of pixels.
  std::vector<const ReadOnlyFile*> files() const;

 private:
  size_t open_pixels(const std::string& path);

  ImageRules rules_;
  struct Entry {
    std::optional<ImageReferences> references;
    std::map<uint32_t, size_t> pixel_files;  // by the number that references have
  };
  std::vector<Entry> entries_;
  std::vector<PixelFile> pixel_files_;
};

}  // namespace parka
