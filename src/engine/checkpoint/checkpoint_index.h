#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/files/safetensors.h"

// Which elements of which tensor lie where in the files of a checkpoint. A file says in its metadata which of its
// tensors are pieces and of what:
//   "__metadata__": {"parka_pieces": "{\"blocks.0.weight\": {\"shape\": [4096, 4096], \"begin\": 8388608}, ...}"}
// The file has the piece under the tensor's own name as a tensor of one dimension, in row-major order: elements
// `begin` and following of a tensor of that shape. With "rows": [begin, end] and "columns": [begin, end] it is that
// box of the tensor as a matrix [rows, last dimension]. Tensors not named there are whole.
namespace parka {

struct CheckpointFile {
  std::string path;
  SafetensorsHeader header;
};

struct CheckpointIndex {
  // Consecutive elements of a tensor in one file.
  struct Piece {
    size_t file = 0;
    int64_t offset = 0;  // of its first byte, from the start of the file
    ElementRange range;
  };

  std::vector<SafetensorsEntry>
      tensors;  // whole ones, in the order of the files; offset is that of the first piece
  std::vector<std::vector<Piece>> pieces;  // of each tensor, in order of elements: each element is in one of them
  std::unordered_map<std::string, size_t> by_name;
};

// The metadata of a file with these tensors; empty when all are whole.
SafetensorsMetadata describe_pieces(const std::vector<const HostTensor*>& tensors);

// Throws Error(kBadInput) when pieces contradict each other, overlap, or leave elements out.
CheckpointIndex index_tensors(const std::vector<CheckpointFile>& files);

}  // namespace parka
