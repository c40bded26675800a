#include "engine/files/json_text.h"

#include <algorithm>
#include <set>
#include <vector>

#include "core/error.h"

namespace parka {
namespace {

using nlohmann::json;

struct Position {
  size_t line;
  size_t column;
  std::string_view line_text;
};

// Where byte number `byte` (from 1) of the text stands.
Position locate(std::string_view text, size_t byte) {
  const size_t offset = std::min(byte == 0 ? 0 : byte - 1, text.size());
  const std::string_view before = text.substr(0, offset);
  const size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n'));
  const size_t newline = before.rfind('\n');
  const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
  const size_t end = std::min(text.find('\n', offset), text.size());
  std::string_view line_text = text.substr(begin, end - begin);
  line_text.remove_prefix(std::min(line_text.find_first_not_of(" \t\r"), line_text.size()));
  return {line, offset - begin + 1, line_text};
}

// What the library says went wrong, without its own prefix and position:
// "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing ..."
std::string_view reason_of(const json::exception& error) {
  std::string_view what = error.what();
  if (const size_t at = what.find("syntax error"); at != std::string_view::npos) return what.substr(at);
  if (const size_t at = what.find("] "); at != std::string_view::npos) return what.substr(at + 2);
  return what;
}

// Watches the parser's events for what JSON allows and we do not: repeated keys, and nesting so deep that code
// which walks the tree by recursion could run out of stack.
class StructureCheck {
 public:
  explicit StructureCheck(std::string_view source) : source_(source) {}

  bool operator()(int depth, json::parse_event_t event, const json& parsed) {
    constexpr int kDeepest = 64;
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kDeepest) throw_bad_input("{}: nested deeper than {}", printable(source_), kDeepest);
        open_.push_back({{}, event == json::parse_event_t::array_start ? "[]" : ""});
        break;
      case json::parse_event_t::key: add_key(parsed.get_ref<const std::string&>()); break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end: open_.pop_back(); break;
      case json::parse_event_t::value: break;
    }
    return true;
  }

 private:
  struct Level {
    std::set<std::string> keys;
    std::string current;  // the key whose value is being read
  };

  void add_key(const std::string& key) {
    open_.back().current = key;
    if (open_.back().keys.insert(key).second) return;
    std::string path;
    for (const Level& level : open_) {
      if (!path.empty()) path += '.';
      path += level.current;
    }
    throw_bad_input("{}: {}: given twice; keep one", printable(source_), printable(path));
  }

  std::string_view source_;
  std::vector<Level> open_;
};

}  // namespace

bool is_utf8(std::string_view text) {
  try {
    return !json(text).dump().empty();
  } catch (const json::type_error&) {
    return false;
  }
}

std::string recordable_path(std::string path) {
  if (is_utf8(path)) return path;
  throw_bad_input("{}: its name is not UTF-8, and checkpoints record it as such; rename it", printable(path));
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string printable(std::string_view text) {
  constexpr size_t kLongest = 100;
  size_t length = std::min(text.size(), kLongest);
  while (length > 0 && length < text.size() && (text[length] & 0xC0) == 0x80) --length;  // not inside a character
  // There and back through the library, which replaces what is not UTF-8.
  const json cut = std::string(text.substr(0, length));
  const auto valid = json::parse(cut.dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
  std::string shown;
  for (const char c : valid) shown += is_control(c) ? fmt::format("\\x{:02x}", c) : std::string(1, c);
  return length < text.size() ? shown + "..." : shown;
}

json parse_json_text(std::string_view text, std::string_view source, JsonComments comments) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  StructureCheck check(source);
  // Passed by reference: the parser copies its callback.
  const auto callback = [&check](int depth, json::parse_event_t event, json& parsed) {
    return check(depth, event, parsed);
  };
  try {
    return json::parse(text, callback, /*allow_exceptions=*/true, comments == JsonComments::kAllowed);
  } catch (const json::parse_error& error) {
    const Position at = locate(text, error.byte);
    throw_bad_input("{}:{}:{}: {}; the line: {}", printable(source), at.line, at.column,
                    printable(reason_of(error)), at.line_text.empty() ? "(empty)" : printable(at.line_text));
  } catch (const json::exception& error) {
    throw_bad_input("{}: {}", printable(source), printable(reason_of(error)));
  }
}

}  // namespace parka
