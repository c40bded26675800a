#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/config_fields.h"
#include "core/dtype.h"
#include "kernels/ops/attention/rope.h"
#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/norm/qk_norm.h"
#include "kernels/ops/swiglu/swiglu.h"
#include "model/moe_config.h"
#include "model/vision/vision_config.h"

namespace parka {

enum class InitKind : uint8_t { kMitchell, kNormal };

// The places of norms in a branch of a block, with input h and inner layer f.
enum class NormPlacement : uint8_t {
  kBefore,  // h += f(norm(h))
  kAfter,   // h += norm(f(h))
  kBoth,    // h += norm(f(norm(h))), with two norms
};

// How the blocks of a stack are built.
enum class BlockKind : uint8_t {
  kDecoder,  // attention to earlier rows, with rotary positions; a gated feed-forward; biases by qkv_bias alone
  kEncoder,  // attention to all rows of the sequence, without rotations; an MLP without a gate; biases everywhere
};

// The factor of embeddings where blocks begin.
enum class EmbeddingScale : uint8_t {
  kNone,
  kSqrtDModel,  // sqrt(d_model), rounded to the compute format
};

struct RopeScalingConfig : RopeScaling {
  bool operator==(const RopeScalingConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("kind", kind,
          "none; linear: all frequencies are divided by `factor`; llama3 and yarn: low ones are, high ones stay as "
          "they are, and with yarn queries and keys are multiplied by `attention_factor`",
          kHashed | kFixedOnResume | kStepTime);
    visit("factor", factor, "What frequencies are divided by", RealRange{1.0, 1e6},
          kHashed | kFixedOnResume | kStepTime);
    visit("original_length", original_length,
          "llama3 and yarn: sequence length that the model was first trained on", IntegerRange{1, kMaxDimension},
          kHashed | kFixedOnResume | kStepTime);
    visit("attention_factor", attention_factor, "yarn: see kind; 0: 0.1 x ln(factor) + 1", RealRange{0.0, 1e6},
          kHashed | kFixedOnResume | kStepTime);
  }
};

struct ModelConfig {
  int64_t vocab_size = 50304;  // rows of the embedding, padding rows included
  int64_t d_model = 2048;
  int64_t num_layers = 16;
  int64_t num_heads = 16;
  int64_t num_kv_heads = 0;    // 0: as num_heads
  int64_t given_head_dim = 0;  // 0: d_model / num_heads
  int64_t d_ffn = 8192;
  NormKind norm = NormKind::kLayerNorm;
  double norm_eps = 1e-5;
  NormPlacement norm_placement = NormPlacement::kBefore;
  QkNormKind qk_norm = QkNormKind::kNone;
  bool norm_unit_offset = false;
  bool qkv_bias = false;
  GateActivation activation = GateActivation::kSilu;
  EmbeddingScale embedding_scale = EmbeddingScale::kNone;
  int64_t query_pre_attn_scalar = 0;  // 0: head_dim
  double rope_theta = 10000.0;
  RopeScalingConfig rope_scaling = {};
  int64_t sliding_window = 0;        // 0: none
  int64_t full_attention_every = 0;  // with a window: blocks of full attention; 0: none
  double local_rope_theta = 0;       // 0: rope_theta
  bool tie_embeddings = true;
  InitKind init = InitKind::kMitchell;
  double init_std = 0.02;
  MoeConfig moe = {};
  VisionConfig vision = {};
  // No key says these: they are of the stacks of vision towers (vision/vision_config.h).
  BlockKind block_kind = BlockKind::kDecoder;
  Activation mlp_activation = Activation::kGelu;  // of kEncoder

