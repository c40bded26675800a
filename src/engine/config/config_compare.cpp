#include <algorithm>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include "data/data_order.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/file_io.h"
#include "model/formats.h"
#include "model/weights.h"

namespace parka {
namespace {

// With defaults for the keys of other kinds of scaling.
RopeScalingConfig used_keys(const RopeScalingConfig& s) {
  RopeScalingConfig used;
  used.kind = s.kind;
  if (s.kind == RopeScalingKind::kNone) return used;
  used.factor = s.factor;
  if (s.kind == RopeScalingKind::kLinear) return used;
  used.original_length = s.original_length;
  if (s.kind == RopeScalingKind::kYarn) used.attention_factor = s.attention_factor;
  return used;
}

// Sets the keys of other methods to their defaults.
void keep_used_keys(Config& c) {
  const FinetuneConfig given = c.finetune;
  Config defaults;
  const ConfigTable standard = make_config_table(defaults);
  for (const ConfigField& field : make_config_table(c).fields) {
    if (section_of(field.path) != "finetune") continue;
    const std::string_view key = key_of(field.path);
    const bool is_full = given.method == FinetuneMethod::kFull;
    if (is_full ? key == "method" : is_used_by(given.method, given.downsample, key)) continue;
    set_field(field, get_field(*standard.find(field.path)));
  }
  // In one order: each layer has an adapter or none.
  if (given.method != FinetuneMethod::kLora) return;
  c.finetune.targets.assign(std::begin(kAdapterTargets), std::end(kAdapterTargets));
  std::erase_if(c.finetune.targets,
                [&](const std::string& target) { return std::ranges::count(given.targets, target) == 0; });
}

// The same run written in one way only: defaults that stand for another key filled in, keys without effect set to
// their defaults, and files by name, since a data set may move between folders.
Config canonical(const Config& config) {
  const Config defaults;
  Config c = config;
  c.model.num_kv_heads = c.model.kv_heads();
  c.model.given_head_dim = c.model.head_dim();
  c.model.query_pre_attn_scalar = c.model.pre_attn_scalar();
  if (c.model.sliding_window > 0) c.model.local_rope_theta = c.model.windowed_rope_theta();
  c.model.rope_scaling = used_keys(c.model.rope_scaling);
  if (c.model.init != InitKind::kNormal) c.model.init_std = defaults.model.init_std;
  keep_used_keys(c);
  // The value on several GPUs: one has nothing to divide.
  c.precision.weight_copies = kept_copies(c.precision, {c.distributed.zero_stage, Mesh(0, 2)}, c.finetune.base);
  c.precision.sampled_amax = Formats(c.precision).samples_gradient_amax;
  for (std::string& file : c.data.train) file = std::filesystem::path(file).filename().string();
  if (!c.data.weights.empty()) c.data.weights = Mixture(c.data.weights).parts();
  if (c.device.gemm_tuning_is_off()) c.device.gemm_tuning = "off";
  // With a slash at its end, whether it was given with one or not.
  const auto source = (std::filesystem::path(c.checkpoint.init_from) / "").lexically_normal();
  c.checkpoint.init_from = source.parent_path().filename().string();
  return c;
}

// Calls visit(field, same_meaning, line) for every key of which the configs have different values.
template <typename Visit>
void for_each_difference(const Config& saved, const Config& now, Visit visit) {
  Config given[2] = {saved, now};
  Config meant[2] = {canonical(saved), canonical(now)};
  const ConfigTable given_saved = make_config_table(given[0]), given_now = make_config_table(given[1]);
  const ConfigTable meant_saved = make_config_table(meant[0]), meant_now = make_config_table(meant[1]);
  for (size_t i = 0; i < given_saved.fields.size(); ++i) {
    const auto old_value = get_field(given_saved.fields[i]), new_value = get_field(given_now.fields[i]);
    if (old_value == new_value) continue;
    const ConfigField& field = given_saved.fields[i];
    visit(field, get_field(meant_saved.fields[i]) == get_field(meant_now.fields[i]),
          fmt::format("{}: {} in the checkpoint, {} now", field.path, old_value.dump(), new_value.dump()));
  }
}

}  // namespace

std::string config_hash(const Config& config) {
  Config c = canonical(config);
  // Without clipping no step looks at the norm of the one before.
  if (c.optimizer.clip_norm == 0) c.optimizer.release_gradients = false;
  json hashed;  // sorts by key, so that the order of fields in the structs does not matter
  for (const ConfigField& field : make_config_table(c).fields) {
    if (has(field.effects, kHashed)) hashed[field.path] = get_field(field);
  }
  // Runs from before these keys were there keep their hash.
  if (c.precision.unquantized.empty()) hashed.erase("precision.unquantized");
  if (c.precision.forward_format == DType::kE4M3) hashed.erase("precision.forward_format");
  if (c.data.document_start < 0) hashed.erase("data.document_start");
  Checksum checksum;
  checksum.update(as_bytes(hashed.dump()));
  return checksum.hex();
}

ResumeDifferences resume_differences(const Config& saved, const Config& now) {
  ResumeDifferences differences;
  for_each_difference(saved, now, [&](const ConfigField& field, bool same_meaning, const std::string& line) {
    if (field.path == "checkpoint.init_from") return;  // only a new run starts from it
    auto& of_kind = same_meaning                             ? differences.allowed
                    : has(field.effects, kFixedOnResume)     ? differences.refused
                    : has(field.effects, kConvertedOnResume) ? differences.converted
                                                             : differences.allowed;
    of_kind.push_back(line);
  });
  return differences;
}

ResumeDifferences model_differences(const ModelConfig& saved, const ModelConfig& now) {
  Config of_saved, of_now;
  of_saved.model = saved;
  of_now.model = now;
  ResumeDifferences differences;
  for_each_difference(of_saved, of_now, [&](const ConfigField& field, bool same_meaning, const std::string& line) {
    if (same_meaning || !has(field.effects, kFixedOnResume)) return;
    (has(field.effects, kWeights) ? differences.refused : differences.allowed).push_back(line);
  });
  return differences;
}

std::vector<std::string> weight_differences(const Config& saved, const Config& now) {
  std::vector<std::string> differences;
  for_each_difference(saved, now, [&](const ConfigField& field, bool same_meaning, const std::string& line) {
    if (!same_meaning && has(field.effects, kWeights)) differences.push_back(line);
  });
  return differences;
}

std::vector<std::string> speed_differences(const Config& measured, const Config& wanted, SpeedOf speed) {
  Config configs[2] = {canonical(measured), canonical(wanted)};
  const ConfigTable one = make_config_table(configs[0]), other = make_config_table(configs[1]);
  std::vector<std::string> differences;
  for (size_t i = 0; i < one.fields.size(); ++i) {
    const auto& [path, help, effects, target] = one.fields[i];
    const bool counts = has(effects, kStepTime) || (has(effects, kRunTime) && speed == SpeedOf::kRun);
    const auto old_value = get_field(one.fields[i]), new_value = get_field(other.fields[i]);
    const bool is_open = (path == "model.num_layers" && speed == SpeedOf::kOneGpu) ||
                         (path == "device.gemm_tuning" &&
                          (configs[0].device.gemm_tuning_is_auto() || configs[1].device.gemm_tuning_is_auto()));
    if (!counts || is_open || old_value == new_value) continue;
    differences.push_back(fmt::format("{}: {} measured, {} here", path, old_value.dump(), new_value.dump()));
    if (path == "data.documents" && !wanted.data.document_ids().any()) {  // SyntheticTokens
      differences.back() +=
          ", which a benchmark cannot measure without data.document_start or document_end (--set data.documents=joined plans what it measured)";
    }
  }
  return differences;
}

}  // namespace parka
