#pragma once
#include <cstdint>
#include <vector>

#include "data/read_only_file.h"

namespace parka {

enum class TokenType : uint8_t;

// The pages of a file that are looked at to tell what it holds: a few, from its beginning to its end, each of which
// begins at a multiple of 16 bytes. They are the whole of a small file.
struct FilePage {
  int64_t offset, bytes;
};
std::vector<FilePage> sample_pages(int64_t file_bytes);

// Throws Error(kBadInput), saying what the file is and what to do, if it cannot be one of raw ids of `type` in such
// a vocabulary: it begins as another format does, is text, or its numbers are no ids or of another width or byte
// order. Looks at sample_pages() alone.
void check_raw_content(const ReadOnlyFile& file, TokenType type, int64_t vocab_size);

}  // namespace parka
