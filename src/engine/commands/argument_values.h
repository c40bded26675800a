#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Parsers of command-line values. Functions that name an option throw Error(kBadInput) for any other text.
namespace parka {

// The whole text as a finite number; nullopt if it is not one.
std::optional<double> parse_finite(const std::string& text);

// --prompt-tokens: "1,2,3".
std::vector<int32_t> parse_token_list(const std::string& text);

// --shard-size: "5GB", "500MB", "1GiB", "300000", as transformers reads max_shard_size.
int64_t parse_byte_size(const std::string& text);

// --drill-kill-in-save: "STEP:POINT", two numbers from 1.
struct DrillPoint {
  int64_t step = 0, point = 0;
};
DrillPoint parse_drill(const std::string& text);

}  // namespace parka
