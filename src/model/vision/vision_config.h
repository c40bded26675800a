#pragma once
#include <cstdint>
#include <vector>

#include "core/config_fields.h"
#include "core/error.h"
#include "core/tensor.h"
#include "kernels/ops/elementwise/pointwise.h"

namespace parka {

enum class TowerKind : uint8_t {
  kNone,    // there is no tower
  kClip,    // a class token at index 0, a LayerNorm before the blocks, no bias of the patch embedding
  kSiglip,  // none of these, but that bias
};

// A vision transformer, and which of its hidden states is what a language model sees. Hidden state 0 is the input
// of the first block, l the output of block l - 1; nothing after the one that is selected is ever computed.
struct TowerConfig {
  TowerKind kind = TowerKind::kClip;
  int64_t width = 1024;
  int64_t num_layers = 24;
  int64_t num_heads = 16;
  int64_t d_ffn = 4096;
  int64_t image_size = 336;  // pixels in each direction
  int64_t patch_size = 14;
  Activation activation = Activation::kQuickGelu;
  double norm_eps = 1e-5;
  // Pixels are bytes; by channel the tower gets (byte / 255 - mean) / deviation, rounded to fp32. Three each.
  std::vector<double> pixel_mean = {0.48145466, 0.4578275, 0.40821073};
  std::vector<double> pixel_deviation = {0.26862954, 0.26130258, 0.27577711};
  int64_t feature_layer = -2;      // which hidden state; negative: from the last one, -1
  bool keeps_class_token = false;  // in what is handed on; kClip only

  bool has_class_token() const { return kind == TowerKind::kClip; }
  bool has_pre_norm() const { return kind == TowerKind::kClip; }
  bool has_patch_bias() const { return kind == TowerKind::kSiglip; }
  // Pixels after the last whole patch are left out.
  int64_t grid() const { return image_size / patch_size; }
  int64_t num_patches() const { return grid() * grid(); }
  // Rows of an image in the blocks, and in what is handed on.
  int64_t num_tokens() const { return num_patches() + (has_class_token() ? 1 : 0); }
  bool drops_class_token() const { return has_class_token() && !keeps_class_token; }
  int64_t num_features() const { return num_tokens() - (drops_class_token() ? 1 : 0); }
  // Columns of a row of patches: 3 channels of pixels, and zeros up to a multiple of 16. So the weight that they
  // meet has columns without effect, which importers fill with zeros.
  int64_t patch_columns() const { return ceil_div(3 * patch_size * patch_size, 16) * 16; }
  // Blocks that run. Throws Error(kBadInput) where there is none.
  int64_t num_blocks() const {
    const int64_t blocks = feature_layer < 0 ? num_layers + 1 + feature_layer : feature_layer;
    if (blocks < 1 || blocks > num_layers) {
      throw_bad_input("a vision tower of {} layers has no hidden state {} after a block; name one of 1 to {}",
                      num_layers, feature_layer, num_layers);
    }
    return blocks;
  }

  bool operator==(const TowerConfig&) const = default;
};

enum class ProjectorKind : uint8_t {
  kLinear,         // linear
  kMlp2xGelu,      // linear, GELU (exact), linear
  kMlpDownsample,  // 2 x 2 tokens side by side, LayerNorm, linear, GELU (exact), linear
};

// From a tower's features to rows of a language model's residual stream.
struct ProjectorConfig {
  ProjectorKind kind = ProjectorKind::kMlp2xGelu;
  int64_t d_model = 4096;
  // kMlpDownsample: the order of its tokens. VILA 1.5's are column by column, NVILA's row by row.
  bool column_major = false;

  bool downsamples() const { return kind == ProjectorKind::kMlpDownsample; }
  bool has_two_layers() const { return kind != ProjectorKind::kLinear; }
  bool operator==(const ProjectorConfig&) const = default;
};

// The tower and projector of a language model: section model.vision of a config.
struct VisionConfig {
  TowerConfig tower{.kind = TowerKind::kNone};
  ProjectorConfig projector;  // d_model is that of the language model: projector_into()
  int64_t image_token = -1;

