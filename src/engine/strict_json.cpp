#include "engine/strict_json.h"

#include <set>
#include <string>
#include <vector>

#include "core/error.h"

namespace parka {

using nlohmann::json;

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxShown)) {
    const auto code = static_cast<unsigned char>(c);
    out += code < 0x20 || code == 0x7f ? '?' : c;
  }
  out += text.size() > kMaxShown ? "...'" : "'";
  return out;
}

json parse_strict_json(std::string_view text, std::string_view where, int max_depth) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (depth >= max_depth &&
        (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start)) {
      throw_bad_input("{}: JSON nested deeper than {} levels", where, max_depth);
    }
    if (event == json::parse_event_t::object_start) keys_of_open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) keys_of_open_objects.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_of_open_objects.back().insert(key).second) {
        throw_bad_input("{}: key {} appears twice in one JSON object", where, in_quotes(key));
      }
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& e) {
    throw_bad_input("{}: not valid JSON at byte {}", where, e.byte);
  } catch (const json::exception&) {
    throw_bad_input("{}: not valid JSON: a number is out of range", where);
  }
}

}  // namespace parka
