#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/read_only_file.h"

namespace parka {

// How a token file stores a token id.
enum class TokenType : uint8_t { kUint16, kUint32 };

// A list of token files, seen as one array of sequences of S tokens. A token file is a headerless stream of
// little-endian ids; OLMo calls such files ".npy". Sequence i of a file is its tokens [S*i, S*(i+1)); the remainder
// of each file is dropped, so that no sequence spans two files. Files follow each other in the order given.
class TokenFiles {
 public:
  // Throws Error(kBadInput), naming the file and what to do, if the list is empty or a file is missing, cannot be
  // read, is not a whole number of tokens, is shorter than one sequence, or has the header of numpy.save().
  TokenFiles(const std::vector<std::string>& paths, TokenType type, int64_t sequence_length, int64_t vocab_size);

  int64_t sequence_length() const { return sequence_length_; }
  int64_t num_sequences() const;
  int64_t num_tokens() const;  // of the whole sequences: what an epoch can train on

  // Writes the sequence_length() ids of sequence `sequence` to `out`. Threads may read at the same time. Throws
  // Error(kBadInput) naming file, position and id if an id is not below vocab_size, Error(kIo) if reading fails.
  void read(int64_t sequence, int32_t* out) const;

  // A hash of all that gives a sequence number its meaning: sequence length, token type, and each file's name
  // (without its folder), size, first 4 KiB and last 4 KiB. A checkpoint keeps it, to tell on resuming that the
  // data changed. A changed token in the middle of a file goes unseen: reading terabytes would take longer than it
  // is worth.
  uint64_t fingerprint() const;

 private:
  struct Entry {
    ReadOnlyFile file;
    int64_t end_sequence;  // sequences of this file and of those before it
  };

  std::vector<Entry> entries_;
  TokenType type_;
  int64_t sequence_length_;
  int64_t vocab_size_;
};

}  // namespace parka