  int64_t head_dim() const { return given_head_dim == 0 ? d_model / num_heads : given_head_dim; }
  int64_t kv_heads() const { return num_kv_heads == 0 ? num_heads : num_kv_heads; }
  // Attention divides its scores by the square root of this.
  int64_t pre_attn_scalar() const { return query_pre_attn_scalar == 0 ? head_dim() : query_pre_attn_scalar; }
  int64_t d_heads() const { return num_heads * head_dim(); }
  int64_t d_qkv() const { return (num_heads + 2 * kv_heads()) * head_dim(); }
  // True if block l attends through the window.
  bool is_windowed(int64_t l) const {
    return sliding_window > 0 && (full_attention_every == 0 || (l + 1) % full_attention_every != 0);
  }
  double windowed_rope_theta() const { return local_rope_theta == 0 ? rope_theta : local_rope_theta; }
  // True if queries and keys are rotated otherwise in such blocks.
  bool has_windowed_rotations() const {
    return sliding_window > 0 &&
           (windowed_rope_theta() != rope_theta || rope_scaling.kind != RopeScalingKind::kNone);
  }
  // The pre-norm of a branch, and whether there is a post-norm.
  NormKind pre_norm() const { return norm_placement == NormPlacement::kAfter ? NormKind::kNone : norm; }
  bool has_post_norm() const { return norm_placement != NormPlacement::kBefore; }
  // True if block l has experts.
  bool has_experts(int64_t l) const { return moe.exists() && l >= moe.dense_layers; }
  // The same model with a single feed-forward of this width in each block.
  ModelConfig with_one_ffn(int64_t width) const {
    ModelConfig dense = *this;
    dense.d_ffn = width;
    dense.moe = {};
    return dense;
  }
  bool is_encoder() const { return block_kind == BlockKind::kEncoder; }
  // Added to the weights of norms before anything is multiplied by them.
  float norm_weight_offset() const { return norm_unit_offset ? 1.0f : 0.0f; }

