#include "engine/config/config.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/peft_adapter.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// adapter_config.json of peft.
FUZZ_TARGET(peft_config) {
  FinetuneConfig read;
  if (!accepts([&] {
        read = parse_peft_config(parse_json_text(input, "adapter_config.json", JsonComments::kRefused),
                                 "adapter_config.json");
      })) {
    return;
  }
  require(read.method == FinetuneMethod::kLora && read.rank >= 1 && !read.targets.empty(), "no adapters");
  require(read.dropout >= 0 && read.dropout < 1 && read.alpha >= 0, "settings that no config may have");
}
