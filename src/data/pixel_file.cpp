#include "data/pixel_file.h"

#include <cstddef>
#include <span>
#include <string_view>

#include "core/error.h"
#include "data/xxh3.h"

namespace parka {
namespace {

constexpr std::string_view kPixelsMagic = "PARKAPIX";
constexpr int64_t kPixelsHeaderBytes = 64;

// What begins the file, little-endian; zeros fill the header.
struct PixelsHeader {
  char magic[8];
  uint32_t version, planes, height, width;
  uint64_t num_images;
};
static_assert(sizeof(PixelsHeader) == 32);

}  // namespace

PixelFile::PixelFile(const std::string& path) : file_(path) {
  PixelsHeader header{};
  if (file_.size() >= kPixelsHeaderBytes) file_.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (std::string_view(header.magic, sizeof(header.magic)) != kPixelsMagic) {
    throw_bad_input("{}: is no file of pixels; copy it again, or make it with scripts/prepare_images.py", path);
  }
  if (header.version != 1) {
    throw_bad_input("{}: has version {} of files of pixels, but only version 1 can be read; make it again", path,
                    header.version);
  }
  constexpr uint32_t kMostPixels = 1 << 14;  // of a side; no product below overflows
  const auto bytes = static_cast<uint64_t>(file_.size() - kPixelsHeaderBytes);
  const bool has_size = header.planes == 3 && header.height > 0 && header.height <= kMostPixels &&
                        header.width > 0 && header.width <= kMostPixels;
  const uint64_t image = uint64_t{3} * header.height * header.width;
  if (!has_size || bytes % image != 0 || bytes / image != header.num_images) {
    throw_bad_input("{}: its header says {} images of {} x {} x {} pixels, but {} bytes follow it; copy it again",
                    path, header.num_images, header.planes, header.height, header.width, bytes);
  }
  num_images_ = static_cast<int64_t>(header.num_images);
  height_ = header.height;
  width_ = header.width;
}

void PixelFile::read(int64_t image, uint64_t checksum, uint8_t* out) const {
  PARKA_REQUIRE(image >= 0 && image < num_images_);
  const std::span<uint8_t> pixels(out, static_cast<size_t>(image_bytes()));
  file_.read(kPixelsHeaderBytes + image * image_bytes(), std::as_writable_bytes(pixels));
  if (xxh3_64(std::as_bytes(pixels)) == checksum) return;
  throw_bad_input("{}: image {} has other pixels than when it was made; copy it again", file_.path(), image);
}

}  // namespace parka
