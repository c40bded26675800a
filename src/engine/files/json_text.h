#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "engine/files/json.h"

namespace parka {

enum class JsonComments : uint8_t { kAllowed, kRefused };

// Parses JSON, with // and /* */ comments unless they are refused. Throws Error(kBadInput), which names `source`,
// for a syntax error, with its place, a key given twice, nesting deeper than 64, and text after the end.
json parse_json_text(std::string_view text, std::string_view source,
                     JsonComments comments = JsonComments::kAllowed);

// The same for text that may be anything: text that is no JSON by these rules comes back as
// json::value_t::discarded. The members in `left_out` of an outermost object are not kept.
json parse_json_if_valid(std::string_view text, const std::set<std::string>& left_out = {});
// With the members of objects in the order of the text.
ordered_json parse_ordered_json_if_valid(std::string_view text);

bool is_utf8(std::string_view text);  // text that is not could not be written as JSON

// `path` for what is written as JSON. Throws Error(kBadInput) if it is not UTF-8.
std::string recordable_path(std::string path);

bool is_control(char c);  // an ASCII control character, which would break or garble a line

// `text` for a one-line message: control characters and invalid UTF-8 escaped, long text shortened.
std::string printable(std::string_view text);

// A JSON value as an integer from 0 to 2^63 - 1; nullopt for others.
std::optional<int64_t> parse_count(const json& value);

// Typed reads of an object's members. All of its messages begin with `where` and end with `remedy`.
class JsonReader {
 public:
  JsonReader(const json& object, std::string where, std::string_view remedy = {});

  const json& member(std::string_view key) const;
  int64_t integer(std::string_view key, int64_t min = 0, int64_t max = INT64_MAX) const;
  std::string text(std::string_view key) const;  // which is not empty
  bool has(std::string_view key) const { return object_.contains(key); }
  const std::string& where() const { return where_; }
  [[noreturn]] void fail(std::string_view problem) const;

 private:
  const json& object_;
  std::string where_;
  std::string_view remedy_;
};

}  // namespace parka
