#include <cstdio>

#include "engine/commands/commands.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/data_sources.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/text/tokenizer_files.h"

namespace parka {

int run_config(const ConfigOptions& options) {
  switch (options.action) {
    case ConfigOptions::Action::kCheck: {
      const Config config = load_config(options.config_path, options.overrides);
      check_present_files(config);
      check_present_tokenizer(config);
      check_start(config);
      warn_of_odd_values(config);
      std::printf("%s: valid\n", options.config_path.c_str());
      return 0;
    }
    case ConfigOptions::Action::kShow:
      std::printf("%s\n", to_json(load_config(options.config_path, options.overrides)).dump(2).c_str());
      return 0;
    case ConfigOptions::Action::kSchema: std::printf("%s\n", config_schema().dump(2).c_str()); return 0;
    case ConfigOptions::Action::kReference: std::printf("%s", config_reference_markdown().c_str()); return 0;
  }
  return 1;
}

}  // namespace parka
