#include "engine/config/config_io.h"
#include "engine/files/json_text.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// A config file.
FUZZ_TARGET(config) {
  Config config;
  if (!accepts([&] { config = override_config(parse_json_text(input, "config.json"), {}, "config.json"); })) return;
  require_accepted("a resolved config", [&] {
    require(parse_config(to_json(config), "written") == config, "a config changes when it is written");
  });
  require(config_hash(config).size() == 32, "a config's hash has not 32 digits");
  require(resume_differences(config, config).refused.empty(), "a run does not go on with its own config");
}
