#include "engine/files/shell_word.h"

#include <algorithm>
#include <cctype>
#include <string_view>

namespace parka {

std::string quoted(const std::string& text) {
  std::string inside;
  for (const char c : text) inside += c == '\'' ? "'\\''" : std::string(1, c);
  return "'" + inside + "'";
}

std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain = "-_./=:,+@%";
  const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [&](unsigned char c) {
    return std::isalnum(c) != 0 || kPlain.find(static_cast<char>(c)) != std::string_view::npos;
  });
  return plain ? text : quoted(text);
}

}  // namespace parka
