#pragma once
#include <cstdint>

namespace parka {

// How many tokens one forward works on. Row t of an activation is position t % sequence_length of sequence
// t / sequence_length.
struct BatchShape {
  int64_t num_sequences = 0;
  int64_t sequence_length = 0;
  bool separate_documents = false;  // attention stays within documents, whose beginnings come with the batch
  int64_t num_tokens() const { return num_sequences * sequence_length; }
  bool operator==(const BatchShape&) const = default;
};

}  // namespace parka