  bool exists() const { return tower.kind != TowerKind::kNone; }
  ProjectorConfig projector_into(int64_t d_model) const {
    ProjectorConfig config = projector;
    config.d_model = d_model;
    return config;
  }
  bool operator==(const VisionConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    constexpr IntegerRange dimension{1, kMaxDimension};
    visit("tower", tower.kind,
          "none: a model of text alone; clip: a class token, a LayerNorm before the blocks; siglip: neither, but "
          "a bias of the patch embedding. The other keys' defaults are those of CLIP ViT-L/14-336",
          kModelField);
    visit("width", tower.width, "Width of the tower's residual stream", dimension, kModelField);
    visit("num_layers", tower.num_layers, "Blocks of the whole tower; those after feature_layer are left out",
          IntegerRange{1, 10000}, kModelField);
    visit("num_heads", tower.num_heads, "Attention heads of the tower, a divisor of width", dimension, kModelField);
    visit("d_ffn", tower.d_ffn, "Inner width of the tower's MLPs", dimension, kModelField);
    visit("image_size", tower.image_size, "Pixels of each side of an image", IntegerRange{1, 65536}, kModelField);
    visit("patch_size", tower.patch_size, "Pixels of each side of a patch", IntegerRange{1, 65536}, kModelField);
    visit("activation", tower.activation,
          "Of the tower's MLPs: quick_gelu (CLIP), gelu_tanh (SigLIP), or gelu, the exact form", kModelField);
    visit("norm_eps", tower.norm_eps, "Added to the variance in the tower's norms; SigLIP: 1e-6",
          RealRange{1e-30, 1.0}, kHashed | kFixedOnResume | kWeights);
    visit("pixel_mean", tower.pixel_mean,
          "By channel: pixels are (byte / 255 - pixel_mean) / pixel_deviation; SigLIP: 0.5 each", RealRange{},
          kHashed | kFixedOnResume | kWeights);
    visit("pixel_deviation", tower.pixel_deviation, "See pixel_mean; SigLIP: 0.5 each", RealRange{1e-6},
          kHashed | kFixedOnResume | kWeights);
    visit("feature_layer", tower.feature_layer,
          "The hidden state that the projector reads: l is the output of the l-th block; negative: from the last "
          "one, -1",
          IntegerRange{-10000, 10000}, kModelField);
    visit("keep_class_token", tower.keeps_class_token, "clip: the projector reads the class token, too",
          kModelField);
    visit("projector", projector.kind,
          "From features to rows of the residual stream: linear; mlp2x_gelu: linear, GELU, linear (LLaVA 1.5); "
          "mlp_downsample: 2 x 2 features side by side, LayerNorm, linear, GELU, linear (VILA)",
          kModelField);
    visit("column_major", projector.column_major,
          "mlp_downsample: an image's rows come column by column, as in VILA 1.5; false: row by row, as in NVILA",
          kHashed | kFixedOnResume | kWeights);
    visit("image_token", image_token,
          "The token id that marks the rows of images in token files; it is never looked up. Needed with a tower",
          IntegerRange{-1, kMaxDimension}, kHashed | kFixedOnResume | kWeights);
  }
};

template <>
struct EnumNames<TowerKind> {
  static constexpr EnumName<TowerKind> kAll[] = {
      {TowerKind::kNone, "none"}, {TowerKind::kClip, "clip"}, {TowerKind::kSiglip, "siglip"}};
};
template <>
struct EnumNames<ProjectorKind> {
  static constexpr EnumName<ProjectorKind> kAll[] = {{ProjectorKind::kLinear, "linear"},
                                                     {ProjectorKind::kMlp2xGelu, "mlp2x_gelu"},
                                                     {ProjectorKind::kMlpDownsample, "mlp_downsample"}};
};
template <>
struct EnumNames<Activation> {
  static constexpr EnumName<Activation> kAll[] = {
      {Activation::kGelu, "gelu"}, {Activation::kGeluTanh, "gelu_tanh"}, {Activation::kQuickGelu, "quick_gelu"}};
};

}  // namespace parka
