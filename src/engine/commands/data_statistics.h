#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "data/token_files.h"

namespace parka {

// What a token file holds, from reading all of it.
struct DataStatistics {
  std::string path;
  TokenFormat format = TokenFormat::kRaw;
  TokenType type = TokenType::kUint16;
  int64_t num_tokens = 0;
  int32_t min_id = 0, max_id = 0;        // 0 where there are no tokens
  std::optional<int64_t> num_documents;  // where ids, index or mask tell
  std::optional<int64_t> num_targets;    // tokens that the mask file marks; where there is one
  std::string checksum;                  // XXH3-128 of the file, as xxh128sum prints it
};

// Documents are counted by `document_end` if that is not negative: those that end; else by index or mask: those
// that begin. Throws Error(kBadInput) for an id that is not below `vocab_size`.
DataStatistics data_statistics(TokenFile file, int64_t document_end, int64_t vocab_size);

}  // namespace parka
