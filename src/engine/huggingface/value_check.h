#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/files/safetensors.h"

namespace parka {

// Looks at the values of a tensor of a file of weights while they pass by on their way into a checkpoint. Throws
// Error(kBadInput), which names file and tensor, for what no trained weights hold: NaN or infinity, magnitudes as
// another dtype than that of the file has, and zeros as parts of a file have that were never downloaded. Rows and
// columns that are zeros, as padding and pruning leave them, are no such holes: those begin or end within a row,
// and go on in the next or begin or end with a page.
class ValueCheck {
 public:
  // `entry` lies in `file`, and both must outlive this. `may_be_zero`: as a whole, as weights may begin.
  ValueCheck(const InputFile& file, const SafetensorsEntry& entry, bool may_be_zero);
  // All bytes in their order, in pieces of whole elements of `dtype`, which may be another than that of `entry`.
  void add(DType dtype, ByteSpan piece);
  // Call after the last piece. True if the tensor has a page of rows of zeros.
  bool finish();

 private:
  void add_magnitudes(DType dtype, ByteSpan step);
  void check_magnitudes() const;
  [[noreturn]] void refuse_values(const std::string& which) const;
  void end_zeros(int64_t end);
  [[noreturn]] void refuse_hole(int64_t num_bytes) const;

  const InputFile& file_;
  const SafetensorsEntry& entry_;
  const bool may_be_zero_;
  int64_t row_bytes_ = 0;
  int64_t at_ = 0, zeros_ = 0;  // bytes that have passed by; where the zeros at their end begin
  bool has_zero_rows_ = false;
  bool is_fp16_ = false;
  double sum_ = 0;                            // of the magnitudes of what was decoded
  int64_t num_values_ = 0, num_as_bf16_ = 0;  // that are not 0; as large as bf16 looks in fp16
};

// True if a block's tensor of this name may begin as zeros: the last one of a branch does in blocks that are added
// to a trained model, as LLaMA-Pro adds them.
bool may_begin_as_zeros(const std::string& name);

// The names of tensors in a map.
template <typename Map>
std::vector<std::string> names_in(const Map& tensors) {
  std::vector<std::string> names;
  names.reserve(tensors.size());
  for (const auto& [name, place] : tensors) names.push_back(name);
  return names;
}

// For a missing tensor. Names the one that is there under a wrapper's prefix: torch.compile's "_orig_mod.".
[[noreturn]] void refuse_missing(const std::string& where, const std::string& wanted,
                                 const std::vector<std::string>& names);

}  // namespace parka
