#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/activation_offload.h"
#include "model/parameter_table.h"

// Rules between fields. Each message names the keys with their values and says what to change.
namespace parka {
namespace {

void check_limits(const Config& config) {
  Config copy = config;
  for (const ConfigField& field : make_config_table(copy).fields) {
    const std::string problem = field_problem(field);
    if (!problem.empty()) throw_bad_input("{}: {}", field.path, problem);
  }
}

std::string_view head_dim_name(const ModelConfig& m) {
  return m.given_head_dim == 0 ? "model.d_model / model.num_heads" : "model.head_dim";
}

void check_heads(const ModelConfig& m) {
  if (m.given_head_dim == 0 && m.d_model % m.num_heads != 0) {
    throw_bad_input("model.d_model = {} is not a multiple of model.num_heads = {}; change one of them", m.d_model,
                    m.num_heads);
  }
  if (m.d_model % 2 != 0) throw_bad_input("model.d_model = {} is odd; make it even", m.d_model);
  if (m.head_dim() % 2 != 0) {
    throw_bad_input("{} = {} is odd; rotary position embedding rotates pairs of columns, so make it even",
                    head_dim_name(m), m.head_dim());
  }
  if (m.num_heads % m.kv_heads() != 0) {
    throw_bad_input("model.num_kv_heads = {} does not divide model.num_heads = {}; change one of them",
                    m.num_kv_heads, m.num_heads);
  }
  const int64_t heads = m.num_heads + 2 * m.kv_heads();
  if (heads > kMaxDimension / m.head_dim()) {
    throw_bad_input(
        "model.num_heads + 2 * model.num_kv_heads = {} heads of {} = {} are more than {} columns; make one of them "
        "smaller",
        heads, head_dim_name(m), m.head_dim(), kMaxDimension);
  }
}

void check_norms(const ModelConfig& m) {
  if (!m.norm_unit_offset || m.norm == NormKind::kRmsNorm || m.qk_norm != QkNormKind::kNone) return;
  throw_bad_input(
      "model.norm_unit_offset = true has no meaning where norms have no weights; set model.norm = rmsnorm, or false "
      "here");
}

void check_rope_scaling(const ModelConfig& m) {
  if (m.rope_scaling.kind != RopeScalingKind::kYarn || m.rope_theta > 1) return;
  throw_bad_input(
      "model.rope_scaling.kind = yarn needs frequencies that differ, so model.rope_theta = {} to be more than 1",
      m.rope_theta);
}

void check_window(const ModelConfig& m) {
  const auto refuse = [](std::string_view key, const auto& value, std::string_view why) {
    throw_bad_input("model.{} = {} {}", key, value, why);
  };
  if (m.local_rope_theta > 0 && m.local_rope_theta < 1) {
    refuse("local_rope_theta", m.local_rope_theta, "is less than 1; give 0 (as model.rope_theta) or at least 1");
  }
  if (m.sliding_window == 0) {
    constexpr std::string_view kNoWindow = "has no meaning without model.sliding_window; set that, or 0 here";
    if (m.full_attention_every != 0) refuse("full_attention_every", m.full_attention_every, kNoWindow);
    if (m.local_rope_theta != 0) refuse("local_rope_theta", m.local_rope_theta, kNoWindow);
    return;
  }
  if (m.full_attention_every == 1) {
    refuse("full_attention_every", 1, "leaves no block to model.sliding_window; set one of them to 0");
  }
  if (m.full_attention_every > m.num_layers) {
    refuse("full_attention_every", m.full_attention_every,
           fmt::format("is more than model.num_layers = {}, so no block has full attention; set it to 0",
                       m.num_layers));
  }
  if (m.full_attention_every != 0) return;
  if (m.local_rope_theta != 0) {
    refuse("local_rope_theta", m.local_rope_theta,
           "has no meaning where all blocks have a window (full_attention_every = 0); set model.rope_theta");
  }
  if (m.rope_scaling.kind != RopeScalingKind::kNone) {
    refuse("rope_scaling.kind", name_of(m.rope_scaling.kind),
           "scales no block where all have a window (model.full_attention_every = 0); use kind = none");
  }
}

void check_tower(const TowerConfig& t) {
  if (t.width % t.num_heads != 0) {
    throw_bad_input("model.vision.width = {} is not a multiple of model.vision.num_heads = {}; change one of them",
                    t.width, t.num_heads);
  }
  if (t.patch_size > t.image_size) {
    throw_bad_input("model.vision.patch_size = {} is more than model.vision.image_size = {}; change one of them",
                    t.patch_size, t.image_size);
  }
  t.num_blocks();  // throws for a hidden state that is not there
  for (const auto& [key, values] :
       {std::pair{"pixel_mean", &t.pixel_mean}, {"pixel_deviation", &t.pixel_deviation}}) {
    if (values->size() == 3) continue;
    throw_bad_input("model.vision.{} has {} numbers; give one for each of red, green and blue", key,
                    values->size());
  }
  if (t.keeps_class_token && !t.has_class_token()) {
    throw_bad_input("model.vision.keep_class_token = true needs tower = clip: {} has no class token",
                    name_of(t.kind));
  }
}

void check_vision(const Config& c) {
  const VisionConfig& v = c.model.vision;
  if (!v.exists()) {
    if (v != VisionConfig()) {
      throw_bad_input(
          "model.vision.tower = none, so its other keys have no meaning; set tower = clip or siglip, or remove them");
    }
    if (c.data.images_per_sequence == 0) return;
    throw_bad_input("data.images_per_sequence = {} has no meaning without model.vision.tower; set that, or 0 here",
                    c.data.images_per_sequence);
  }
  check_tower(v.tower);
  if (v.projector.column_major && !v.projector.downsamples()) {
    throw_bad_input("model.vision.column_major = true has no meaning with projector = {}; set it to false",
                    name_of(v.projector.kind));
  }
  if (v.image_token < 0 || v.image_token >= c.model.vocab_size) {
    throw_bad_input(
        "model.vision.image_token = {} is not below model.vocab_size = {}; give the id of image slots, images.token in the "
        "data.json of scripts/prepare_images.py",
        v.image_token, c.model.vocab_size);
  }
  if (c.data.images_per_sequence == 0) {
    throw_bad_input(
        "model.vision.tower = {} needs data.images_per_sequence of at least 1: for how many images of a sequence "
        "there is room",
        name_of(v.tower.kind));
  }
}

// Bounds on what is later computed in 64-bit integers, far above any machine.
void check_size(const Config& c) {
  constexpr double kMostElements = 1e15;
  constexpr double kMostTokens = 1e18;
  // Refuses too many, and patterns of names that none has.
  make_parameter_table(c.model, c.optimizer.decay_embeddings, c.parameter_rules());
  const double tokens =
      static_cast<double>(c.training.micro_batch_size) * static_cast<double>(c.data.sequence_length);
  const double width = static_cast<double>(std::max({2 * c.model.d_ffn, c.model.d_qkv(), c.model.d_model}));
  if (tokens * width > kMostElements) {
    throw_bad_input(
        "an activation of {:.3g} tokens x {:.3g} has more than {:.0e} elements; make "
        "training.micro_batch_size or data.sequence_length smaller",
        tokens, width, kMostElements);
  }
  // In 64 bits plans count what attention keeps of scores.
  constexpr double kMostScores = 1e17;
  const double scores =
      tokens * static_cast<double>(c.data.sequence_length) * static_cast<double>(c.model.num_heads);
  if (scores > kMostScores) {
    throw_bad_input(
        "training.micro_batch_size x data.sequence_length^2 x model.num_heads = {:.3g} attention scores, more than "
        "{:.0e}; make data.sequence_length = {} or training.micro_batch_size = {} smaller",
        scores, kMostScores, c.data.sequence_length, c.training.micro_batch_size);
  }
  if (tokens / static_cast<double>(c.distributed.context_parallel) > static_cast<double>(kMaxDimension)) {
    throw_bad_input(
        "training.micro_batch_size = {} x data.sequence_length = {} = {:.3g} tokens, more than a rank can take at a "
        "time ({}); make one of them smaller",
        c.training.micro_batch_size, c.data.sequence_length, tokens, kMaxDimension);
  }
  const double all_tokens = static_cast<double>(c.training.steps) *
                            static_cast<double>(c.training.global_batch_size) *
                            static_cast<double>(c.data.sequence_length);
  if (all_tokens > kMostTokens) {
    throw_bad_input(
        "training.steps x global_batch_size x data.sequence_length = {:.3g} tokens, more than {:.0e}; "
        "make training.steps smaller",
        all_tokens, kMostTokens);
  }
}

// The product that gives the rows of a rank's micro-batch, in words.
std::string_view micro_batch_rows(const Config& c) {
  if (c.distributed.context_parallel == 1) return "training.micro_batch_size * data.sequence_length";
  return "training.micro_batch_size * data.sequence_length / distributed.context_parallel";
}

// FP8 tensor cores work on 16 elements along the summed axis at a time, and every axis is summed over in one of
// forward, input gradient and weight gradient; the last sums over tokens.
void check_fp8_gemm(const Config& c) {
  constexpr int64_t kUnit = 16;
  if (c.precision.gemm == GemmPrecision::kCompute) return;
  const auto require_multiple = [&](std::string_view what, int64_t value) {
    if (value % kUnit == 0) return;
    throw_bad_input(
        "precision.gemm = {} needs {} = {} to be a multiple of {}; change it, or use precision.gemm = "
        "compute",
        name_of(c.precision.gemm), what, value, kUnit);
  };
  require_multiple("model.d_model", c.model.d_model);
  require_multiple("model.d_ffn", c.model.d_ffn);
  require_multiple("model.num_heads * model.head_dim", c.model.d_heads());
  require_multiple(fmt::format("(model.num_heads + 2 * model.num_kv_heads) * {}",
                               c.model.given_head_dim == 0 ? "d_model / num_heads" : "head_dim"),
                   c.model.d_qkv());
  require_multiple(micro_batch_rows(c), c.micro_batch_shape().num_tokens());
}

// A GPU's kernels would refuse these in the middle of a step.
void check_fp8_rows(const Config& c) {
  const auto require_few = [](std::string_view what, double rows) {
    if (rows <= static_cast<double>(kMaxFloat8Rows)) return;
    throw_bad_input(
        "{} = {:.0f} are more rows than the {} of which a GPU makes FP8 codes; make it smaller, or use no FP8",
        what, rows, kMaxFloat8Rows);
  };
  if (c.precision.has_fp8()) {
    require_few(micro_batch_rows(c), static_cast<double>(c.micro_batch_shape().num_tokens()));
  }
  if (c.precision.tower == Storage::kFp8) {
    const double images =
        static_cast<double>(c.training.micro_batch_size) * static_cast<double>(c.data.images_per_sequence);
    require_few("training.micro_batch_size * data.images_per_sequence * the rows of an image",
                images * static_cast<double>(c.model.vision.tower.num_tokens()));
  }
  if (c.precision.gemm == GemmPrecision::kCompute) return;
  require_few("2 * model.d_ffn", 2 * static_cast<double>(c.model.d_ffn));
  require_few("(model.num_heads + 2 * model.num_kv_heads) * head_dim", static_cast<double>(c.model.d_qkv()));
  if (c.precision.head == Storage::kFp8) require_few("model.vocab_size", static_cast<double>(c.model.vocab_size));
}

void check_fp8_head(const Config& c) {
  if (c.precision.head == Storage::kCompute) return;
  if (c.precision.gemm == GemmPrecision::kCompute) {
    throw_bad_input(
        "precision.head = fp8 needs precision.gemm = fp8_tensor or fp8_block, whose scaling it has; set that, or head "
        "= compute");
  }
  constexpr int64_t kUnit = 16;  // as check_fp8_gemm(): the weight's gradient is a sum over a chunk's tokens
  if (c.training.logits_chunk_tokens % kUnit != 0) {
    throw_bad_input(
        "precision.head = fp8 needs training.logits_chunk_tokens = {} to be a multiple of {}; change it, or use "
        "precision.head = compute",
        c.training.logits_chunk_tokens, kUnit);
  }
}

void check_fp8_tower(const ModelConfig& m, const PrecisionConfig& p) {
  if (p.tower == Storage::kCompute) return;
  if (!m.vision.exists()) {
    throw_bad_input("precision.tower = fp8 needs a tower; set model.vision.tower, or precision.tower = compute");
  }
  if (p.gemm == GemmPrecision::kCompute) {
    throw_bad_input(
        "precision.tower = fp8 needs precision.gemm = fp8_tensor or fp8_block, whose formats it has; set that, or "
        "tower = compute");
  }
  const auto require_multiple = [](std::string_view key, int64_t value, int64_t unit, std::string_view of) {
    if (value % unit == 0) return;
    throw_bad_input(
        "precision.tower = fp8 needs model.vision.{} = {} to be a multiple of {}{}; change it, or use precision.tower "
        "= compute",
        key, value, of, unit);
  };
  constexpr int64_t kUnit = 16;  // as check_fp8_gemm(); rows are padded
  constexpr std::string_view kGroup = "precision.group_size = ";
  const bool groups_width = p.norm_input == Storage::kFp8 || p.qkv == Storage::kFp8;
  require_multiple("width", m.vision.tower.width, kUnit, "");
  require_multiple("d_ffn", m.vision.tower.d_ffn, kUnit, "");
  if (groups_width) require_multiple("width", m.vision.tower.width, p.group_size, kGroup);
  if (p.up_gate == Storage::kFp8) require_multiple("d_ffn", m.vision.tower.d_ffn, p.group_size, kGroup);
}

void check_kept_activations(const ModelConfig& m, const PrecisionConfig& p) {
  const auto require_groups = [&](std::string_view key, Storage storage, std::string_view what, int64_t width) {
    if (storage == Storage::kCompute || width % p.group_size == 0) return;
    throw_bad_input(
        "precision.{} = fp8 needs {} = {} to be a multiple of precision.group_size = {}; change one of "
        "them, or use precision.{} = compute",
        key, what, width, p.group_size, key);
  };
  require_groups("norm_input", p.norm_input, "model.d_model", m.d_model);
  require_groups("up_gate", p.up_gate, "model.d_ffn", m.d_ffn);
  require_groups("qkv", p.qkv, head_dim_name(m), m.head_dim());
  if (p.save_silu && p.up_gate != Storage::kFp8) {
    throw_bad_input("precision.save_silu = true needs precision.up_gate = fp8; set that, or save_silu = false");
  }
  const int64_t most = std::max<int64_t>(m.num_layers - ActivationOffload::kBuffers, 0);
  if (p.offload_blocks > most) {
    throw_bad_input(
        "precision.offload_blocks = {} is more than {}: of model.num_layers = {}, {} blocks always stay on the "
        "device; make it smaller",
        p.offload_blocks, most, m.num_layers, ActivationOffload::kBuffers);
  }
}

void check_compute(const PrecisionConfig& p, const OptimizerConfig& o) {
  const bool fp32 = p.compute == DType::kF32;
  if (fp32 && o.master != MasterForm::kNone) {
    throw_bad_input(
        "precision.compute = fp32 needs optimizer.master = none, not {}: the weights are their own master",
        name_of(o.master));
  }
  if (!fp32 && o.master == MasterForm::kNone) {
    throw_bad_input(
        "optimizer.master = none needs precision.compute = fp32; use master = fp32, fp24_split or bf16_sr");
  }
  if (fp32 && p.eval == EvalNumerics::kBf16) {
    throw_bad_input("precision.eval = bf16 needs precision.compute = bf16; use eval = same");
  }
}

void check_offloaded_weights(const Config& c) {
  const PrecisionConfig& p = c.precision;
  if (!p.offload_weights) return;
  if (!c.optimizer.offload) {
    throw_bad_input(
        "precision.offload_weights = true needs optimizer.offload = true, whose updates copy weights to the GPU and "
        "back; set that, or offload_weights = false");
  }
  if (p.gemm == GemmPrecision::kCompute) return;
  if (p.weight_copies != WeightCopies::kNone && p.eval == EvalNumerics::kBf16) {
    throw_bad_input(
        "precision.offload_weights = true keeps FP8 copies alone on the GPU, which precision.eval = bf16 cannot "
        "use; use eval = same, or weight_copies = none");
  }
  if (p.weight_copies == WeightCopies::kNone && c.telemetry.interval > 0) {
    throw_bad_input(
        "telemetry.interval = {} needs FP8 copies of weights that are in host memory; use precision.weight_copies = "
        "rows, or interval = 0",
        c.telemetry.interval);
  }
}

void check_parameter_rules(const OptimizerConfig& o) {
  if (o.lr_factors.size() == o.lr_patterns.size()) return;
  throw_bad_input("optimizer.lr_factors has {} numbers, but lr_patterns has {} entries; give one for each",
                  o.lr_factors.size(), o.lr_patterns.size());
}

void check_spike_window(const TrainingConfig& t) {
  if (t.spike_window == 1) {
    throw_bad_input(
        "training.spike_window = 1 has no deviation to tell a spike by; use 2 or more, better some hundreds, or 0");
  }
}

// Units are updated before the gradient norm of the step, and what is not finite in later gradients, are known.
void check_release(const OptimizerConfig& o, const TrainingConfig& t) {
  if (!o.release_gradients) return;
  if (t.non_finite == NonFinitePolicy::kSkip) {
    throw_bad_input(
        "optimizer.release_gradients = true cannot skip a step of which a part is done: set training.non_finite = "
        "stop, which resumes from the last checkpoint, or release_gradients = false");
  }
  if (t.spike_window > 0) {
    throw_bad_input(
        "optimizer.release_gradients = true cannot skip a spike, whose gradient norm is known when its step is "
        "done: set training.spike_window = 0, not {}, or release_gradients = false",
        t.spike_window);
  }
}

void check_schedule(const ScheduleConfig& s, int64_t training_steps) {
  const int64_t total = s.total_steps == 0 ? training_steps : s.total_steps;
  const std::string_view total_key = s.total_steps == 0 ? "training.steps" : "optimizer.schedule.total_steps";
  if (s.kind != ScheduleKind::kWsd && s.decay_steps != 0) {
    throw_bad_input("optimizer.schedule.decay_steps = {} has no meaning with kind = {}; set it to 0, or kind = wsd",
                    s.decay_steps, name_of(s.kind));
  }
  if (total == 0) return;  // nothing will be trained
  if (s.warmup_steps > total) {
    throw_bad_input("optimizer.schedule.warmup_steps = {} is more than {} = {}; change one of them", s.warmup_steps,
                    total_key, total);
  }
  if (s.decay_steps > total - s.warmup_steps) {
    throw_bad_input("optimizer.schedule.warmup_steps + decay_steps = {} is more than {} = {}; change one of them",
                    s.warmup_steps + s.decay_steps, total_key, total);
  }
}

void check_training(const Config& c) {
  if (c.training.global_batch_size % c.training.micro_batch_size != 0) {
    throw_bad_input(
        "training.global_batch_size = {} is not a multiple of training.micro_batch_size = {}; change one "
        "of them",
        c.training.global_batch_size, c.training.micro_batch_size);
  }
  parse_sets(c.evaluation.sets, "evaluation.sets");
  if (c.training.eval_interval > 0 && c.data.eval.empty() && c.evaluation.sets.empty() &&
      c.evaluation.tasks.empty()) {
    throw_bad_input(
        "training.eval_interval = {} but data.eval, evaluation.sets and evaluation.tasks list no files; add some, "
        "or set eval_interval = 0",
        c.training.eval_interval);
  }
}

void check_data(const DataConfig& d, int64_t vocab_size) {
  if (!d.weights.empty() && d.weights.size() != d.train.size()) {
    throw_bad_input("data.weights has {} numbers, but data.train has {} entries; give one for each, or none",
                    d.weights.size(), d.train.size());
  }
  if (std::any_of(d.weights.begin(), d.weights.end(), [](double weight) { return weight == 0; })) {
    throw_bad_input("data.weights holds 0; remove the sources that you do not want");
  }
  for (const auto& [key, id, verb] :
       {std::tuple{"document_start", d.document_start, "begin"}, {"document_end", d.document_end, "end"}}) {
    if (id >= 0 && d.documents != DocumentMode::kSeparate) {
      throw_bad_input("data.{} = {} has no meaning with data.documents = joined; use separate, or -1", key, id);
    }
    if (id >= vocab_size) {
      throw_bad_input("data.{} = {} is not a token of model.vocab_size = {}, so no document would ever {}", key, id,
                      vocab_size, verb);
    }
  }
}

void check_paths(const Config& c) {
  const auto check = [](std::string_view key, const std::string& path) {
    if (is_store_address(path)) throw_bad_input("{}: \"{}\" {}", key, path, kStoreAdvice);
  };
  const auto check_all = [&](std::string_view key, const std::vector<std::string>& paths) {
    for (const std::string& path : paths) check(key, path);
  };
  check("checkpoint.folder", c.checkpoint.folder);
  check("checkpoint.init_from", c.checkpoint.init_from);
  check("data.tokenizer", c.data.tokenizer);
  check_all("data.train", c.data.train);
  check_all("data.eval", c.data.eval);
  check_all("evaluation.sets", c.evaluation.sets);
  check_all("evaluation.tasks", c.evaluation.tasks);
}

// A shell reads it like this: within double quotes a backslash takes the next letter's meaning, within single ones
// it has none.
bool has_path_in_quotes(std::string_view command) {
  char open = 0;  // the quote that is
  for (size_t i = 0; i < command.size(); ++i) {
    if (open != 0 && command.substr(i).starts_with("{path}")) return true;
    const char c = command[i];
    if (c == '\\' && open != '\'') {
      ++i;
    } else if (c == open) {
      open = 0;
    } else if (open == 0 && (c == '"' || c == '\'')) {
      open = c;
    }
  }
  return false;
}

void check_saving(const CheckpointConfig& c) {
  if (c.on_saved.empty()) return;
  if (c.on_saved.find("{path}") == std::string::npos) {
    throw_bad_input(
        "checkpoint.on_saved = \"{}\" has no {{path}}, which stands for the folder of the checkpoint; add it",
        c.on_saved);
  }
  if (!has_path_in_quotes(c.on_saved)) return;
  throw_bad_input("checkpoint.on_saved = {} has {{path}} in quotes, which it gets by itself; write it without",
                  c.on_saved);
}

}  // namespace

void validate(const Config& config) {
  check_limits(config);
  check_paths(config);
  check_saving(config.checkpoint);
  check_heads(config.model);
  check_norms(config.model);
  check_rope_scaling(config.model);
  check_window(config.model);
  check_parameter_rules(config.optimizer);
  check_finetune(config);
  check_vision(config);
  check_distributed(config);
  check_size(config);
  check_fp8_gemm(config);
  check_fp8_rows(config);
  check_fp8_head(config);
  check_fp8_tower(config.model, config.precision);
  check_kept_activations(config.model, config.precision);
  check_compute(config.precision, config.optimizer);
  check_offloaded_weights(config);
  check_spike_window(config.training);
  check_release(config.optimizer, config.training);
  check_schedule(config.optimizer.schedule, config.training.steps);
  check_data(config.data, config.model.vocab_size);
  check_training(config);
}

}  // namespace parka
