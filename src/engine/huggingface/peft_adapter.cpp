#include "engine/huggingface/peft_adapter.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/files/safetensors.h"
#include "engine/huggingface/huggingface_tensors.h"
#include "engine/huggingface/huggingface_weights.h"
#include "engine/huggingface/value_check.h"

namespace parka {
namespace {

// With what the names of experts' layers begin.
constexpr std::string_view kExperts = "experts.";

// peft wraps the model twice. The end of a weight's name in the model comes after the adapter's.
std::string peft_name(std::string_view weight, const char* factor) {
  constexpr std::string_view kWeight = ".weight";
  PARKA_REQUIRE(weight.ends_with(kWeight));
  weight.remove_suffix(kWeight.size());
  return fmt::format("base_model.model.{}.{}.weight", weight, factor);
}

std::vector<HostTensor> read_factors(const LoadedCheckpoint& checkpoint, const std::vector<PeftTensor>& factors) {
  std::vector<ParameterInfo> parameters;
  parameters.reserve(factors.size());
  for (const PeftTensor& factor : factors) parameters.push_back(factor.parameter);
  const CheckpointWeights reader(checkpoint, parameters);
  std::vector<HostTensor> tensors;
  tensors.reserve(factors.size());
  for (const PeftTensor& factor : factors) {
    const int64_t first = factor.expert * factor.numel();
    const std::vector<float> values =
        reader.read(factor.parameter, {first, first + factor.numel()}, WeightForm::kMaster);
    tensors.push_back(float_tensor(factor.name, {factor.rows(), factor.parameter.cols}, values));
  }
  std::ranges::sort(tensors, {}, &HostTensor::name);
  return tensors;
}

// "gate_proj", or all of "experts.0.gate_proj" and so on: peft looks for names that end like this.
std::vector<std::string> peft_targets(const FinetuneConfig& finetune, const std::vector<PeftTensor>& factors) {
  std::vector<std::string> targets;
  std::ranges::copy_if(finetune.targets, std::back_inserter(targets),
                       [](const std::string& target) { return !target.starts_with(kExperts); });
  std::set<std::string> of_experts;
  for (const PeftTensor& factor : factors) {
    if (factor.parameter.num_stacked == 1) continue;
    const size_t begin = factor.name.find(kExperts);
    of_experts.insert(factor.name.substr(begin, factor.name.find(".lora_") - begin));
  }
  targets.insert(targets.end(), of_experts.begin(), of_experts.end());
  return targets;
}

ordered_json peft_config(const FinetuneConfig& finetune, const std::vector<PeftTensor>& factors,
                         const std::optional<std::string>& base) {
  return {{"base_model_name_or_path", base ? ordered_json(*base) : nullptr},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"lora_alpha", finetune.alpha},
          {"lora_dropout", finetune.dropout},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"r", finetune.rank},
          {"target_modules", peft_targets(finetune, factors)},
          {"task_type", "CAUSAL_LM"},
          {"use_dora", false},
          {"use_rslora", finetune.rslora}};
}

constexpr int64_t kMaxRank = 65536;

// Keys that change nothing about trained adapters of a kind that is accepted.
constexpr std::string_view kWithoutMeaning[] = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
    "peft_version", "qalora_group_size",       "revision",       "task_type"};

// null, false, 0, "none", [] or {}: an option that is not used.
bool is_unused(const json& value) {
  return value.is_null() || value == false || value == 0 || value == "none" ||
         ((value.is_array() || value.is_object()) && value.empty());
}

[[noreturn]] void refuse(const std::string& where, std::string_view key, const json& value,
                         std::string_view wanted) {
  throw_bad_input("{}: \"{}\" is {}, {} is wanted", where, key, printable(value.dump()), wanted);
}

const json& required(const json& config, const char* key, const std::string& where) {
  const auto found = config.find(key);
  if (found == config.end()) throw_bad_input("{}: lacks \"{}\"", where, key);
  return *found;
}

