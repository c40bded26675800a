#pragma once
#include <array>
#include <cstdint>

#include "core/error.h"
#include "core/tensor.h"
#include "model/model_config.h"

namespace parka {

enum class TowerKind : uint8_t {
  kClip,    // a class token at index 0, a LayerNorm in front of the blocks, no bias of the patch embedding
  kSiglip,  // none of these, but that bias
};

// A vision transformer, and which of its hidden states is what a language model sees. Hidden state 0 is the input
// of the first block, l the output of block l - 1; nothing behind the one that is selected is ever computed.
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
  // Of pixels that are bytes, by channel: (byte / 255 - mean) / deviation.
  std::array<float, 3> pixel_mean = {0.48145466f, 0.4578275f, 0.40821073f};
  std::array<float, 3> pixel_deviation = {0.26862954f, 0.26130258f, 0.27577711f};
  int64_t feature_layer = -2;      // which hidden state; negative: from the last one, -1
  bool keeps_class_token = false;  // in what is handed on; kClip only

  bool has_class_token() const { return kind == TowerKind::kClip; }
  bool has_norm_in_front() const { return kind == TowerKind::kClip; }
  bool has_patch_bias() const { return kind == TowerKind::kSiglip; }
  // Pixels behind the last whole patch are left out.
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
      throw_bad_input("a vision tower of {} layers has no hidden state {} behind a block; name one of 1 to {}",
                      num_layers, feature_layer, num_layers);
    }
    return blocks;
  }

  // What its stack is told.
  ModelConfig stack() const {
    ModelConfig model;
    model.d_model = width;
    model.num_layers = num_blocks();
    model.num_heads = num_heads;
    model.d_ffn = d_ffn;
    model.norm = NormKind::kAffineLayerNorm;
    model.norm_eps = norm_eps;
    model.block_kind = BlockKind::kEncoder;
    model.mlp_activation = activation;
    return model;
  }
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
};

}  // namespace parka
