#include "engine/files/json_text.h"

#include <algorithm>

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// The parser below all files of JSON, with and without comments, and what messages quote of a text.
FUZZ_TARGET(json_text) {
  const std::string quoted = printable(input);
  require(std::none_of(quoted.begin(), quoted.end(), is_control), "a quoted text has control characters");
  nlohmann::json value;
  if (!accepts([&] { value = parse_json_text(input, "input"); })) return;
  const std::string text = value.dump();
  require_accepted("JSON as it was written", [&] {
    require(parse_json_text(text, "written", JsonComments::kRefused) == value, "JSON changes when it is written");
  });
  accepts([&] { parse_json_text(input, "input", JsonComments::kRefused); });
}