// peft writes the whole names of few layers ("model.layers.0.self_attn.q_proj") where "all-linear" was asked for.
// The tensors show if all blocks have them.
std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// The name in finetune.targets: "experts.up_proj" for experts.3.up_proj, and for Mixtral's w3.
std::string target_of(const std::string& name) {
  constexpr std::pair<std::string_view, const char*> kOfMixtral[] = {
      {"w1", "experts.gate_proj"}, {"w2", "experts.down_proj"}, {"w3", "experts.up_proj"}};
  const std::string last = last_part(name);
  for (const auto& [theirs, ours] : kOfMixtral) {
    if (last == theirs) return ours;
  }
  const size_t at = name.rfind(kExperts);
  const bool is_of_expert =
      at != std::string::npos && (at == 0 || name[at - 1] == '.') &&
      name.find_first_not_of("0123456789", at + kExperts.size()) == name.size() - last.size() - 1;
  return is_of_expert ? std::string(kExperts) + last : last;
}

// In the order of Parka's own.
std::vector<std::string> parse_targets(const json& value, const std::string& where) {
  const std::vector<std::string> known(std::begin(kAdapterTargets), std::end(kAdapterTargets));
  if (value == "all-linear") return FinetuneConfig().targets;
  const bool is_list = value.is_array() && !value.empty() &&
                       std::ranges::all_of(value, [](const json& target) { return target.is_string(); });
  if (!is_list) refuse(where, "target_modules", value, "a list of names of layers");
  std::set<std::string> named;
  for (const json& target : value) {
    const std::string name = target_of(target.get<std::string>());
    named.insert(name);
    if (std::ranges::count(known, name) > 0) continue;
    throw_bad_input("{}: \"target_modules\" has {}; adapters are known of {}", where, printable(target.dump()),
                    fmt::join(known, ", "));
  }
  std::vector<std::string> targets;
  std::ranges::copy_if(known, std::back_inserter(targets),
                       [&](const std::string& name) { return named.contains(name); });
  return targets;
}

double parse_number(const json& config, const char* key, double otherwise, double most, const std::string& where) {
  const auto found = config.find(key);
  if (found == config.end()) return otherwise;
  const double value = found->is_number() ? found->get<double>() : -1;
  if (!(value >= 0 && value <= most)) refuse(where, key, *found, "a number that is not negative or too large");
  return value;
}

// The initialization of weights that are trained; others have changed the base too.
bool keeps_base(const json& init) { return init.is_boolean() || init == "gaussian" || init == "orthogonal"; }

// peft's "gate_proj" is of experts as well, if its files have them.
void name_experts(const std::string& folder, Config& config) {
  const std::string path = (fs::path(folder) / kPeftWeightsName).string();
  const MoeConfig& moe = config.model.moe;
  std::vector<std::string>& targets = config.finetune.targets;
  if (!moe.exists() || !file_exists(path)) return;
  const auto of_expert = [](const SafetensorsEntry& entry) {
    return entry.name.find(".experts.") != std::string::npos;
  };
  const InputFile file(path);
  if (std::ranges::none_of(read_safetensors_header(file).tensors, of_expert)) return;
  const bool has_experts_alone = moe.dense_layers == 0 && moe.shared_width == 0;
  for (const char* layer : {"gate_proj", "up_proj", "down_proj"}) {
    const auto plain = std::ranges::find(targets, layer);
    if (plain == targets.end()) continue;
    if (has_experts_alone) targets.erase(plain);
    const std::string named = std::string(kExperts) + layer;
    if (std::ranges::count(targets, named) == 0) targets.push_back(named);
  }
}

