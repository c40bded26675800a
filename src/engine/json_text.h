#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace parka {

// Parses JSON that may hold // and /* */ comments. Throws Error(kBadInput) naming `source` and, for a syntax error,
// line, column and what stands there; also for a key given twice, nesting deeper than 64, and text after the end.
nlohmann::json parse_json_text(std::string_view text, std::string_view source);

}  // namespace parka
