#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/token_files.h"
#include "tests/support/temporary_folder.h"

namespace parka::test {

template <typename Token>
void write_tokens(const std::string& path, const std::vector<Token>& ids) {
  write_file(path, std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Token)));
}

inline std::vector<int32_t> read_sequence(const TokenFiles& files, int64_t sequence) {
  std::vector<int32_t> ids(static_cast<size_t>(files.sequence_length()), -1);
  files.read(sequence, ids.data());
  return ids;
}

// Runs `action` and returns its Error; fails the test if it throws none.
template <typename Action>
Error error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("expected an Error");
}

inline bool contains(const Error& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

}  // namespace parka::test
