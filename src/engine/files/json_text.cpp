#include "engine/files/json_text.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

struct Position {
  size_t line;
  size_t column;
  std::string_view line_text;
};

// The line and column of byte number `byte` (from 1) of the text.
Position locate(std::string_view text, size_t byte) {
  const size_t offset = std::min(byte == 0 ? 0 : byte - 1, text.size());
  const std::string_view before = text.substr(0, offset);
  const size_t line = 1 + static_cast<size_t>(std::ranges::count(before, '\n'));
  const size_t newline = before.rfind('\n');
  const size_t begin = newline == std::string_view::npos ? 0 : newline + 1;
  const size_t end = std::min(text.find('\n', offset), text.size());
  std::string_view line_text = text.substr(begin, end - begin);
  line_text.remove_prefix(std::min(line_text.find_first_not_of(" \t\r"), line_text.size()));
  return {line, offset - begin + 1, line_text};
}

// The library's reason of an error, without its own prefix and position:
// "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing ..."
std::string_view reason_of(const json::exception& error) {
  std::string_view what = error.what();
  if (const size_t at = what.find("syntax error"); at != std::string_view::npos) return what.substr(at);
  if (const size_t at = what.find("] "); at != std::string_view::npos) return what.substr(at + 2);
  return what;
}

// A member whose key is new: `object` is not searched, which ordered_json would do from its beginning.
void add_member(json::object_t& object, const std::string& key) { object.emplace(key, nullptr); }
void add_member(ordered_json::object_t& object, const std::string& key) { object.push_back({key, nullptr}); }
json& last_member(json& object, const std::string& key) { return object.find(key).value(); }
ordered_json& last_member(ordered_json& object, const std::string& /*key*/) {
  return object.get_ref<ordered_json::object_t&>().back().second;
}

// Builds the tree from the parser's events, in time linear in the text: the library's own way to watch them looks
// through the parent at the end of each object. It refuses what JSON allows and we do not: repeated keys, and
// nesting so deep that code which walks the tree by recursion could run out of stack.
template <typename Json>
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view source, const std::set<std::string>& left_out) : source_(source), left_out_(left_out) {}

  Json take() { return std::move(root_); }
  std::optional<json::parse_error> syntax_error;  // of the text, with which the parser has ended

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(int64_t value) override { return add(value); }
  bool number_unsigned(uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string& /*text*/) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(typename Json::binary_t& /*value*/) override { return false; }
  bool start_object(size_t /*size*/) override { return open(Json::object()); }
  bool start_array(size_t /*size*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    Level& level = open_.back();
    const bool is_new = level.keys.insert(value).second;
    level.key = std::move(value);
    if (!is_new) {
      throw_bad_input("{}: {}: given twice; keep one", printable(source_), printable(path()));
    }
    return true;
  }

  bool parse_error(size_t /*byte*/, const std::string& /*token*/, const json::exception& error) override {
    if (const auto* syntax = dynamic_cast<const json::parse_error*>(&error)) {
      syntax_error.emplace(*syntax);
      return false;
    }
    throw_bad_input("{}: {}", printable(source_), printable(reason_of(error)));
  }

 private:
  struct Level {
    Json* value;  // null: it is left out
    std::unordered_set<std::string> keys = {};
    std::string key = {};  // whose value is being read
  };

  std::string path() const {
    std::string path;
    for (const Level& level : open_) {
      if (!path.empty()) path += '.';
      path += level.value != nullptr && level.value->is_array() ? "[]" : level.key;
    }
    return path;
  }

  // Its place in the tree; null where it is left out.
  Json* place(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Level& level = open_.back();
    if (level.value == nullptr || (open_.size() == 1 && left_out_.contains(level.key))) return nullptr;
    if (level.value->is_array()) {
      level.value->push_back(std::move(value));
      return &level.value->back();
    }
    add_member(level.value->template get_ref<typename Json::object_t&>(), level.key);
    Json& member = last_member(*level.value, level.key);
    member = std::move(value);
    return &member;
  }

  template <typename T>
  bool add(T&& value) {
    place(Json(std::forward<T>(value)));
    return true;
  }

  bool open(Json&& empty) {
    constexpr size_t kDeepest = 64;
    if (open_.size() >= kDeepest) throw_bad_input("{}: nested deeper than {}", printable(source_), kDeepest);
    open_.push_back({place(std::move(empty))});
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view source_;
  const std::set<std::string>& left_out_;
  Json root_;
  std::vector<Level> open_;
};

std::string_view without_byte_order_mark(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  return text;
}

template <typename Json>
Json build(std::string_view text, Builder<Json>& builder, JsonComments comments) {
  const bool is_whole = Json::sax_parse(text.begin(), text.end(), &builder, nlohmann::detail::input_format_t::json,
                                        /*strict=*/true, comments == JsonComments::kAllowed);
  return is_whole ? builder.take() : Json(json::value_t::discarded);
}

template <typename Json>
Json build_if_valid(std::string_view text, const std::set<std::string>& left_out) {
  try {
    Builder<Json> builder("", left_out);
    return build(without_byte_order_mark(text), builder, JsonComments::kRefused);
  } catch (const Error&) {
    return Json(json::value_t::discarded);
  }
}

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
  const std::set<std::string> none;
  Builder<json> builder(source, none);
  text = without_byte_order_mark(text);
  json parsed = build(text, builder, comments);
  if (!builder.syntax_error) return parsed;
  if (text.starts_with(kLfsPointer)) throw_bad_input("{}: {}", printable(source), kLfsAdvice);
  if (text.starts_with("PAR1") || text.starts_with("\x93NUMPY") || text.starts_with("PK\x03\x04")) {
    throw_bad_input("{}: is data and no JSON; `parka prepare` makes token files of texts, which --data takes",
                    printable(source));
  }
  const Position at = locate(text, builder.syntax_error->byte);
  throw_bad_input("{}:{}:{}: {}; the line: {}", printable(source), at.line, at.column,
                  printable(reason_of(*builder.syntax_error)),
                  at.line_text.empty() ? "(empty)" : printable(at.line_text));
}

json parse_json_if_valid(std::string_view text, const std::set<std::string>& left_out) {
  return build_if_valid<json>(text, left_out);
}

ordered_json parse_ordered_json_if_valid(std::string_view text) { return build_if_valid<ordered_json>(text, {}); }

std::optional<int64_t> parse_count(const json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return value.get<int64_t>();
}

JsonReader::JsonReader(const json& object, std::string where, std::string_view remedy)
    : object_(object), where_(std::move(where)), remedy_(remedy) {
  if (!object.is_object()) fail("is not a JSON object");
}

const json& JsonReader::member(std::string_view key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail(fmt::format("has no \"{}\"", key));
  return *found;
}

int64_t JsonReader::integer(std::string_view key, int64_t min, int64_t max) const {
  const std::optional<int64_t> value = parse_count(member(key));
  if (!value || *value < min || *value > max) {
    fail(fmt::format("\"{}\" is not an integer from {} to {}", key, min, max));
  }
  return *value;
}

std::string JsonReader::text(std::string_view key) const {
  const json& value = member(key);
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    fail(fmt::format("\"{}\" is not a string", key));
  }
  return value.get<std::string>();
}

void JsonReader::fail(std::string_view problem) const {
  throw_bad_input("{}: {}{}{}", where_, problem, remedy_.empty() ? "" : "; ", remedy_);
}

}  // namespace parka
