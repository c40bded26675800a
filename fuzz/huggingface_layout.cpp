#include "engine/files/json_text.h"
#include "engine/huggingface/huggingface_weights.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// What the state of an imported model's checkpoint says of the files that it came from.
FUZZ_TARGET(huggingface_layout) {
  HuggingFaceLayout layout;
  const auto parse = [&] { layout = parse_layout(parse_json_text(input, "state"), "state"); };
  if (!accepts(parse)) return;
  const nlohmann::json written = encode_layout(layout);
  require_accepted("a layout as it was written", [&] {
    require(encode_layout(parse_layout(written, "written")) == written, "a layout changes when it is written");
  });
}
