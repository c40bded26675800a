#include <algorithm>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include "data/mixture.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/files/file_io.h"
#include "model/formats.h"
#include "model/weights.h"

namespace parka {
namespace {

// Keys and sections (with a dot at the end) that change nothing about the numbers.
constexpr std::string_view kNotHashed[] = {
    "precision.recipe",  // what it implies is hashed
    "precision.save_norm_output",
    "precision.save_product",
    "precision.weight_copies",
    "precision.recompute",
    "precision.offload_blocks",
    "precision.offload_weights",
    "precision.eval",
    "optimizer.offload",
    "data.eval",
    "data.prefetch_batches",
    "data.checksum",
    "data.tokenizer",
    "training.steps",
    "training.eval_interval",
    "training.eval_sequences",
    "training.non_finite",
    "training.max_skipped_steps",
    "training.log_interval",
    "checkpoint.folder",
    "checkpoint.interval",
    "checkpoint.keep",
    "checkpoint.async",
    "checkpoint.save_final",
    "checkpoint.on_saved",
    "telemetry.",
    "evaluation.",
    "distributed.",
    "reliability.",
    "device.",
};

// Keys and sections that decide what a checkpoint holds and what its data position means...
constexpr std::string_view kFixedOnResume[] = {
    "model.",
    "precision.compute",
    "optimizer.frozen",
    "finetune.",
    "data.train",
    "data.weights",
    "data.token_dtype",
    "data.sequence_length",
    "data.seed",
    "data.shuffle",
    "data.loss_mask",
    "data.documents",
    "data.document_start",
    "data.document_end",
    "training.global_batch_size",
};
// ... and the formats of masters and moments ...
constexpr std::string_view kConvertedOnResume[] = {
    "optimizer.states",
    "optimizer.exp_avg_format",
    "optimizer.exp_avg_sq_format",
    "optimizer.master",
};
// ... but for these: the weights have been initialised.
constexpr std::string_view kFreeOnResume[] = {"model.init", "model.init_std"};

// What weights keep their meaning under, if not all of it: longer contexts are trained with other angles.
constexpr std::string_view kFreeOnInit[] = {"model.rope_theta", "model.rope_scaling.", "model.local_rope_theta"};

// Keys and sections that decide how long one GPU takes for a micro-batch and an update...
constexpr std::string_view kSpeed[] = {
    "model.",
    "precision.",
    "optimizer.states",
    "optimizer.master",
    "optimizer.gradient",
    "optimizer.release_gradients",
    "optimizer.frozen",
    "finetune.",
    "data.sequence_length",
    "data.documents",
    "data.document_start",
    "data.document_end",
    "data.images_per_sequence",
    "training.micro_batch_size",
    "training.logits_chunk_tokens",
    "device.gemm_tuning",
};
// ... but for these...
constexpr std::string_view kNoSpeed[] = {"model.norm_eps",
                                         "model.query_pre_attn_scalar",
                                         "model.rope_theta",
                                         "model.local_rope_theta",
                                         "model.init",
                                         "model.init_std",
                                         "precision.recipe",
                                         "precision.eval",
                                         "finetune.alpha",
                                         "finetune.rslora",
                                         "model.vision.pixel_mean",
                                         "model.vision.pixel_deviation",
                                         "model.vision.norm_eps",
                                         "model.vision.image_token",
                                         "model.vision.column_major"};
// ... and what beside them decides how long a run of several takes for a step.
constexpr std::string_view kSpeedOfRun[] = {"precision.weight_copies", "precision.offload_weights",
                                            "optimizer.offload", "training.global_batch_size", "distributed."};

template <size_t N>
bool is_listed(const std::string& path, const std::string_view (&list)[N]) {
  return std::any_of(std::begin(list), std::end(list), [&](std::string_view entry) {
    return entry.ends_with('.') ? path.starts_with(entry) : path == entry;
  });
}

// With defaults for the keys of other kinds of scaling.
RopeScalingConfig used_keys(const RopeScalingConfig& s) {
  RopeScalingConfig used;
  used.kind = s.kind;
  if (s.kind == RopeScalingKind::kNone) return used;
  used.factor = s.factor;
  if (s.kind == RopeScalingKind::kLinear) return used;
  used.original_length = s.original_length;
  if (s.kind == RopeScalingKind::kLlama3) {
    used.low_frequency_factor = s.low_frequency_factor;
    used.high_frequency_factor = s.high_frequency_factor;
    return used;
  }
  used.beta_fast = s.beta_fast;
  used.beta_slow = s.beta_slow;
  used.attention_factor = s.attention_factor;
  used.truncate = s.truncate;
  return used;
}

// With the keys of other methods at their defaults.
FinetuneConfig used_keys(const FinetuneConfig& f) {
  FinetuneConfig used;
  used.method = f.method;
  if (f.method == FinetuneMethod::kFull) return used;
  used.base = f.base;
  if (f.method == FinetuneMethod::kLora) {
    used.rank = f.rank;
    used.alpha = f.alpha;
    used.rslora = f.rslora;
    used.dropout = f.dropout;
    // In one order: each layer has an adapter or none.
    std::erase_if(used.targets,
                  [&](const std::string& target) { return std::ranges::count(f.targets, target) == 0; });
    return used;
  }
  used.reduction = f.reduction;
  used.downsample = f.downsample;
  used.side_head_dim = f.side_head_dim;
  used.mix = f.mix;
  used.kept = f.kept;
  if (f.downsample == Downsampling::kLora || f.downsample == Downsampling::kAdapter) used.rank = f.rank;
  return used;
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
  c.finetune = used_keys(c.finetune);
  if (!is_float8(c.optimizer.states)) {
    c.optimizer.exp_avg_format = defaults.optimizer.exp_avg_format;
    c.optimizer.exp_avg_sq_format = defaults.optimizer.exp_avg_sq_format;
  }
  // As on several GPUs: one has nothing to divide.
  c.precision.weight_copies = kept_copies(c.precision, make_zero(c.distributed.zero_stage, 0, 2), c.finetune.base);
  c.precision.sampled_amax = Formats(c.precision).samples_gradient_amax;
  for (std::string& file : c.data.train) file = std::filesystem::path(file).filename().string();
  if (!c.data.weights.empty()) c.data.weights = Mixture(c.data.weights).parts();
  if (c.device.gemm_tuning_is_off()) c.device.gemm_tuning = "off";
  // With a slash at its end, whether it was given with one or not.
  const auto source = (std::filesystem::path(c.checkpoint.init_from) / "").lexically_normal();
  c.checkpoint.init_from = source.parent_path().filename().string();
  return c;
}

// Calls visit(path, same_meaning, line) for every key of which the configs have different values.
template <typename Visit>
void for_each_difference(const Config& saved, const Config& now, Visit visit) {
  Config given[2] = {saved, now};
  Config meant[2] = {canonical(saved), canonical(now)};
  const ConfigTable given_saved = make_config_table(given[0]), given_now = make_config_table(given[1]);
  const ConfigTable meant_saved = make_config_table(meant[0]), meant_now = make_config_table(meant[1]);
  for (size_t i = 0; i < given_saved.fields.size(); ++i) {
    const auto old_value = get_field(given_saved.fields[i]), new_value = get_field(given_now.fields[i]);
    if (old_value == new_value) continue;
    const std::string& path = given_saved.fields[i].path;
    visit(path, get_field(meant_saved.fields[i]) == get_field(meant_now.fields[i]),
          fmt::format("{}: {} in the checkpoint, {} now", path, old_value.dump(), new_value.dump()));
  }
}

}  // namespace

std::string config_hash(const Config& config) {
  Config c = canonical(config);
  // Without clipping no step looks at the norm of the one before.
  if (c.optimizer.clip_norm == 0) c.optimizer.release_gradients = false;
  nlohmann::json hashed;  // sorts by key, so that the order of fields in the structs does not matter
  for (const ConfigField& field : make_config_table(c).fields) {
    if (!is_listed(field.path, kNotHashed)) hashed[field.path] = get_field(field);
  }
  // Runs from before this key was there keep their hash.
  if (c.data.document_start < 0) hashed.erase("data.document_start");
  Checksum checksum;
  checksum.update(as_bytes(hashed.dump()));
  return checksum.hex();
}

ResumeDifferences resume_differences(const Config& saved, const Config& now) {
  ResumeDifferences differences;
  for_each_difference(saved, now, [&](const std::string& path, bool same_meaning, const std::string& line) {
    if (path == "checkpoint.init_from") return;  // only a new run starts from it
    const bool fixed = is_listed(path, kFixedOnResume) && !is_listed(path, kFreeOnResume);
    auto& of_kind = same_meaning                          ? differences.allowed
                    : fixed                               ? differences.refused
                    : is_listed(path, kConvertedOnResume) ? differences.converted
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
  for_each_difference(of_saved, of_now, [&](const std::string& path, bool same_meaning, const std::string& line) {
    if (same_meaning || is_listed(path, kFreeOnResume)) return;
    (is_listed(path, kFreeOnInit) ? differences.allowed : differences.refused).push_back(line);
  });
  return differences;
}

std::vector<std::string> weight_differences(const Config& saved, const Config& now) {
  constexpr std::string_view kWeights[] = {"model.", "finetune."}, kFree[] = {"finetune.base", "finetune.dropout"};
  std::vector<std::string> differences;
  for_each_difference(saved, now, [&](const std::string& path, bool same_meaning, const std::string& line) {
    if (same_meaning || !is_listed(path, kWeights) || is_listed(path, kFree)) return;
    if (!is_listed(path, kFreeOnResume) && !is_listed(path, kFreeOnInit)) differences.push_back(line);
  });
  return differences;
}

std::vector<std::string> speed_differences(const Config& measured, const Config& wanted, SpeedOf speed) {
  Config configs[2] = {canonical(measured), canonical(wanted)};
  const ConfigTable one = make_config_table(configs[0]), other = make_config_table(configs[1]);
  std::vector<std::string> differences;
  for (size_t i = 0; i < one.fields.size(); ++i) {
    const std::string& path = one.fields[i].path;
    const bool of_run = is_listed(path, kSpeedOfRun);
    const bool of_one = is_listed(path, kSpeed) && !is_listed(path, kNoSpeed);
    const bool counts = of_run ? speed == SpeedOf::kRun : of_one;
    const auto old_value = get_field(one.fields[i]), new_value = get_field(other.fields[i]);
    const bool is_open = path == "device.gemm_tuning" &&
                         (configs[0].device.gemm_tuning_is_auto() || configs[1].device.gemm_tuning_is_auto());
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
