#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/read_only_file.h"

namespace parka {

// A model's rules for images in its sequences.
struct ImageRules {
  int64_t token = -1;  // the id of image slots in token files; -1: there are no images
  int64_t slots = 0;   // tokens for each image
  int64_t size = 0;    // pixels of each side
  bool any() const { return token >= 0; }
  bool operator==(const ImageRules&) const = default;
};

// An image in a token file, as the file of references has it.
struct ImageReference {
  uint64_t first_token;  // of its slots
  uint64_t checksum;     // XXH3-64 of its pixels
  uint32_t shard;        // which file of pixels
  uint32_t image;        // where in that
  uint32_t slots;        // in the token file: fewer than others where a conversation is cut
  uint32_t zero;
};
static_assert(sizeof(ImageReference) == 32);

// Which images a token file has, and where, as parka prepare-images writes it beside the token file under the
// same name with .images added (docs/vision.md). All references are kept, 32 bytes each.
class ImageReferences {
 public:
  // For the token file `token_path` with so many tokens. Throws Error(kBadInput), naming the file, if it is
  // missing, damaged or contradicts itself, the token file or `rules`.
  ImageReferences(const std::string& token_path, int64_t num_tokens, const ImageRules& rules);
  static std::string path_of(const std::string& token_path) { return token_path + ".images"; }
  // The rules in the file of references, to look at data without a model. Throws as the constructor does.
  static ImageRules rules_of(const std::string& token_path);

  const ReadOnlyFile& file() const { return file_; }
  const std::vector<ImageReference>& all() const { return references_; }
  // The references with a slot among `count` tokens from `first` on, in order.
  std::span<const ImageReference> among(int64_t first, int64_t count) const;

 private:
  ReadOnlyFile file_;
  std::vector<ImageReference> references_;  // in order, without overlap
};

}  // namespace parka
