#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace parka {

enum class JsonComments : uint8_t { kAllowed, kRefused };

// Parses JSON that may hold // and /* */ comments unless they are refused. Throws Error(kBadInput) naming `source`
// and, for a syntax error, line, column and what stands there; also for a key given twice, nesting deeper than 64,
// and text after the end.
nlohmann::json parse_json_text(std::string_view text, std::string_view source,
                               JsonComments comments = JsonComments::kAllowed);

bool is_control(char c);  // of ASCII: what would break or garble a line

// `text` as it may stand in a one-line message: control characters and invalid UTF-8 escaped, long text cut.
std::string printable(std::string_view text);

}  // namespace parka
