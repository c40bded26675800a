#include "data/image_files.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "data/xxh3.h"

namespace parka {

void ImageFiles::add(const std::string& token_path, int64_t num_tokens) {
  Entry& entry = entries_.emplace_back();
  if (!file_exists(ImageReferences::path_of(token_path))) return;
  entry.references.emplace(token_path, num_tokens, rules_);
  const std::filesystem::path folder = std::filesystem::path(token_path).parent_path();
  for (const ImageReference& r : entry.references->all()) {
    auto found = entry.pixel_files.find(r.shard);
    if (found == entry.pixel_files.end()) {
      const std::string path = (folder / fmt::format("images-{:05}.pixels", r.shard)).string();
      found = entry.pixel_files.emplace(r.shard, open_pixels(path)).first;
    }
    const PixelFile& pixels = pixel_files_[found->second];
    if (r.image >= static_cast<uint64_t>(pixels.num_images())) {
      throw_bad_input("{}: has {} images, but {} names image {} of it; the two do not belong together",
                      pixels.file().path(), pixels.num_images(), entry.references->file().path(), r.image);
    }
  }
}

// Token files of the same folder share files of pixels.
size_t ImageFiles::open_pixels(const std::string& path) {
  const auto known = std::find_if(pixel_files_.begin(), pixel_files_.end(),
                                  [&](const PixelFile& other) { return other.file().path() == path; });
  if (known != pixel_files_.end()) return static_cast<size_t>(known - pixel_files_.begin());
  PixelFile file(path);
  if (file.height() != rules_.size || file.width() != rules_.size) {
    throw_bad_input("{}: has images of {} x {} pixels, but the model sees {} x {}; prepare the data for this model",
                    path, file.height(), file.width(), rules_.size, rules_.size);
  }
  pixel_files_.push_back(std::move(file));
  return pixel_files_.size() - 1;
}

std::vector<ImagePlace> ImageFiles::in_sequence(size_t token_file, int64_t first_token,
                                                int64_t sequence_length) const {
  const Entry& entry = entries_.at(token_file);
  std::vector<ImagePlace> places;
  if (!entry.references) return places;
  for (const ImageReference& r : entry.references->among(first_token, sequence_length)) {
    places.push_back({static_cast<int64_t>(r.first_token) - first_token, int64_t{r.slots},
                      entry.pixel_files.at(r.shard), int64_t{r.image}, r.checksum});
  }
  return places;
}

int64_t ImageFiles::most_in_a_sequence(size_t token_file, int64_t num_sequences, int64_t sequence_length) const {
  const Entry& entry = entries_.at(token_file);
  if (!entry.references) return 0;
  std::vector<int64_t> counts(static_cast<size_t>(num_sequences), 0);
  for (const ImageReference& r : entry.references->all()) {
    const auto first = static_cast<int64_t>(r.first_token), last = first + int64_t{r.slots} - 1;
    for (int64_t s = first / sequence_length; s <= last / sequence_length && s < num_sequences; ++s) {
      ++counts[static_cast<size_t>(s)];
    }
  }
  return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
}

void ImageFiles::check_slots(size_t token_file, const std::string& token_path, int64_t first_token,
                             const std::vector<ImagePlace>& places, const int32_t* tokens,
                             int64_t sequence_length) const {
  auto place = places.begin();
  for (int64_t t = 0; t < sequence_length; ++t) {
    while (place != places.end() && t >= place->first + place->slots) ++place;
    const bool in_image = place != places.end() && t >= place->first;
    if (in_image == (int64_t{tokens[t]} == rules_.token)) continue;
    const std::string references = ImageReferences::path_of(token_path);
    if (in_image) {
      throw_bad_input("{}: token {} is id {}, but {} has an image there; the two do not belong together",
                      token_path, first_token + t, tokens[t], references);
    }
    if (!entries_.at(token_file).references) {
      throw_bad_input(
          "{}: token {} has the id of image slots, {}, and the file has no images; if they were left behind, copy {} "
          "too, or else make the file again with the tokenizer of this model",
          token_path, first_token + t, rules_.token, references);
    }
    throw_bad_input("{}: token {} has the id of image slots, {}, but {} has no image there; copy both again",
                    token_path, first_token + t, rules_.token, references);
  }
}

void ImageFiles::read(const ImagePlace& place, uint8_t* out) const {
  pixel_files_.at(place.pixel_file).read(place.image, place.checksum, out);
}

std::vector<const ReadOnlyFile*> ImageFiles::files() const {
  std::vector<const ReadOnlyFile*> all;
  for (const Entry& entry : entries_) {
    if (entry.references) all.push_back(&entry.references->file());
  }
  for (const PixelFile& file : pixel_files_) all.push_back(&file.file());
  return all;
}

namespace {

constexpr std::string_view kPixelsMagic = "PARKAPIX";
constexpr int64_t kPixelsHeaderBytes = 64;

// The beginning of the file, little-endian; zeros fill the header.
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
    throw_bad_input("{}: is no file of pixels; copy it again, or make it with parka prepare-images", path);
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