  bool operator==(const ModelConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    constexpr IntegerRange dimension{1, kMaxDimension};
    visit("vocab_size", vocab_size,
          "Rows of the embedding table, padding rows included; all take part in the softmax", dimension,
          kModelField);
    visit("d_model", d_model, "Width of the residual stream, even", dimension, kModelField);
    visit("num_layers", num_layers, "Transformer blocks", IntegerRange{1, 10000}, kModelField);
    visit("num_heads", num_heads, "Query heads; unless head_dim is given, d_model must be an even multiple of it",
          dimension, kModelField);
    visit("num_kv_heads", num_kv_heads,
          "Key/value heads (grouped-query attention), a divisor of num_heads; 0 means num_heads",
          IntegerRange{0, kMaxDimension}, kModelField);
    visit("head_dim", given_head_dim, "Width of a head, even; 0 means d_model / num_heads",
          IntegerRange{0, kMaxDimension}, kModelField);
    visit("d_ffn", d_ffn,
          "Inner width of the gated feed-forward (width of up, and of gate); of each expert in model.moe",
          dimension, kModelField);
    visit("norm", norm, "layernorm: non-parametric LayerNorm (OLMo v1); rmsnorm: RMSNorm with a weight (Llama)",
          kModelField);
    visit("norm_eps", norm_eps, "Added to the variance or mean square under the square root", RealRange{1e-30, 1.0},
          kHashed | kFixedOnResume | kWeights);
    visit("norm_placement", norm_placement,
          "Norms of attention and feed-forward: before: of what they read (Llama); after: of what they add to the "
          "residual stream (OLMo 2); both (Gemma 3). The final norm is there always",
          kModelField);
    visit(
        "qk_norm", qk_norm,
        "RMSNorm of queries and keys before they are rotated, with weights: none; per_head: of each head (Qwen3); "
        "full: of all query heads together, and of all key heads (OLMo 2)",
        kModelField);
    visit("norm_unit_offset", norm_unit_offset,
          "Norms, those of queries and keys too, multiply by 1 + weight, and weights start at 0 (Gemma 3)",
          kModelField);
    visit("qkv_bias", qkv_bias, "Add a bias to queries, keys and values as they are projected (Qwen2.5)",
          kModelField);
    visit("activation", activation,
          "Of the feed-forward's gate: silu (SwiGLU), or gelu_tanh: GELU in its tanh form (Gemma 3)", kModelField);
    visit(
        "embedding_scale", embedding_scale,
        "What embeddings are multiplied by where the blocks begin, but not in a tied head: none, or sqrt_d_model: "
        "the square root of d_model (Gemma 3)",
        kModelField);
    visit("query_pre_attn_scalar", query_pre_attn_scalar,
          "Attention's scores are divided by the square root of this; 0: of head_dim",
          IntegerRange{0, kMaxDimension}, kHashed | kFixedOnResume | kWeights);
    visit("rope_theta", rope_theta, "Base of the rotary position angles", RealRange{1.0}, kHashed | kFixedOnResume);
    visit("rope_scaling", rope_scaling,
          "Scaling of the rotary frequencies for long contexts; not in blocks with a sliding window");
    visit("sliding_window", sliding_window,
          "Attention sees only this many latest tokens, the token itself included; 0: all",
          IntegerRange{0, kMaxDimension}, kModelField);
    visit("full_attention_every", full_attention_every,
          "With sliding_window: every n-th block attends to all tokens (OLMo 3: 4; Gemma 3: 6); 0: none does "
          "(Mistral 7B v0.1)",
          IntegerRange{0, 10000}, kModelField);
    visit("local_rope_theta", local_rope_theta,
          "Base of the rotary position angles in blocks with a sliding window; 0: rope_theta", RealRange{0.0},
          kHashed | kFixedOnResume);
    visit("tie_embeddings", tie_embeddings, "Use the embedding table as the output head", kModelField);
    visit("init", init, "mitchell: OLMo's depth-scaled truncated normal; normal: N(0, init_std)", kHashed);
    visit("init_std", init_std, "Standard deviation for init = normal", RealRange{1e-30}, kHashed);
    visit("moe", moe, "A mixture of experts in place of the feed-forward, see docs/moe.md");
    visit("vision", vision, "What the model sees images with, see docs/vision.md");
  }
};

enum class Recipe : uint8_t {
  kFp32,
  kBf16,
  kFp8Linear,
  kFp8Block,
  kCoatActivation,
  kCoatOptimizer,
  kCoat,
  kParka,
};
enum class GemmPrecision : uint8_t { kCompute, kFp8Tensor, kFp8Block };
enum class Storage : uint8_t { kCompute, kFp8 };
enum class Recompute : uint8_t { kNone, kBlock };
enum class WeightCopies : uint8_t { kAuto, kBoth, kRows, kNone };
enum class EvalNumerics : uint8_t { kSame, kBf16 };

// Number formats of forward and backward. `recipe` sets the defaults of everything here (model/precision_recipe.h)
// and of the optimizer's state formats; keys given beside it override it. docs/precision.md explains each.
struct PrecisionConfig {
  Recipe recipe = Recipe::kBf16;
  DType compute = DType::kBF16;
  GemmPrecision gemm = GemmPrecision::kCompute;
  DType forward_format = DType::kE4M3;
  DType backward_format = DType::kE5M2;
  Storage norm_input = Storage::kCompute;
  Storage up_gate = Storage::kCompute;
  Storage qkv = Storage::kCompute;
  Storage head = Storage::kCompute;
  Storage tower = Storage::kCompute;
  std::vector<std::string> unquantized;
  bool sampled_amax = false;
  int64_t group_size = 16;
  bool save_norm_output = true;
  bool save_silu = false;
  bool save_product = true;
  WeightCopies weight_copies = WeightCopies::kAuto;
  Recompute recompute = Recompute::kNone;
  int64_t offload_blocks = 0;
  bool offload_weights = false;
  EvalNumerics eval = EvalNumerics::kSame;

  bool operator==(const PrecisionConfig&) const = default;

