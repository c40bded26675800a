#include "engine/commands/argument_values.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "engine/files/json_text.h"

namespace parka {

std::optional<double> parse_finite(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::vector<int32_t> parse_token_list(const std::string& text) {
  std::vector<int32_t> tokens;
  const char *at = text.data(), *const end = at + text.size();
  while (true) {
    int32_t token = 0;
    const auto [next, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (next != end && *next != ',')) {
      throw_bad_input("--prompt-tokens: expected token ids like 1,2,3, got \"{}\"", printable(text));
    }
    tokens.push_back(token);
    if (next == end) return tokens;
    at = next + 1;
  }
}

int64_t parse_byte_size(const std::string& text) {
  constexpr std::array<std::pair<std::string_view, double>, 9> kUnits{{{"", 1},
                                                                       {"KB", 1e3},
                                                                       {"MB", 1e6},
                                                                       {"GB", 1e9},
                                                                       {"TB", 1e12},
                                                                       {"KIB", 0x1p10},
                                                                       {"MIB", 0x1p20},
                                                                       {"GIB", 0x1p30},
                                                                       {"TIB", 0x1p40}}};
  double number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(rest, text.data() + text.size());
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  const auto found = std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& u) { return u.first == unit; });
  const double bytes = found == kUnits.end() ? 0 : number * found->second;
  if (error != std::errc() || !(bytes >= 1 && bytes < 1e18)) {
    throw_bad_input("--shard-size: expected a size such as 5GB or 500MB, got \"{}\"", printable(text));
  }
  return static_cast<int64_t>(bytes);
}

DrillPoint parse_drill(const std::string& text) {
  DrillPoint drill;
  const char* const end = text.data() + text.size();
  const auto [colon, step_error] = std::from_chars(text.data(), end, drill.step);
  const bool has_colon = step_error == std::errc() && colon != end && *colon == ':';
  const char* const point_text = has_colon ? colon + 1 : end;
  const auto [rest, point_error] = std::from_chars(point_text, end, drill.point);
  if (!has_colon || point_error != std::errc() || rest != end || drill.step < 1 || drill.point < 1) {
    throw_bad_input("--drill-kill-in-save: expected STEP:POINT, two numbers from 1, got \"{}\"", printable(text));
  }
  return drill;
}

}  // namespace parka
