#pragma once
#include <string_view>

#include <nlohmann/json.hpp>

namespace parka {

// Parses one JSON document out of bytes that nobody has vouched for. Unlike the library's own parse it refuses
// duplicate keys, of which the library silently keeps the last, and nesting deeper than `max_depth`, which would
// let a small file take much memory. `where` (a path) begins every message. Throws Error(kBadInput).
nlohmann::json parse_strict_json(std::string_view text, std::string_view where, int max_depth);

// `text` from a file for use in a one-line message: quoted, control characters replaced, long text shortened.
std::string in_quotes(std::string_view text);

}  // namespace parka
