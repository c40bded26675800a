#include "engine/huggingface/huggingface_config.h"

#include "engine/files/json_text.h"
#include "engine/huggingface/huggingface_tensors.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// config.json of a Hugging Face model.
FUZZ_TARGET(huggingface_config) {
  nlohmann::json root;
  if (!accepts([&] { root = parse_json_text(input, "config.json", JsonComments::kRefused); })) return;
  huggingface_dtype(root);
  HuggingFaceModel read;
  if (!accepts([&] { read = parse_huggingface_config(root, "config.json"); })) return;
  const std::string in_half = with_huggingface_dtype(std::string(input), DType::kF16);
  std::string written;
  if (!accepts([&] { written = make_huggingface_config(read, DType::kBF16, &root); })) return;
  require_accepted("config.json as it was written", [&] {
    require(parse_huggingface_config(parse_json_text(in_half, "written"), "written").model == read.model,
            "a model changes with the format of its weights");
    const HuggingFaceModel again = parse_huggingface_config(parse_json_text(written, "written"), "written");
    require(again.model == read.model && again.max_positions == read.max_positions,
            "a model changes when its config.json is written");
    require(again.family == read.family, "a family changes when its config.json is written");
  });
  constexpr int64_t kMostLayers = 16;  // what more have takes time, and nothing that fewer have not
  if (read.model.num_layers <= kMostLayers && read.model.vision.tower.num_layers <= kMostLayers) {
    require(!huggingface_tensors(*read.family, read.model, make_parameter_table(read.model, false)).empty(),
            "no tensors");
  }
}