// The adapters' tensors in their places in a config's table.
std::vector<HostTensor> read_tensors(const std::string& folder, const Config& config, const std::string& base) {
  const fs::path path = fs::path(folder) / kPeftWeightsName;
  if (!file_exists(path.string()) && file_exists((fs::path(folder) / "adapter_model.bin").string())) {
    throw_bad_input(
        "{}: has adapter_model.bin, which is not read, and no {}; load it with peft, and save_pretrained() of the "
        "result writes that",
        folder, kPeftWeightsName);
  }
  const InputFile file(path.string());
  std::map<std::string, SafetensorsEntry> entries;
  for (const SafetensorsEntry& entry : read_safetensors_header(file).tensors) entries.emplace(entry.name, entry);
  std::vector<HostTensor> tensors;
  std::vector<float> values;  // of a parameter
  for (const PeftTensor& wanted : peft_tensors(config, choose_family(config.model, "", nullptr, base))) {
    const ParameterInfo& p = wanted.parameter;
    const auto found = entries.find(wanted.name);
    if (found == entries.end()) refuse_missing(file.path(), wanted.name, names_in(entries));
    const SafetensorsEntry& entry = found->second;
    if (!is_plain_float(entry.dtype) || entry.shape != std::vector<int64_t>{wanted.rows(), p.cols}) {
      throw_bad_input("{}: {} is {} [{}], floats [{}, {}] are wanted", file.path(), printable(entry.name),
                      name_of(entry.dtype), fmt::join(entry.shape, ", "), wanted.rows(), p.cols);
    }
    std::vector<std::byte> bytes(static_cast<size_t>(entry.num_bytes));
    file.read(entry.offset, bytes);
    if (wanted.expert == 0) values.clear();
    values.resize(values.size() + static_cast<size_t>(wanted.numel()));
    decode_floats(entry.dtype, bytes, std::span(values).last(static_cast<size_t>(wanted.numel())));
    ValueCheck check(file, entry, /*may_be_zero=*/wanted.name.find("lora_B") != std::string::npos);
    check.add(entry.dtype, bytes);
    check.finish();
    if (wanted.expert == p.num_stacked - 1) tensors.push_back(float_tensor(p.name, {p.rows, p.cols}, values));
    entries.erase(found);
  }
  if (!entries.empty()) {
    throw_bad_input("{}: has {}, which is no adapter of {} in all blocks of the base", file.path(),
                    printable(entries.begin()->first), fmt::join(config.finetune.targets, ", "));
  }
  return tensors;
}

// A run that continues training the adapters.
std::string training_config(const Config& config, const std::string& out) {
  const fs::path normal = (fs::path(out) / "").lexically_normal();  // with a slash at the end
  const json all = to_json(config);
  ordered_json text = {
      {"model", all.at("model")},
      {"precision", {{"recipe", all.at("precision").at("recipe")}}},
      {"finetune", all.at("finetune")},
      {"optimizer", {{"lr", 1e-4}, {"eps", 1e-8}, {"weight_decay", 0.0}}},
      {"data",
       {{"train", json::array()},
        {"token_dtype", all.at("data").at("token_dtype")},
        {"sequence_length", config.data.sequence_length}}},
      {"training", {{"steps", 1000}, {"global_batch_size", 32}, {"micro_batch_size", 1}}},
      {"checkpoint",
       {{"folder", "runs/" + normal.parent_path().filename().string()}, {"init_from", recordable_path(out)}}}};
  return "// Goes on training the imported adapters. Give token files in data.train, and look at what is below.\n" +
         text.dump(2) + "\n";
}

}  // namespace

std::vector<PeftTensor> peft_tensors(const Config& config, const HuggingFaceFamily& family) {
  const ParameterTable table = make_parameter_table(config.model, false);
  const std::vector<HuggingFaceTensor> weights = huggingface_tensors(family, config.model, table);
  std::vector<PeftTensor> tensors;
  std::map<std::pair<std::string, int64_t>, std::string> names;
  for (const HuggingFaceTensor& weight : weights) {
    names.emplace(std::pair(table.all[weight.parameter].name, weight.first_row), weight.name);
  }
  for (const CheckpointAdapters::Adapter& adapter : lora_adapters(config).all) {
    const ParameterInfo& layer = table.all[static_cast<size_t>(table.index_of(adapter.layer))];
    const int64_t stride = layer.rows / layer.num_stacked;
    for (const auto& [factor, parameter] : {std::pair("lora_A", &adapter.in), {"lora_B", &adapter.out}}) {
      for (int64_t e = 0; e < parameter->num_stacked; ++e) {
        const std::string& weight = names.at({adapter.layer, adapter.first_row + e * stride});
        tensors.push_back({peft_name(weight, factor), *parameter, e});
      }
    }
  }
  return tensors;
}

