#include "engine/config/config_io.h"

#include <algorithm>

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// Values of --set, one a line.
FUZZ_TARGET(overrides) {
  std::vector<std::string> overrides;
  for (size_t begin = 0; begin < input.size();) {
    const size_t end = std::min(input.find('\n', begin), input.size());
    overrides.emplace_back(input.substr(begin, end - begin));
    begin = end + 1;
  }
  Config config;
  const auto object = nlohmann::json::object();
  if (!accepts([&] { config = override_config(object, overrides, "config.json"); })) return;
  require_accepted("a resolved config", [&] {
    require(parse_config(to_json(config), "written") == config, "a config changes when it is written");
  });
}
