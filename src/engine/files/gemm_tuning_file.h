#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "kernels/device/gemm_tuning.h"

namespace parka {

// The file of `parka tune`: the chosen algorithms, with the GPU and the library version that they are for.
struct GemmTuningFile {
  std::string gpu, library;
  std::vector<GemmChoice> choices;

  bool is_for(const Device& device) const;
};

std::string gemm_tuning_text(const std::vector<GemmChoice>& choices, const Device& device);
// `source` names the text in messages. Throws Error(kBadInput) for text that is no such file.
GemmTuningFile parse_gemm_tuning(std::string_view text, const std::string& source);
// Throws Error(kBadInput) when the file cannot be read, too.
GemmTuningFile load_gemm_tuning(const std::string& path);

// Throws Error(kBadInput) that names `source` unless the file is for this GPU and library version.
void require_for(const GemmTuningFile& file, const Device& device, const std::string& source);

void write_gemm_tuning(const std::string& path, const std::vector<GemmChoice>& choices, const Device& device);
// Throws Error(kBadInput) when the file cannot be read or is for another GPU or library version.
std::vector<GemmChoice> read_gemm_tuning(const std::string& path, const Device& device);

}  // namespace parka
