#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "data/token_files.h"
#include "engine/config/data_description.h"

namespace parka {

// The contents of a token file, found by reading all of it.
struct DataStatistics {
  std::string path;
  TokenFormat format = TokenFormat::kRaw;
  TokenType type = TokenType::kUint16;
  int64_t num_tokens = 0;
  int32_t min_id = 0, max_id = 0;        // 0 if there are no tokens
  std::optional<int64_t> num_documents;  // if ids, index or mask show it; padding of conversations is none
  std::optional<int64_t> num_targets;    // tokens that the mask file marks, if there is one
  std::optional<int64_t> num_images;     // if a file of references to images lies beside the file
  std::string checksum;                  // XXH3-128 of the file, as xxh128sum prints it
};

// Counts the documents that `document_ids` tell apart, or those that end with document_ids.end where that is given
// alone; without either id those that begin by index or mask.
// Reads the pixels of all images. Throws Error(kBadInput) for an id that is not below `vocab_size`, for files that
// are not those of `descriptions`, for images that are damaged, and for image slots without an image.
// `image_token`: the id of slots; -1: not known, and then files without images beside them are not searched for it.
DataStatistics data_statistics(TokenFile file, DataDescriptions& descriptions, const DocumentIds& document_ids,
                               int64_t vocab_size, int64_t image_token = -1);

}  // namespace parka
