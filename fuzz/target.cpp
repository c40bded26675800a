#include "fuzz/target.h"

#include <algorithm>
#include <filesystem>

#include "engine/files/json_text.h"

namespace parka::fuzz {

void check_refusal(const Error& error) {
  const std::string_view what = error.what();
  require(error.code() == ExitCode::kBadInput,
          fmt::format("refused with code {}: {}", static_cast<int>(error.code()), what));
  require(!what.empty() && std::none_of(what.begin(), what.end(), is_control),
          fmt::format("the message is not one line: {}", what));
}

std::vector<std::string_view> parts_of(std::string_view input, size_t count) {
  constexpr std::string_view kDivider = "\n%%\n";
  std::vector<std::string_view> parts;
  while (parts.size() + 1 < count) {
    const size_t at = std::min(input.find(kDivider), input.size());
    parts.push_back(input.substr(0, at));
    input.remove_prefix(std::min(at + kDivider.size(), input.size()));
  }
  parts.push_back(input);
  return parts;
}

const test::TemporaryFolder& folder() {
  static const test::TemporaryFolder made;
  return made;
}

std::string place_file(const std::string& name, std::string_view content) {
  const std::string path = folder() / name;
  if (content.empty()) {
    std::filesystem::remove(path);
  } else {
    test::write_file(path, std::string(content));
  }
  return path;
}

}  // namespace parka::fuzz