  // True if anything in forward is FP8.
  bool has_fp8() const {
    return gemm != GemmPrecision::kCompute || norm_input == Storage::kFp8 || up_gate == Storage::kFp8 ||
           qkv == Storage::kFp8;
  }

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("recipe", recipe,
          "Sets the defaults of the keys below and of the optimizer's states and master; explicit keys override it",
          kNoEffect);
    visit("compute", compute, "Residual stream, attention and everything else that is not FP8",
          one_of(DType::kF32, DType::kBF16), kHashed | kFixedOnResume | kStepTime);
    visit("gemm", gemm,
          "Inputs of the linear layers in the blocks: compute (as `compute`), fp8_tensor (one scale per tensor) or "
          "fp8_block (1x128 activations, 128x128 weights)",
          kHashed | kStepTime);
    visit("forward_format", forward_format,
          "Codes that linear layers with FP8 GEMMs multiply in forward: e4m3, or int8, for published models",
          one_of(DType::kE4M3, DType::kI8), kHashed | kStepTime);
    visit("backward_format", backward_format, "FP8 format of output gradients", one_of(DType::kE4M3, DType::kE5M2),
          kHashed | kStepTime);
    visit("norm_input", norm_input,
          "How the norms' inputs are kept for backward: compute, or fp8 (one scale per 1 x group_size)",
          kHashed | kStepTime);
    visit("up_gate", up_gate, "How the outputs of the up and gate projections are kept: compute or fp8",
          kHashed | kStepTime);
    visit(
        "qkv", qkv,
        "How rotated q, k and v are kept: compute or fp8. With model.qk_norm they are kept unnormalised and unrotated",
        kHashed | kStepTime);
    visit(
        "head", head,
        "Inputs of the products that make the logits, and of their gradients: compute, or fp8 with the scaling of "
        "gemm, which is then not compute",
        kHashed | kStepTime);
    visit(
        "tower", tower,
        "Blocks of a vision tower (model.vision): compute, or fp8: in the formats of the decoder's blocks, which have "
        "FP8 GEMMs then",
        kHashed | kStepTime);
    visit(
        "unquantized", unquantized,
        "Weights whose products stay in `compute`, forward and backward, where the recipe has FP8 ones: names as in "
        "optimizer.frozen, such as \"*.down\", \"blocks.0.*\" or \"head\"",
        kHashed | kStepTime);
    visit("sampled_amax", sampled_amax,
          "Scale SwiGLU's gradient, in e5m2, by 64 times every 16th token's maximum, where that is enough",
          kHashed | kStepTime);
    visit("group_size", group_size, "Elements per scale of kept FP8 activations", one_of<int64_t>(16, 32, 64, 128),
          kHashed | kStepTime);
    visit(
        "save_norm_output", save_norm_output,
        "Keep the norm's output for the weight gradient; false recomputes it in backward (same bits), where there is "
        "a norm: with model.norm_placement = after GEMMs read the residual stream, which is kept as they read it",
        kStepTime);
    visit(
        "save_silu", save_silu,
        "Keep silu(gate), or what model.activation makes of it, as FP8 and use it in the product, as COAT does; needs "
        "up_gate = fp8",
        kHashed | kStepTime);
    visit("save_product", save_product,
          "Keep the gated product for the weight gradient; false recomputes it in backward (same bits)", kStepTime);
    visit(
        "weight_copies", weight_copies,
        "FP8 copies of the weights kept for a whole step: both (row-major, and transposed for input gradients), "
        "rows (transposed on use), or none (quantized on use); same bits, each a byte per parameter less. An FP8 "
        "head has both or none. With ZeRO stage 3 a rank keeps copies of its own shards, which are gathered on use; "
        "transposed ones only if all shards are whole rows and recompute is none. auto: rows where ZeRO stage 3 "
        "shards the weights over several GPUs, or where finetune.base = fp8 goes with gemm = fp8_tensor, else both",
        kRunTime);
    visit("recompute", recompute,
          "none, or block: keep only each block's input and run the block's forward again in backward (same bits)",
          kStepTime);
    visit("offload_blocks", offload_blocks,
          "Blocks whose saved activations are offloaded to host memory until backward (same bits): up to "
          "model.num_layers - 2, evenly spread; the copies overlap with other work",
          IntegerRange{0, kMaxDimension}, kStepTime);
    visit(
        "offload_weights", offload_weights,
        "Training keeps the weights of the blocks' linear layers in host memory, where optimizer.offload has their "
        "masters (same bits). GEMMs read FP8 copies that are kept; without any, a block's weights are copied from "
        "the host one block ahead of their use",
        kRunTime);
    visit("eval", eval, "same: evaluate with the training numerics; bf16: evaluate with BF16 linear layers",
          kNoEffect);
  }
};

