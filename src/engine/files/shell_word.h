#pragma once
#include <string>

namespace parka {

// Text as one word of a shell, in single quotes, which keep everything but themselves; and only if it needs them.
std::string quoted(const std::string& text);
std::string shell_word(const std::string& text);

}  // namespace parka
