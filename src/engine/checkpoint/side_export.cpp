#include "engine/checkpoint/side_export.h"

#include <vector>

#include "core/error.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/files/file_io.h"
#include "engine/files/safetensors.h"
#include "model/side/side_network.h"

namespace parka {
namespace {

ordered_json side_config(const LoadedCheckpoint& checkpoint, const Config& config) {
  const FinetuneConfig& f = config.finetune;
  const ModelConfig side = side_stack(config.model, f.side_rules());
  ordered_json described = {{"format", "parka.side_network"}, {"version", 1},
                            {"reduction", f.reduction},       {"downsample", name_of(f.downsample)},
                            {"mix", name_of(f.mix)},          {"num_layers", side.num_layers},
                            {"width", side.d_model},          {"ffn_width", side.d_ffn},
                            {"num_heads", side.num_heads},    {"num_kv_heads", side.kv_heads()},
                            {"head_dim", side.head_dim()},    {"base_format", name_of(f.base)}};
  if (checkpoint.base() != nullptr) {
    const json base = describe_base(*checkpoint.base(), checkpoint.path());
    described["base"] = {{"checkpoint", base.at("checkpoint")}, {"checksum", base.at("checksum")}};
  }
  return described;
}

}  // namespace

void write_side_network(const LoadedCheckpoint& checkpoint, const Config& config, const std::string& out) {
  if (config.finetune.method != FinetuneMethod::kQst) {
    throw_bad_input("{}: has no side network (finetune.method = {})", checkpoint.path(),
                    name_of(config.finetune.method));
  }
  std::vector<ParameterInfo> parameters = make_parameter_table(config.model, false, config.parameter_rules()).all;
  std::erase_if(parameters, [](const ParameterInfo& p) { return !is_of_side(p); });
  const CheckpointWeights weights(checkpoint, parameters);
  std::vector<HostTensor> tensors;
  for (const ParameterInfo& p : parameters) {
    const std::vector<float> values = weights.read(p, {0, p.numel()}, WeightForm::kMaster);
    tensors.push_back(float_tensor(p.name, {p.rows, p.cols}, values));
  }
  DraftFolder draft(out);
  write_new_file(draft / "side_config.json", side_config(checkpoint, config).dump(2) + "\n");
  OutputFile file(draft / "side_network.safetensors");
  write_safetensors(tensors, {{"format", "pt"}}, file);
  draft.publish();
}

}  // namespace parka
