#include "engine/commands/argument_values.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

// "optimizer.lr" of "--optimizer.lr" and "--optimizer.lr=1": no option of a command has a dot. Empty for others.
std::string_view dotted_key(std::string_view argument) {
  if (!argument.starts_with("--")) return {};
  const std::string_view key = argument.substr(2, argument.find('=') - 2);
  const bool is_dotted =
      key.find('.') != std::string_view::npos && std::isalpha(static_cast<unsigned char>(key[0])) != 0;
  return is_dotted && key.find_first_of(" /\t\n") == std::string_view::npos ? key : std::string_view();
}

// A number with a unit of memory, or of `unit` bytes without one, as a number of `unit` bytes.
std::optional<double> parse_size(const std::string& text, double unit) {
  constexpr std::pair<std::string_view, double> kUnits[] = {{"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
                                                            {"TB", 1e12},    {"KIB", 0x1p10}, {"MIB", 0x1p20},
                                                            {"GIB", 0x1p30}, {"TIB", 0x1p40}};
  std::string upper = text;
  std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
  double factor = 1;
  for (const auto& [name, bytes] : kUnits) {
    if (!upper.ends_with(name)) continue;
    upper.resize(upper.size() - name.size());
    upper.resize(upper.find_last_not_of(' ') + 1);
    factor = bytes / unit;
  }
  const std::optional<double> number = parse_finite(upper);
  return number ? std::optional(*number * factor) : std::nullopt;
}

}  // namespace

std::vector<std::string> expand_arguments(const std::vector<std::string>& arguments) {
  std::vector<std::string> expanded;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      expanded.insert(expanded.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
      break;
    }
    const std::string_view key = dotted_key(argument);
    if (key.empty()) {
      expanded.push_back(argument);
      continue;
    }
    std::string assignment = argument.substr(2);
    if (assignment.size() == key.size()) {
      if (i + 1 == arguments.size() || arguments[i + 1].starts_with("--")) {
        throw_bad_input("command line: {}: has no value; write {}=VALUE", printable(argument), printable(argument));
      }
      assignment += "=" + arguments[++i];
    }
    expanded.insert(expanded.end(), {"--set", assignment});
  }
  if (!expanded.empty() && expanded.front() == "help") {
    expanded.erase(expanded.begin());
    expanded.emplace_back("--help");
  }
  return expanded;
}

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
  const double bytes = parse_size(text, 1).value_or(0);
  if (!(bytes >= 1 && bytes < 1e18)) {
    throw_bad_input("--shard-size: expected a size such as 5GB or 500MB, got \"{}\"", printable(text));
  }
  return static_cast<int64_t>(bytes);
}

std::string without_gigabytes(const std::string& text) {
  const std::optional<double> gigabytes = parse_size(text, 1e9);
  return gigabytes ? fmt::format("{}", *gigabytes) : text;
}

}  // namespace parka
