#include "data/image_references.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "data/xxh3.h"

namespace parka {
namespace {

constexpr std::string_view kReferencesMagic = "PARKAIMG";
constexpr size_t kReferencesHeaderBytes = 64;
constexpr size_t kChecksumBytes = 8;  // at the end: XXH3-64 of all before

// The beginning of the file, little-endian; zeros fill the header.
struct ReferencesHeader {
  char magic[8];
  uint32_t version, token, slots, height, width, zero;
  uint64_t num_references;
};
static_assert(sizeof(ReferencesHeader) == 40);

ReferencesHeader read_header(const ReadOnlyFile& file) {
  ReferencesHeader header{};
  const bool has_room = file.size() >= static_cast<int64_t>(kReferencesHeaderBytes + kChecksumBytes);
  if (has_room) file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (std::string_view(header.magic, sizeof(header.magic)) != kReferencesMagic) {
    throw_bad_input("{}: is no file of references to images; copy it again, or make it with parka prepare-images",
                    file.path());
  }
  return header;
}

void check_header(const std::string& path, const ReferencesHeader& header, const ImageRules& rules) {
  if (header.version != 1) {
    throw_bad_input("{}: has version {} of references to images, but only version 1 can be read; make it again",
                    path, header.version);
  }
  if (header.token == rules.token && header.slots == rules.slots && header.height == rules.size &&
      header.width == rules.size) {
    return;
  }
  throw_bad_input(
      "{}: has {} slots of id {} for each image of {} x {} pixels, but the model has {} of id {} for {} x {}; prepare "
      "the data for this model",
      path, header.slots, header.token, header.height, header.width, rules.slots, rules.token, rules.size,
      rules.size);
}

}  // namespace

ImageReferences::ImageReferences(const std::string& token_path, int64_t num_tokens, const ImageRules& rules)
    : file_(path_of(token_path)) {
  const std::string& path = file_.path();
  const ReferencesHeader header = read_header(file_);
  std::vector<std::byte> content(static_cast<size_t>(file_.size()));
  file_.read(0, content);
  const size_t end = content.size() - kChecksumBytes;
  uint64_t checksum = 0;
  std::memcpy(&checksum, content.data() + end, sizeof(checksum));
  const size_t bytes = end - kReferencesHeaderBytes;
  if (xxh3_64(std::span(content).first(end)) != checksum || bytes % sizeof(ImageReference) != 0 ||
      bytes / sizeof(ImageReference) != header.num_references) {
    throw_bad_input("{}: is damaged or not whole: its checksum does not fit; copy it again", path);
  }
  check_header(path, header, rules);
  references_.resize(static_cast<size_t>(header.num_references));
  if (bytes > 0) std::memcpy(references_.data(), content.data() + kReferencesHeaderBytes, bytes);
  uint64_t free = 0;  // the first token behind the image before
  for (const ImageReference& r : references_) {
    const bool fits = r.first_token >= free && r.slots > 0 && r.slots <= rules.slots &&
                      r.first_token <= static_cast<uint64_t>(num_tokens) &&
                      r.slots <= static_cast<uint64_t>(num_tokens) - r.first_token;
    if (!fits) {
      throw_bad_input("{}: an image with {} slots from token {} on does not fit {}; the two do not belong together",
                      path, r.slots, r.first_token, token_path);
    }
    free = r.first_token + r.slots;
  }
}

ImageRules ImageReferences::rules_of(const std::string& token_path) {
  const ReferencesHeader header = read_header(ReadOnlyFile(path_of(token_path)));
  return {.token = header.token, .slots = header.slots, .size = header.height};
}

std::span<const ImageReference> ImageReferences::among(int64_t first, int64_t count) const {
  const auto begin = static_cast<uint64_t>(first), end = static_cast<uint64_t>(first + count);
  const auto from = std::partition_point(references_.begin(), references_.end(),
                                         [&](const ImageReference& r) { return r.first_token + r.slots <= begin; });
  const auto to =
      std::partition_point(from, references_.end(), [&](const ImageReference& r) { return r.first_token < end; });
  return {from, to};
}

}  // namespace parka