void write_peft_adapter(const LoadedCheckpoint& checkpoint, const Config& config, const HuggingFaceFamily& family,
                        const std::optional<std::string>& base, const std::string& out) {
  if (config.finetune.method != FinetuneMethod::kLora) {
    throw_bad_input("{}: has no adapters (finetune.method = {}); leave --adapter out", checkpoint.path(),
                    name_of(config.finetune.method));
  }
  const std::vector<PeftTensor> factors = peft_tensors(config, family);
  const std::vector<HostTensor> tensors = read_factors(checkpoint, factors);
  DraftFolder draft(out);
  write_new_file(draft / "adapter_config.json", peft_config(config.finetune, factors, base).dump(2) + "\n");
  OutputFile file(draft / "adapter_model.safetensors");
  write_safetensors(tensors, {{"format", "pt"}}, file);
  draft.publish();
}

FinetuneConfig parse_peft_config(const json& config, const std::string& where) {
  if (!config.is_object()) throw_bad_input("{}: is no JSON object", where);
  FinetuneConfig finetune;
  finetune.method = FinetuneMethod::kLora;
  const json& type = required(config, "peft_type", where);
  if (type != "LORA") refuse(where, "peft_type", type, "\"LORA\"");
  const json& rank = required(config, "r", where);
  finetune.rank = exact_integer(rank).value_or(0);
  if (finetune.rank < 1 || finetune.rank > kMaxRank) refuse(where, "r", rank, "a rank from 1 to 65536");
  finetune.alpha = parse_number(config, "lora_alpha", 8, 1e30, where);  // peft's default
  finetune.dropout = parse_number(config, "lora_dropout", 0, 0.999999, where);
  finetune.targets = parse_targets(required(config, "target_modules", where), where);
  for (const auto& [key, value] : config.items()) {
    if (key == "use_rslora") {
      if (!value.is_boolean()) refuse(where, key, value, "true or false");
      finetune.rslora = value.get<bool>();
    } else if (key == "init_lora_weights") {
      if (!keeps_base(value)) refuse(where, key, value, "an initialization that leaves the base as it is");
    } else if (key != "peft_type" && key != "r" && key != "lora_alpha" && key != "lora_dropout" &&
               key != "target_modules" && std::ranges::count(kWithoutMeaning, key) == 0 && !is_unused(value)) {
      throw_bad_input("{}: \"{}\" is {}, which Parka does not have", where, printable(key),
                      printable(value.dump()));
    }
  }
  return finetune;
}

std::string import_peft_adapter(const std::string& folder, const LoadedCheckpoint& base, const std::string& out) {
  const std::string where = (fs::path(folder) / kPeftConfigName).string();
  Config config = config_of(base);
  if (config.finetune.method != FinetuneMethod::kFull) {
    const bool is_qst = config.finetune.method == FinetuneMethod::kQst;
    throw_bad_input("{}: has {} of its own; {}", base.path(), is_qst ? "a side network" : "adapters",
                    is_qst ? "give the model that it was trained beside as --base"
                           : "`parka export` it, import the result and give that as --base");
  }
  config.finetune = parse_peft_config(
      parse_json_text(read_text(where, kMaxHuggingFaceConfigBytes), where, JsonComments::kRefused), where);
  name_experts(folder, config);
  // The base's settings of its own parameters and ranks may not go with adapters.
  config.optimizer.frozen.clear();
  config.optimizer.lr_patterns.clear();
  config.optimizer.lr_factors.clear();
  config.distributed = {};
  const json described = describe_base(base, out);
  config.checkpoint.init_from = described.at("checkpoint").get<std::string>();
  validate(config);
  const std::vector<HostTensor> tensors = read_tensors(folder, config, base.path());
  int64_t num_parameters = 0;
  for (const HostTensor& tensor : tensors) num_parameters += num_elements_of(tensor.shape);
  DraftFolder draft(out);
  OutputFile file(draft / shard_name(0));
  write_safetensors(tensors, {}, file);
  Manifest manifest{.step = 0,
                    .state = {{"config", to_json(config)},
                              {kMaxPositionsKey, max_positions_of(base, config.data.sequence_length)},
                              {kBaseKey, described}},
                    .files = {{shard_name(0), file.num_bytes(), file.checksum()}},
                    .num_tensors = static_cast<int64_t>(tensors.size())};
  write_new_file(draft / "config.json", training_config(config, out));
  write_new_file(draft / std::string(kManifestName), encode_manifest(manifest));
  draft.publish();
  return fmt::format("adapters of rank {} beside {}, {} parameters", config.finetune.rank, base.path(),
                     num_parameters);
}

}  // namespace parka