// A config has a norm: kNone has no name.
template <>
struct EnumNames<NormKind> {
  static constexpr EnumName<NormKind> kAll[] = {{NormKind::kLayerNorm, "layernorm"},
                                                {NormKind::kRmsNorm, "rmsnorm"}};
};
template <>
struct EnumNames<NormPlacement> {
  static constexpr EnumName<NormPlacement> kAll[] = {
      {NormPlacement::kBefore, "before"}, {NormPlacement::kAfter, "after"}, {NormPlacement::kBoth, "both"}};
};
template <>
struct EnumNames<QkNormKind> {
  static constexpr EnumName<QkNormKind> kAll[] = {
      {QkNormKind::kNone, "none"}, {QkNormKind::kPerHead, "per_head"}, {QkNormKind::kFull, "full"}};
};
template <>
struct EnumNames<GateActivation> {
  static constexpr EnumName<GateActivation> kAll[] = {{GateActivation::kSilu, "silu"},
                                                      {GateActivation::kGeluTanh, "gelu_tanh"}};
};
template <>
struct EnumNames<EmbeddingScale> {
  static constexpr EnumName<EmbeddingScale> kAll[] = {{EmbeddingScale::kNone, "none"},
                                                      {EmbeddingScale::kSqrtDModel, "sqrt_d_model"}};
};
template <>
struct EnumNames<RopeScalingKind> {
  static constexpr EnumName<RopeScalingKind> kAll[] = {{RopeScalingKind::kNone, "none"},
                                                       {RopeScalingKind::kLlama3, "llama3"},
                                                       {RopeScalingKind::kLinear, "linear"},
                                                       {RopeScalingKind::kYarn, "yarn"}};
};
template <>
struct EnumNames<InitKind> {
  static constexpr EnumName<InitKind> kAll[] = {{InitKind::kMitchell, "mitchell"}, {InitKind::kNormal, "normal"}};
};
template <>
struct EnumNames<Recipe> {
  static constexpr EnumName<Recipe> kAll[] = {
      {Recipe::kFp32, "fp32"},
      {Recipe::kBf16, "bf16"},
      {Recipe::kFp8Linear, "fp8_linear"},
      {Recipe::kFp8Block, "fp8_block"},
      {Recipe::kCoatActivation, "coat_activation"},
      {Recipe::kCoatOptimizer, "coat_optimizer"},
      {Recipe::kCoat, "coat"},
      {Recipe::kParka, "parka"},
  };
};
template <>
struct EnumNames<GemmPrecision> {
  static constexpr EnumName<GemmPrecision> kAll[] = {{GemmPrecision::kCompute, "compute"},
                                                     {GemmPrecision::kFp8Tensor, "fp8_tensor"},
                                                     {GemmPrecision::kFp8Block, "fp8_block"}};
};
template <>
struct EnumNames<Storage> {
  static constexpr EnumName<Storage> kAll[] = {{Storage::kCompute, "compute"}, {Storage::kFp8, "fp8"}};
};
template <>
struct EnumNames<WeightCopies> {
  static constexpr EnumName<WeightCopies> kAll[] = {{WeightCopies::kAuto, "auto"},
                                                    {WeightCopies::kBoth, "both"},
                                                    {WeightCopies::kRows, "rows"},
                                                    {WeightCopies::kNone, "none"}};
};

template <>
struct EnumNames<Recompute> {
  static constexpr EnumName<Recompute> kAll[] = {{Recompute::kNone, "none"}, {Recompute::kBlock, "block"}};
};
template <>
struct EnumNames<EvalNumerics> {
  static constexpr EnumName<EvalNumerics> kAll[] = {{EvalNumerics::kSame, "same"}, {EvalNumerics::kBf16, "bf16"}};
};

}  // namespace parka
