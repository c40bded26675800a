#include "engine/huggingface/huggingface_weights.h"

#include "engine/files/json_text.h"
#include "engine/huggingface/bitsandbytes.h"
#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

namespace {

// The model that the seeds are of.
ModelConfig tiny_model() {
  ModelConfig model;
  model.vocab_size = 8;
  model.d_model = 4;
  model.num_layers = 1;
  model.num_heads = 2;
  model.d_ffn = 6;
  model.norm = NormKind::kRmsNorm;
  return model;
}

}  // namespace

// The weights of a Hugging Face model, some in bitsandbytes' 4 bits: an index and two files, or no index and one
// file.
FUZZ_TARGET(huggingface_weights) {
  const std::vector<std::string_view> parts = parts_of(input, 3);
  const bool has_index = !parts[0].empty();
  place_file(kHuggingFaceIndexName, parts[0]);
  place_file(kHuggingFaceFileName, has_index ? std::string_view() : parts[1]);
  place_file("model-00001-of-00002.safetensors", has_index ? parts[1] : std::string_view());
  place_file("model-00002-of-00002.safetensors", has_index ? parts[2] : std::string_view());
  const std::string path = folder().path().string();
  accepts([&] {
    HuggingFaceWeights weights = open_huggingface_weights(path);
    const auto quantized = take_bitsandbytes_weights(weights);
    constexpr int64_t kMostElements = 1 << 20;
    for (const auto& [name, weight] : quantized) {
      const SafetensorsEntry& entry = weights.tensors.at(name).entry;
      const int64_t count = num_elements_of(entry.shape);
      if (count > kMostElements) continue;
      require(static_cast<int64_t>(decode_bitsandbytes(weights, weight, entry.dtype, count).size()) == count,
              "not all values are decoded");
    }
    static const HuggingFaceFamily& llama = *find_family("llama", huggingface_families());
    static const std::vector<HuggingFaceTensor> tensors =
        huggingface_tensors(llama, tiny_model(), make_parameter_table(tiny_model(), false));
    check_huggingface_weights(weights, tensors, llama.tensors.head, path);
  });
}
