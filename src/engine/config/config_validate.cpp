#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/activation_offload.h"
#include "model/coded_weights.h"
#include "model/parameter_table.h"

// Rules between fields. Each message names the keys with their values and says what to change.
namespace parka {
namespace {

// The rows of the weight of q, k and v, by the keys that give them.
constexpr const char* kQkvName =
    "(model.num_heads + 2 * model.num_kv_heads) * the width of a head (model.head_dim, or model.d_model / num_heads)";

void check_limits(const Config& config) {
  Config copy = config;
  for (const ConfigField& field : make_config_table(copy).fields) {
    const std::string problem = set_field(field, get_field(field));
    if (!problem.empty()) throw_bad_input("{}: {}", field.path, problem);
  }
}

std::string_view head_dim_name(const ModelConfig& m) {
  return m.given_head_dim == 0 ? "model.d_model / model.num_heads" : "model.head_dim";
}

// The product that gives the rows of a rank's micro-batch, in words.
std::string_view micro_batch_rows(const Config& c) {
  if (c.distributed.context_parallel == 1) return "training.micro_batch_size * data.sequence_length";
  return "training.micro_batch_size * data.sequence_length / distributed.context_parallel";
}

// A key that does not go with another: it is shown with its value, and then why, and what to do.
struct Conflict {
  bool exists;
  const char *key, *why;
};

std::string describe(Config c, const Conflict& conflict) {
  const ordered_json value = get_field(*make_config_table(c).find(conflict.key));
  return fmt::format("{} = {} {}", conflict.key, value.is_string() ? value.get<std::string>() : value.dump(),
                     conflict.why);
}

void check(const Config& c, std::initializer_list<Conflict> conflicts) {
  for (const Conflict& conflict : conflicts) {
    if (conflict.exists) throw_bad_input("{}", describe(c, conflict));
  }
}

bool has_evaluations(const Config& c) {
  return !c.data.eval.empty() || !c.evaluation.sets.empty() || !c.evaluation.tasks.empty() ||
         !c.evaluation.prompts.empty();
}

void require_multiple(std::string_view what, int64_t value, std::string_view of, int64_t unit,
                      std::string_view advice = "change one of them") {
  if (value % unit == 0) return;
  throw_bad_input("{} = {} is not a multiple of {}{}{}; {}", what, value, of, of.empty() ? "" : " = ", unit,
                  advice);
}

void require_at_most(std::string_view what, double value, std::string_view limit, double most,
                     std::string_view advice = "make it smaller") {
  if (value <= most) return;
  throw_bad_input("{} = {:.15g} is more than {}{}{:.15g}; {}", what, value, limit, limit.empty() ? "" : " = ", most,
                  advice);
}

void check_model(const Config& c) {
  const ModelConfig& m = c.model;
  if (m.given_head_dim == 0) require_multiple("model.d_model", m.d_model, "model.num_heads", m.num_heads);
  require_multiple("model.d_model", m.d_model, "", 2, "make it even");
  require_multiple(head_dim_name(m), m.head_dim(), "", 2,
                   "rotary position embedding rotates pairs of columns, so make it even");
  require_multiple("model.num_heads", m.num_heads, "model.num_kv_heads", m.kv_heads());
  require_at_most(kQkvName, static_cast<double>(m.num_heads + 2 * m.kv_heads()) * static_cast<double>(m.head_dim()),
                  "", static_cast<double>(kMaxDimension));
  const bool has_window = m.sliding_window != 0, all_have = has_window && m.full_attention_every == 0;
  check(
      c,
      {
          {m.norm_unit_offset && m.norm != NormKind::kRmsNorm && m.qk_norm == QkNormKind::kNone,
           "model.norm_unit_offset",
           "has no meaning where norms have no weights; set model.norm = rmsnorm, or false here"},
          {m.rope_scaling.kind == RopeScalingKind::kYarn && m.rope_theta <= 1, "model.rope_theta",
           "makes all frequencies the same; model.rope_scaling.kind = yarn needs more than 1"},
          {m.local_rope_theta > 0 && m.local_rope_theta < 1, "model.local_rope_theta",
           "is less than 1; give 0 (as model.rope_theta) or at least 1"},
          {!has_window && m.full_attention_every != 0, "model.full_attention_every",
           "has no meaning without model.sliding_window; set that, or 0 here"},
          {!has_window && m.local_rope_theta != 0, "model.local_rope_theta",
           "has no meaning without model.sliding_window; set that, or 0 here"},
          {m.full_attention_every == 1, "model.full_attention_every",
           "leaves no block to model.sliding_window; set one of them to 0"},
          {m.full_attention_every > m.num_layers, "model.full_attention_every",
           "is more than model.num_layers, so no block has full attention; set it to 0"},
          {all_have && m.local_rope_theta != 0, "model.local_rope_theta",
           "has no meaning where all blocks have a window (model.full_attention_every = 0); set model.rope_theta"},
          {all_have && m.rope_scaling.kind != RopeScalingKind::kNone, "model.rope_scaling.kind",
           "scales no block where all have a window (model.full_attention_every = 0); use kind = none"},
      });
}

// Refuses what does not go with a mixture of experts yet.
void check_moe(const Config& c) {
  const MoeConfig& m = c.model.moe;
  const TrainingConfig& t = c.training;
  const FinetuneConfig& f = c.finetune;
  const bool lora = f.method == FinetuneMethod::kLora, qst = f.method == FinetuneMethod::kQst;
  const bool adapts_experts =
      lora && std::ranges::any_of(f.targets, [](const auto& target) { return target.starts_with("experts."); });
  if (!m.exists()) {
    check(c,
          {{adapts_experts, "finetune.targets", "has layers of experts, and the model has none; remove them"},
           {m != MoeConfig(), "model.moe.num_experts",
            "leaves the other keys of model.moe without meaning; set it, or remove them"},
           {t.balance_loss != 0, "training.balance_loss", "needs experts; set model.moe.num_experts, or 0 here"},
           {t.router_z_loss != 0, "training.router_z_loss", "needs experts; set model.moe.num_experts, or 0 here"},
           {t.router_bias_rate != 0, "training.router_bias_rate",
            "needs experts; set model.moe.num_experts, or 0 here"},
           {c.distributed.expert_parallel != 1, "distributed.expert_parallel",
            "needs experts; set model.moe.num_experts, or 1 here"}});
    return;
  }
  const bool is_divided = c.distributed.expert_parallel > 1;
  require_multiple("model.moe.num_experts", m.num_experts, "distributed.expert_parallel",
                   c.distributed.expert_parallel);
  require_multiple("model.moe.num_experts", m.num_experts, "model.moe.groups", m.groups);
  const int64_t per_group = m.num_experts / m.groups;
  const auto of_feed_forward = [](const std::string& target) {
    return target == "gate_proj" || target == "up_proj" || target == "down_proj";
  };
  check(
      c,
      {{m.experts_per_token < 1 || m.experts_per_token > m.num_experts, "model.moe.experts_per_token",
        "is not between 1 and model.moe.num_experts; set it"},
       {m.experts_per_token == 1 && m.normalize_weights, "model.moe.normalize_weights",
        "makes the weight of a single expert 1, so that its router has no gradient; use false, or more "
        "experts_per_token"},
       {m.groups_kept > m.groups, "model.moe.groups_kept", "is more than model.moe.groups; change one of them"},
       {m.experts_per_token > m.groups_kept * per_group, "model.moe.experts_per_token",
        "is more than the experts of groups_kept groups; change one of them"},
       {m.groups > 1 && per_group < 2, "model.moe.groups", "leaves groups of one expert; use fewer"},
       {m.dense_layers >= c.model.num_layers, "model.moe.dense_layers",
        "leaves no block with experts; use fewer, or remove model.moe"},
       {(m.dense_layers > 0) != (m.dense_width > 0), "model.moe.dense_width",
        "and model.moe.dense_layers go together: set both, or neither"},
       {c.precision.gemm == GemmPrecision::kFp8Block, "precision.gemm",
        "does not go with model.moe yet; use fp8_tensor or compute"},
       {c.model.norm_placement == NormPlacement::kAfter, "model.norm_placement",
        "does not go with model.moe yet; use before or both"},
       {c.distributed.zero_stage == 3 && (m.dense_layers > 0 || m.correction_bias), "distributed.zero_stage",
        "does not go with model.moe.dense_layers or correction_bias yet; use 2 or less"},
       {c.precision.offload_weights, "precision.offload_weights", "does not go with model.moe yet; use false"},
       {is_divided && (lora || qst), "finetune.method",
        "does not go with distributed.expert_parallel yet; use full"},
       {is_divided && !c.evaluation.tasks.empty(), "evaluation.tasks",
        "does not go with distributed.expert_parallel; evaluate tasks with `parka eval`, which has all experts"},
       {is_divided &&
            m.num_experts / c.distributed.expert_parallel * c.model.d_model * c.model.d_ffn % Shard::kGroup != 0,
        "distributed.expert_parallel", "leaves each rank weights that are no multiple of 128; use fewer ranks"},
       {c.model.vision.exists(), "model.vision.tower", "does not go with model.moe yet; use tower = none"},
       {t.router_bias_rate != 0 && !m.correction_bias, "training.router_bias_rate",
        "moves nothing without model.moe.correction_bias; set that, or 0 here"},
       {t.router_bias_rate != 0 && c.optimizer.release_gradients, "training.router_bias_rate",
        "does not go with optimizer.release_gradients; use false there, or 0 here"},
       {t.router_bias_rate != 0 && (lora || qst), "training.router_bias_rate",
        "does not go with this finetune.method, which saves what it adds alone; use 0"},
       {qst && (t.balance_loss != 0 || t.router_z_loss != 0),
        t.balance_loss != 0 ? "training.balance_loss" : "training.router_z_loss",
        "has no gradient with finetune.method = qst; use 0"},
       {adapts_experts && c.precision.gemm != GemmPrecision::kCompute, "finetune.targets",
        "has layers of experts, whose adapters go with precision.gemm = compute alone; remove them, or use recipe bf16"},
       {adapts_experts && f.dropout > 0, "finetune.dropout",
        "does not go with layers of experts in finetune.targets yet; use 0"},
       {lora && m.dense_layers == 0 && m.shared_width == 0 && std::ranges::any_of(f.targets, of_feed_forward),
        "finetune.targets",
        "has feed-forwards, and those of the model are experts; name experts.gate_proj and so on, or attention alone"},
       {is_4bit(f.base) && c.model.d_model * c.model.d_ffn % kBlock4Bit != 0, "finetune.base",
        "needs matrices of experts of a multiple of 64 elements, model.d_model * model.d_ffn; use compute or fp8"},
       {t.balance_loss == 0 && t.balance_form != BalanceForm::kPerBlock, "training.balance_form",
        "has no meaning without training.balance_loss; set that, or per_block here"}});
}

void check_vision(const Config& c) {
  const VisionConfig& v = c.model.vision;
  const TowerConfig& t = v.tower;
  const int64_t images = c.data.images_per_sequence;
  if (!v.exists()) {
    check(c, {{v != VisionConfig(), "model.vision.tower",
               "leaves its other keys without meaning; set tower = clip or siglip, or remove them"},
              {images != 0, "data.images_per_sequence",
               "has no meaning without model.vision.tower; set that, or 0 here"}});
    return;
  }
  require_multiple("model.vision.width", t.width, "model.vision.num_heads", t.num_heads);
  require_at_most("model.vision.patch_size", static_cast<double>(t.patch_size), "model.vision.image_size",
                  static_cast<double>(t.image_size), "change one of them");
  t.num_blocks();  // throws for a hidden state that is not there
  constexpr const char* kThreeNumbers = "is not one number for each of red, green and blue; give three";
  check(
      c,
      {
          {t.pixel_mean.size() != 3, "model.vision.pixel_mean", kThreeNumbers},
          {t.pixel_deviation.size() != 3, "model.vision.pixel_deviation", kThreeNumbers},
          {t.keeps_class_token && !t.has_class_token(), "model.vision.keep_class_token",
           "needs model.vision.tower = clip: others have no class token"},
          {v.projector.column_major && !v.projector.downsamples(), "model.vision.column_major",
           "has no meaning with this model.vision.projector; set it to false"},
          {v.image_token < 0 || v.image_token >= c.model.vocab_size, "model.vision.image_token",
           "is not below model.vocab_size; give the id of image slots, images.token in the data.json of parka prepare-images"},
          {images == 0, "data.images_per_sequence",
           "has room for none, and model.vision.tower needs at least 1: the most images of a sequence"},
          {c.finetune.method != FinetuneMethod::kFull, "finetune.method",
           "does not go with model.vision.tower yet; use method = full"},
      });
}

// Bounds on what is later computed in 64-bit integers, far above any machine, and on what a GPU's kernels take.
void check_size(const Config& c) {
  // Refuses too many, and patterns of names that none has or without a factor each.
  const ParameterTable table = make_parameter_table(c.model, c.optimizer.decay_embeddings, c.parameter_rules());
  const auto reads_both = [](const ParameterInfo& p) { return p.quantized && !p.quantized_forward; };
  if (c.distributed.zero_stage == 3 && c.precision.gemm != GemmPrecision::kCompute &&
      std::ranges::any_of(table.all, reads_both)) {
    throw_bad_input(
        "precision.{}: products of forward alone need bf16 weights, and distributed.zero_stage = 3 gathers FP8 codes; "
        "leave it out, or use zero_stage = 2",
        c.precision.forward_format == DType::kI8 ? "forward_format = int8" : "unquantized with .forward");
  }
  const auto length = static_cast<double>(c.data.sequence_length);
  const double tokens = static_cast<double>(c.training.micro_batch_size) * length;
  const double rows = tokens / static_cast<double>(c.distributed.context_parallel);
  const MoeConfig& moe = c.model.moe;
  const auto width = static_cast<double>(
      std::max({2 * c.model.d_ffn * std::max<int64_t>(moe.experts_per_token, 1),
                2 * std::max(moe.dense_width, moe.shared_width), c.model.d_qkv(), c.model.d_model}));
  require_at_most("training.micro_batch_size * data.sequence_length * the columns of an activation", tokens * width,
                  "", 1e15);
  require_at_most("training.micro_batch_size * data.sequence_length^2 * model.num_heads",
                  tokens * length * static_cast<double>(c.model.num_heads), "", 1e17);
  require_at_most(micro_batch_rows(c), rows, "", static_cast<double>(kMaxDimension));
  require_at_most(
      "training.steps * training.global_batch_size * data.sequence_length",
      static_cast<double>(c.training.steps) * static_cast<double>(c.training.global_batch_size) * length, "", 1e18);
  const auto require_few = [](bool is_fp8, std::string_view what, double value) {
    if (!is_fp8) return;
    require_at_most(what, value, "the rows of which a GPU makes FP8 codes", static_cast<double>(kMaxFloat8Rows),
                    "make it smaller, or use no FP8");
  };
  const PrecisionConfig& p = c.precision;
  const bool gemm = p.gemm != GemmPrecision::kCompute;
  require_few(p.has_fp8(), micro_batch_rows(c), rows);
  const double expert_rows_most =
      rows * static_cast<double>(moe.experts_per_token) + static_cast<double>(moe.num_experts * kExpertRows);
  require_few(moe.exists() && p.has_fp8(), "the tokens of a micro-batch * model.moe.experts_per_token",
              expert_rows_most);
  require_few(p.tower == Storage::kFp8,
              "training.micro_batch_size * data.images_per_sequence * the rows of an image",
              static_cast<double>(c.training.micro_batch_size) * static_cast<double>(c.data.images_per_sequence) *
                  static_cast<double>(c.model.vision.exists() ? c.model.vision.tower.num_tokens() : 0));
  require_few(gemm, "2 * model.d_ffn", 2 * static_cast<double>(c.model.d_ffn));
  require_few(gemm, "(model.num_heads + 2 * model.num_kv_heads) * head_dim", static_cast<double>(c.model.d_qkv()));
  require_few(gemm && p.head == Storage::kFp8, "model.vocab_size", static_cast<double>(c.model.vocab_size));
}

// FP8 tensor cores work on 16 elements along the summed axis at a time, and every axis is summed over in one of
// forward, input gradient and weight gradient; the last sums over tokens. Stored codes share scales in groups.
void check_fp8(const Config& c) {
  constexpr int64_t kUnit = 16;
  const ModelConfig& m = c.model;
  const PrecisionConfig& p = c.precision;
  const TowerConfig& t = m.vision.tower;
  const auto require_units = [&](std::string_view key, std::string_view value, std::string_view what,
                                 int64_t number) {
    require_multiple(what, number, "", kUnit,
                     fmt::format("{} = {} needs it; change it, or use {} = compute", key, value, key));
  };
  const auto require_groups = [&](std::string_view key, Storage storage, std::string_view what, int64_t number) {
    if (storage == Storage::kCompute) return;
    require_multiple(what, number, "precision.group_size", p.group_size,
                     fmt::format("{} = fp8 needs it; change one of them, or use {} = compute", key, key));
  };
  if (p.gemm != GemmPrecision::kCompute) {
    const auto require = [&](std::string_view what, int64_t number) {
      require_units("precision.gemm", name_of(p.gemm), what, number);
    };
    require("model.d_model", m.d_model);
    require("model.d_ffn", m.d_ffn);
    require("model.moe.shared_width", m.moe.shared_width);
    require("model.moe.dense_width", m.moe.dense_width);
    require("model.num_heads * model.head_dim", m.d_heads());
    require(kQkvName, m.d_qkv());
    require(micro_batch_rows(c), c.micro_batch_shape().num_tokens());
  }
  if (p.head == Storage::kFp8) {
    require_units("precision.head", "fp8", "training.logits_chunk_tokens", c.training.logits_chunk_tokens);
  }
  if (p.tower == Storage::kFp8) {  // its rows are padded
    require_units("precision.tower", "fp8", "model.vision.width", t.width);
    require_units("precision.tower", "fp8", "model.vision.d_ffn", t.d_ffn);
    const bool groups_width = p.norm_input == Storage::kFp8 || p.qkv == Storage::kFp8;
    if (groups_width) require_groups("precision.tower", p.tower, "model.vision.width", t.width);
    if (p.up_gate == Storage::kFp8) require_groups("precision.tower", p.tower, "model.vision.d_ffn", t.d_ffn);
  }
  require_groups("precision.norm_input", p.norm_input, "model.d_model", m.d_model);
  require_groups("precision.up_gate", p.up_gate, "model.d_ffn", m.d_ffn);
  require_groups("precision.up_gate", p.up_gate, "model.moe.shared_width", m.moe.shared_width);
  require_groups("precision.up_gate", p.up_gate, "model.moe.dense_width", m.moe.dense_width);
  require_groups("precision.qkv", p.qkv, head_dim_name(m), m.head_dim());
}

// Formats, and where tensors lie.
void check_precision(const Config& c) {
  const PrecisionConfig& p = c.precision;
  const OptimizerConfig& o = c.optimizer;
  const bool fp32 = p.compute == DType::kF32, gemm = p.gemm != GemmPrecision::kCompute;
  const bool no_copies = p.weight_copies == WeightCopies::kNone, evaluates_bf16 = p.eval == EvalNumerics::kBf16;
  const bool coded = c.finetune.base != BaseFormat::kCompute, fp8_base = c.finetune.base == BaseFormat::kFp8;
  const bool samples = c.telemetry.interval > 0, stage3 = c.distributed.zero_stage == 3;
  constexpr const char* kNeedsGemm =
      "needs precision.gemm = fp8_tensor or fp8_block, whose formats it has; set that, or compute here";
  check(
      c,
      {
          {p.tower == Storage::kFp8 && !c.model.vision.exists(), "precision.tower",
           "needs a tower; set model.vision.tower, or compute here"},
          {p.tower == Storage::kFp8 && !gemm, "precision.tower", kNeedsGemm},
          {p.head == Storage::kFp8 && !gemm, "precision.head", kNeedsGemm},
          {p.forward_format == DType::kI8 && !gemm, "precision.forward_format",
           "needs precision.gemm = fp8_tensor or fp8_block, for backward; set that, or e4m3"},
          {p.forward_format == DType::kI8 && fp32, "precision.forward_format",
           "needs precision.compute = bf16; set that, or e4m3"},
          {o.kind != OptimizerKind::kMuon && o.orthogonalization != OptimizerConfig().orthogonalization,
           "optimizer.orthogonalization", "has no meaning without optimizer.kind = muon; set that, or remove it"},
          {p.save_silu && p.up_gate != Storage::kFp8, "precision.save_silu",
           "needs precision.up_gate = fp8; set that, or save_silu = false"},
          {fp32 && o.master != MasterForm::kNone, "optimizer.master",
           "has no meaning with precision.compute = fp32, whose weights are their own master; use none"},
          {!fp32 && o.master == MasterForm::kNone, "optimizer.master",
           "needs precision.compute = fp32; use master = fp32, fp24_split or bf16_sr"},
          {fp32 && evaluates_bf16, "precision.eval", "needs precision.compute = bf16; use eval = same"},
          {p.offload_weights && !o.offload, "precision.offload_weights",
           "needs optimizer.offload = true, whose updates copy weights to the GPU and back; set that, or false here"},
          {p.offload_weights && gemm && !no_copies && evaluates_bf16, "precision.eval",
           "cannot use the FP8 copies that precision.offload_weights keeps alone on the GPU; use same, or weight_copies = none"},
          {p.offload_weights && gemm && no_copies && samples, "telemetry.interval",
           "needs FP8 copies of weights that are in host memory; use precision.weight_copies = rows, or interval = 0"},
          {coded && c.finetune.method == FinetuneMethod::kFull, "finetune.base",
           "is for weights that stay as they are; set finetune.method = lora or qst, or base = compute"},
          {coded && p.offload_weights, "finetune.base",
           "keeps codes on the device; set precision.offload_weights = false, or base = compute"},
          {fp8_base && !gemm, "finetune.base",
           "keeps the codes of FP8 GEMMs, and precision.gemm = compute has none; use a recipe like parka, or base = nf4"},
          {fp8_base && no_copies, "finetune.base",
           "has no weights but the copies that precision.weight_copies = none leaves out; use rows or both"},
          {fp8_base && p.gemm == GemmPrecision::kFp8Block && p.weight_copies == WeightCopies::kRows,
           "finetune.base",
           "cannot transpose codes of precision.gemm = fp8_block on use: set precision.weight_copies = both"},
          {fp8_base && samples, "telemetry.interval",
           "compares FP8 codes with weights, which finetune.base = fp8 does not keep; set it to 0, or base = compute"},
          {c.distributed.shard_size != 0 && c.distributed.zero_stage == 0, "distributed.shard_size",
           "has no meaning with distributed.zero_stage = 0, which shards nothing; set it to 0"},
          {stage3 && p.has_fp8() && evaluates_bf16, "precision.eval",
           "needs bf16 weights, and distributed.zero_stage = 3 gathers FP8 codes alone; use same, or zero_stage = 2"},
          {stage3 && samples, "telemetry.interval",
           "needs whole weights; use distributed.zero_stage = 2, or interval = 0"},
      });
  const int64_t most = std::max<int64_t>(c.model.num_layers - ActivationOffload::kBuffers, 0);
  require_at_most("precision.offload_blocks", static_cast<double>(p.offload_blocks),
                  "the blocks that need not stay on the device", static_cast<double>(most));
}

// A key of another method than the chosen one would be ignored.
void check_keys_of_method(const Config& c) {
  Config own = c, defaults;
  const ConfigTable given = make_config_table(own), standard = make_config_table(defaults);
  for (const ConfigField& field : given.fields) {
    if (section_of(field.path) != "finetune") continue;
    const std::string key(key_of(field.path));
    if (is_used_by(c.finetune.method, c.finetune.downsample, key)) continue;
    if (get_field(field) == get_field(*standard.find(field.path))) continue;
    if (is_used_by(c.finetune.method, defaults.finetune.downsample, key)) {
      throw_bad_input("{} has no meaning with finetune.downsample = {}; remove it, or change how h is read",
                      field.path, name_of(c.finetune.downsample));
    }
    throw_bad_input("{} has no meaning with finetune.method = {}; remove it, or change the method", field.path,
                    name_of(c.finetune.method));
  }
}

void check_finetune(const Config& c) {
  check_keys_of_method(c);
  const FinetuneConfig& f = c.finetune;
  const bool qst = f.method == FinetuneMethod::kQst, lora = f.method == FinetuneMethod::kLora;
  const bool shares = c.distributed.context_parallel > 1;  // sequences
  check(
      c,
      {
          {(qst || lora) && !c.optimizer.frozen.empty(), "optimizer.frozen",
           "has no meaning with this finetune.method, which trains what it adds alone; remove it"},
          {qst && f.kept == Storage::kFp8 && is_pool(f.downsample), "finetune.kept",
           "has no meaning with this finetune.downsample, which keeps nothing; use compute"},
          // Its frozen blocks do not go backward.
          {qst && c.precision.offload_weights, "precision.offload_weights",
           "does not go with finetune.method = qst; set it to false"},
          {qst && c.precision.offload_blocks > 0, "precision.offload_blocks",
           "does not go with finetune.method = qst, whose blocks keep nothing for backward; set it to 0"},
          {qst && c.telemetry.interval > 0, "telemetry.interval",
           "does not go with finetune.method = qst; set it to 0"},
          {lora && f.targets.empty(), "finetune.targets", "gives no layer an adapter; give some, or method = full"},
          {lora && f.alpha == 0, "finetune.alpha",
           "multiplies adapters and their gradients by 0, so that nothing is trained; give more, finetune.rank for example"},
          {shares && qst, "finetune.method", "does not go with distributed.context_parallel; use lora"},
          {shares && lora && f.dropout > 0, "finetune.dropout",
           "does not go with distributed.context_parallel; set it to 0"},
          {shares && c.model.vision.exists(), "model.vision.tower",
           "does not go with distributed.context_parallel; set that to 1, or train without images"},
          {shares && !c.evaluation.tasks.empty(), "evaluation.tasks",
           "does not go with distributed.context_parallel; evaluate tasks with `parka eval`, whose one rank has its sequences alone"},
          {shares && !c.evaluation.prompts.empty(), "evaluation.prompts",
           "does not go with distributed.context_parallel; sample with `parka generate`, whose one rank has its sequences alone"},
      });
  for (const std::string& target : f.targets) {
    if (!lora || std::ranges::count(kAdapterTargets, target) > 0) continue;
    throw_bad_input("finetune.targets holds \"{}\"; wanted some of {}", target, fmt::join(kAdapterTargets, ", "));
  }
  // Ranks that share sequences divide their tokens, and in attention the heads.
  const auto require_shares = [&](std::string_view key, int64_t value) {
    require_multiple(key, value, "distributed.context_parallel", c.distributed.context_parallel);
  };
  require_shares("data.sequence_length", c.data.sequence_length);
  require_shares("model.num_heads", c.model.num_heads);
  require_shares(c.model.num_kv_heads == 0 ? "model.num_heads" : "model.num_kv_heads", c.model.kv_heads());
}

void check_training(const Config& c) {
  const OptimizerConfig& o = c.optimizer;
  const TrainingConfig& t = c.training;
  const ScheduleConfig& s = o.schedule;
  parse_sets(c.evaluation.sets, "evaluation.sets");
  check(
      c,
      {
          {t.spike_window == 1, "training.spike_window",
           "has no deviation to tell a spike by; use 2 or more, better some hundreds, or 0"},
          // Units are updated before the norm of the step, and what is not finite in later gradients, are known.
          {o.release_gradients && t.non_finite == NonFinitePolicy::kSkip, "optimizer.release_gradients",
           "cannot skip a step of which a part is done: set training.non_finite = stop, or false here"},
          {o.release_gradients && t.spike_window > 0, "optimizer.release_gradients",
           "cannot skip a spike, whose norm is known when its step is done: set training.spike_window = 0, or false here"},
          {s.kind != ScheduleKind::kWsd && s.decay_steps != 0, "optimizer.schedule.decay_steps",
           "has no meaning with this optimizer.schedule.kind; set it to 0, or kind = wsd"},
          {t.eval_interval > 0 && !has_evaluations(c), "training.eval_interval",
           "has nothing to evaluate; give data.eval, evaluation.sets, evaluation.tasks or evaluation.prompts, or set it to 0"},
      });
  require_multiple("training.global_batch_size", t.global_batch_size, "training.micro_batch_size",
                   t.micro_batch_size);
  const int64_t total = s.total_steps == 0 ? t.steps : s.total_steps;
  if (total == 0) return;  // nothing will be trained
  const auto require_within = [&](std::string_view what, int64_t steps) {
    require_at_most(what, static_cast<double>(steps),
                    s.total_steps == 0 ? "training.steps" : "optimizer.schedule.total_steps",
                    static_cast<double>(total), "change one of them");
  };
  require_within("optimizer.schedule.warmup_steps", s.warmup_steps);
  require_within("optimizer.schedule.warmup_steps + decay_steps", s.warmup_steps + s.decay_steps);
}

void check_data(const DataConfig& d, int64_t vocab_size) {
  if (!d.weights.empty() && d.weights.size() != d.train.size()) {
    throw_bad_input("data.weights has {} numbers, but data.train has {} entries; give one for each, or none",
                    d.weights.size(), d.train.size());
  }
  if (std::ranges::count(d.weights, 0.0) > 0) {
    throw_bad_input("data.weights holds 0; remove the sources that you do not want");
  }
  for (const auto& [key, id] : {std::pair{"document_start", d.document_start}, {"document_end", d.document_end}}) {
    if (id >= 0 && d.documents != DocumentMode::kSeparate) {
      throw_bad_input("data.{} = {} has no meaning with data.documents = joined; use separate, or -1", key, id);
    }
    if (id >= vocab_size) {
      throw_bad_input("data.{} = {} is not a token of model.vocab_size = {}", key, id, vocab_size);
    }
  }
}

void check_paths(const Config& c) {
  const auto check_all = [](std::string_view key, const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      if (is_store_address(path)) throw_bad_input("{}: \"{}\" {}", key, path, kStoreAdvice);
    }
  };
  check_all("checkpoint.folder", {c.checkpoint.folder});
  check_all("checkpoint.init_from", {c.checkpoint.init_from});
  check_all("data.tokenizer", {c.data.tokenizer});
  check_all("data.train", c.data.train);
  check_all("data.eval", c.data.eval);
  check_all("evaluation.sets", c.evaluation.sets);
  check_all("evaluation.tasks", c.evaluation.tasks);
}

// As a shell reads it: a backslash takes the next letter's meaning within double quotes, not within single ones.
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
  check_model(config);
  check_moe(config);
  check_vision(config);
  check_precision(config);
  check_finetune(config);
  check_size(config);
  check_fp8(config);
  check_data(config.data, config.model.vocab_size);
  check_training(config);
}

