#include "engine/huggingface/peft_adapter.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/files/file_io.h"
#include "engine/files/float_elements.h"
#include "engine/huggingface/huggingface_tensors.h"

namespace parka {
namespace {

// peft wraps the model twice. The end of a weight's name in the model comes after the adapter's.
std::string peft_name(std::string_view weight, const char* factor) {
  constexpr std::string_view kWeight = ".weight";
  PARKA_REQUIRE(weight.ends_with(kWeight));
  weight.remove_suffix(kWeight.size());
  return fmt::format("base_model.model.{}.{}.weight", weight, factor);
}

HostTensor read_factor(const CheckpointWeights& weights, const ParameterInfo& factor, std::string name) {
  HostTensor tensor{std::move(name), DType::kF32, {factor.rows, factor.cols}, {}};
  const std::vector<float> values = weights.read(factor, {0, factor.numel()}, WeightForm::kMaster);
  tensor.bytes.resize(values.size() * sizeof(float));
  encode_floats(values, DType::kF32, tensor.bytes);
  return tensor;
}

std::vector<HostTensor> read_factors(const LoadedCheckpoint& checkpoint, const std::vector<PeftTensor>& factors) {
  std::vector<ParameterInfo> parameters;
  parameters.reserve(factors.size());
  for (const PeftTensor& factor : factors) parameters.push_back(factor.parameter);
  const CheckpointWeights reader(checkpoint, parameters);
  std::vector<HostTensor> tensors;
  tensors.reserve(factors.size());
  for (const PeftTensor& factor : factors) tensors.push_back(read_factor(reader, factor.parameter, factor.name));
  std::ranges::sort(tensors, {}, &HostTensor::name);
  return tensors;
}

nlohmann::ordered_json peft_config(const FinetuneConfig& finetune, const std::optional<std::string>& base) {
  return {{"base_model_name_or_path", base ? nlohmann::ordered_json(*base) : nullptr},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"lora_alpha", finetune.alpha},
          {"lora_dropout", finetune.dropout},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"r", finetune.rank},
          {"target_modules", finetune.targets},
          {"task_type", "CAUSAL_LM"},
          {"use_dora", false},
          {"use_rslora", finetune.rslora}};
}

}  // namespace

std::vector<PeftTensor> peft_tensors(const Config& config, const HuggingFaceFamily& family) {
  const ParameterTable table = make_parameter_table(config.model, false);
  const std::vector<HuggingFaceTensor> weights = huggingface_tensors(family, config.model, table);
  std::vector<PeftTensor> tensors;
  for (const CheckpointAdapters::Adapter& adapter : lora_adapters(config).all) {
    const auto weight = std::ranges::find_if(weights, [&](const HuggingFaceTensor& tensor) {
      return table.all[tensor.parameter].name == adapter.layer && tensor.first_row == adapter.first_row;
    });
    PARKA_REQUIRE(weight != weights.end());
    tensors.push_back({peft_name(weight->name, "lora_A"), adapter.in});
    tensors.push_back({peft_name(weight->name, "lora_B"), adapter.out});
  }
  return tensors;
}

void write_peft_adapter(const LoadedCheckpoint& checkpoint, const Config& config, const HuggingFaceFamily& family,
                        const std::optional<std::string>& base, const std::string& out) {
  if (config.finetune.method != FinetuneMethod::kLora) {
    throw_bad_input("{}: has no adapters (finetune.method = {}); leave --adapter out", checkpoint.path(),
                    name_of(config.finetune.method));
  }
  const std::vector<HostTensor> tensors = read_factors(checkpoint, peft_tensors(config, family));
  std::vector<const HostTensor*> pointers;
  pointers.reserve(tensors.size());
  for (const HostTensor& tensor : tensors) pointers.push_back(&tensor);
  DraftFolder draft(out);
  write_new_file(draft / "adapter_config.json", peft_config(config.finetune, base).dump(2) + "\n");
  OutputFile file(draft / "adapter_model.safetensors");
  write_safetensors(pointers, {{"format", "pt"}}, [&](ByteSpan bytes) { file.write(bytes); });
  file.sync();
  file.close();
  draft.publish();
}

}  // namespace parka
