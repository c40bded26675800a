#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "data/image_references.h"
#include "data/xxh3.h"
#include "tests/data/token_file_fixtures.h"

// Files of images, written here as scripts/prepare_images.py writes them.
namespace parka::test {

inline constexpr int64_t kImageSize = 2, kImageSlots = 3, kImageBytes = 3 * kImageSize * kImageSize;
inline constexpr uint16_t kSlot = 99;
inline const ImageRules kImageRules{.token = kSlot, .slots = kImageSlots, .size = kImageSize};

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Every image has other pixels.
inline std::vector<uint8_t> pixels_of_image(int number) {
  std::vector<uint8_t> pixels;
  for (int64_t i = 0; i < kImageBytes; ++i)
    pixels.push_back(static_cast<uint8_t>(number * 16 + static_cast<int>(i)));
  return pixels;
}

// A file with the images first, first + 1, ...
inline std::string pixel_file(int first, int count) {
  std::string bytes = "PARKAPIX";
  for (const uint32_t field : {1u, 3u, 2u, 2u}) append(bytes, field);
  append(bytes, static_cast<uint64_t>(count));
  bytes.resize(64, '\0');
  for (int i = 0; i < count; ++i) {
    for (const uint8_t value : pixels_of_image(first + i)) append(bytes, value);
  }
  return bytes;
}

inline ImageReference reference(int64_t first_token, int number, uint32_t shard, uint32_t image,
                                uint32_t slots = kImageSlots) {
  const std::vector<uint8_t> pixels = pixels_of_image(number);
  return {static_cast<uint64_t>(first_token), xxh3_64(std::as_bytes(std::span(pixels))), shard, image, slots, 0};
}

inline std::string sealed(std::string bytes) {
  append(bytes, xxh3_64(std::as_bytes(std::span(bytes))));
  return bytes;
}

inline std::string references_without_checksum(const std::vector<ImageReference>& references) {
  std::string bytes = "PARKAIMG";
  for (const uint32_t field : {1u, uint32_t{kSlot}, 3u, 2u, 2u, 0u}) append(bytes, field);
  append(bytes, static_cast<uint64_t>(references.size()));
  bytes.resize(64, '\0');
  for (const ImageReference& r : references) append(bytes, r);
  return bytes;
}

inline std::string reference_file(const std::vector<ImageReference>& references) {
  return sealed(references_without_checksum(references));
}

}  // namespace parka::test