void warn_of_odd_values(const Config& c) {
  const OptimizerConfig& o = c.optimizer;
  const ModelConfig& m = c.model;
  const FinetuneConfig& f = c.finetune;
  const int64_t steps = c.training.steps, total = o.schedule.total_steps;
  const bool has_end = total != 0 && steps != 0 && o.schedule.kind != ScheduleKind::kConstant;
  const bool is_added = f.method != FinetuneMethod::kFull, is_random = c.checkpoint.init_from.empty();
  const bool is_lora = f.method == FinetuneMethod::kLora, is_normal = m.init == InitKind::kNormal;
  const bool has_lr = std::ranges::any_of(make_parameter_table(m, o.decay_embeddings, c.parameter_rules()).all,
                                          [](const auto& p) { return p.trainable && p.lr_factor > 0; });
  constexpr const char* kAtRandom =
      "leaves weights as they begin, at random without checkpoint.init_from; give it a checkpoint";
  const Conflict odd[] = {
      {is_random && is_added, "finetune.method", kAtRandom},
      {is_random && !o.frozen.empty(), "optimizer.frozen", kAtRandom},
      {o.lr == 0 || o.lr >= 1, "optimizer.lr", "trains nothing, or nothing well; a usual rate is 3e-4"},
      {!has_lr, "optimizer.lr_factors", "trains nothing: all that is trained has the factor 0"},
      {o.weight_decay >= 1, "optimizer.weight_decay", "is no percentage; a usual value is 0.1"},
      {o.beta1 > o.beta2, "optimizer.beta1", "is more than optimizer.beta2; check that they are not exchanged"},
      {o.beta1 < 0.5, "optimizer.beta1", "hardly averages gradients; a usual value is 0.9"},
      {o.eps >= 0.1, "optimizer.eps", "is more than most gradients, so updates are small; a usual value is 1e-8"},
      {o.clip_norm > 0 && o.clip_norm <= 1e-4, "optimizer.clip_norm", "shrinks all gradients; a usual value is 1"},
      {m.sliding_window > 0 && m.sliding_window < 16, "model.sliding_window", "is few tokens for attention to see"},
      {is_random && is_normal && m.init_std >= 0.5, "model.init_std", "is too much; a usual value is 0.02"},
      {is_random && !is_normal && m.init_std != ModelConfig().init_std, "model.init_std",
       "has no meaning with model.init = mitchell; set init = normal, or remove it"},
      {m.rope_scaling.kind == RopeScalingKind::kNone && m.rope_scaling != RopeScalingConfig(),
       "model.rope_scaling.kind", "leaves its other keys without meaning; give a kind, or remove them"},
      {is_lora && f.alpha > 64 * static_cast<double>(f.rank), "finetune.alpha",
       "multiplies adapters by alpha / finetune.rank; a usual alpha is rank, or twice that"},
      {is_lora && f.rank >= m.d_model, "finetune.rank", "is not below model.d_model; a usual value is 16"},
      {has_end && total > steps, "optimizer.schedule.total_steps",
       "is more than training.steps: the run ends before its rate has come down; give one number if it does not go on"},
      {has_end && total < steps, "optimizer.schedule.total_steps",
       "is less than training.steps: the steps behind it have the last rate; give one number unless that is meant"},
      {c.training.eval_sequences != 0 && c.data.eval.empty() && c.evaluation.sets.empty(),
       "training.eval_sequences",
       "has no meaning without data.eval or evaluation.sets; list files there, or set it to 0"},
      {c.training.eval_interval == 0 && has_evaluations(c), "training.eval_interval",
       "looks at nothing in data.eval, evaluation.sets and evaluation.tasks; give the steps between evaluations"},
  };
  for (const Conflict& conflict : odd) {
    if (conflict.exists) log_warning("{}", describe(c, conflict));
  }
}

}  // namespace parka
