#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

// What tests of imported and exported models share.
namespace parka::test {

// Models that transformers wrote (tests/fixtures/make_huggingface_fixtures.py).
inline const std::string kFixtures = std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/huggingface/";

// The message of the Error(kBadInput) that `function` throws; empty if it throws none.
template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return {};
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  return largest;
}

inline std::map<std::string, std::string> files_in(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

// Names of the files that differ or are in one folder only.
inline std::vector<std::string> differing(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::map<std::string, std::string> of_a = files_in(a), of_b = files_in(b);
  std::vector<std::string> names;
  for (const auto& [name, content] : of_a) {
    if (!of_b.contains(name) || of_b[name] != content) names.push_back(name);
  }
  for (const auto& [name, content] : of_b) {
    if (!of_a.contains(name)) names.push_back(name);
  }
  return names;
}

}  // namespace parka::test
