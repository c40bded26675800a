#include "model/activations.h"

#include <algorithm>

#include "kernels/op/workspace.h"
#include "kernels/ops/embedding.h"

namespace parka {
namespace {

constexpr PhaseMask kForward = kForwardAttention | kForwardFfn;

// Declares the buffers of one config. `kept` tensors are declared once per block (or once for all, when the block
// is run again in backward or never goes backward), `shared` ones once.
class Declarer {
 public:
  Declarer(const ModelConfig& model, const PrecisionConfig& precision, const BatchShape& shape,
           Activations::Purpose purpose, MemoryPlan& plan)
      : model_(model),
        precision_(precision),
        formats_(precision),
        shape_(shape),
        tokens_(shape.num_tokens()),
        evaluation_(purpose == Activations::Purpose::kEvaluation),
        rerun_(precision.recompute == Recompute::kBlock ? PhaseMask{kRerun} : PhaseMask{0}),
        plan_(plan) {}

  // The phase in which backward runs a block's forward again, if it does.
  PhaseMask rerun() const { return rerun_; }

  // The workspace part of a block: the same ids go into every block.
  BlockBuffers shared_block() {
    BlockBuffers block;
    const int64_t d = model_.d_model, heads = model_.d_heads(), f = model_.d_ffn;
    if (formats_.norm_input.scaling != Scaling::kNone) {
      block.attention_norm.residual = shared("residual", kForward | kHead | rerun_, {tokens_, d});
      block.ffn_norm.residual = block.attention_norm.residual;
    }
    if (formats_.qkv.scaling != Scaling::kNone) {
      block.qkv = shared("qkv", kForwardAttention | rerun_ | kBackwardAttentionOut | kBackwardAttention,
                         {tokens_, model_.d_qkv()});
    }
    if (precision_.attention_output == Storage::kFp8) {
      block.attention = shared("attention", kForwardAttention | rerun_ | kBackwardAttentionOut | kBackwardAttention,
                               {tokens_, heads});
    }
    if (formats_.up_gate.scaling != Scaling::kNone) {
      block.up_gate_plain = shared("up_gate", kForwardFfn | rerun_, {tokens_, 2 * f});
    }
    return block;
  }

  // Adds to `block` what it keeps for backward. FP8 GEMM inputs are kept transposed, as the weight gradient wants
  // them; their row-major form is workspace, whose ids are remembered in `workspace` for the next block. Returns
  // what is kept.
  std::vector<TensorId> keep(BlockBuffers& block, const std::string& prefix, BlockBuffers& workspace) {
    const int64_t heads = model_.d_heads(), f = model_.d_ffn;
    const size_t first = plan_.entries().size();
    keep_norm(block.attention_norm, workspace.attention_norm, prefix, "attention_norm", kForwardAttention | rerun_,
              kBackwardQkv);
    if (!block.qkv.valid()) block.qkv = kept(prefix + "qkv", {tokens_, model_.d_qkv()});
    if (formats_.qkv.scaling != Scaling::kNone) {
      block.qkv_saved = kept(prefix + "qkv_fp8", formats_.qkv, tokens_, model_.d_qkv());
    }
    block.lse = plan_.add(kept_category(), prefix + "lse", DType::kF32,
                          {shape_.num_sequences, model_.num_heads, shape_.sequence_length}, kept_phases());
    if (!block.attention.valid()) block.attention = kept(prefix + "attention", {tokens_, heads});
    if (formats_.fp8_gemm) keep_attention_fp8(block, prefix, workspace, heads);
    keep_norm(block.ffn_norm, workspace.ffn_norm, prefix, "ffn_norm", kForwardFfn | rerun_, kBackwardUpGate);
    block.up_gate = kept(prefix + "up_gate", formats_.up_gate, tokens_, 2 * f);
    if (precision_.save_silu) block.silu = kept(prefix + "silu", formats_.silu, tokens_, f);
    keep_gemm_input(block.product, block.product_t, workspace.product, workspace.product_t, prefix, "product", f,
                    precision_.save_product, kForwardFfn | rerun_, kBackwardSwiglu);
    std::vector<TensorId> ids;
    for (size_t i = first; i < plan_.entries().size(); ++i) {
      if (plan_.entries()[i].category == kept_category()) ids.push_back({static_cast<int>(i)});
    }
    return ids;
  }

  BackwardBuffers backward() {
    BackwardBuffers b;
    const int64_t d = model_.d_model, heads = model_.d_heads(), f = model_.d_ffn;
    const int64_t d_qkv = model_.d_qkv();
    const Format& gradient = formats_.gradient;
    b.d_residual = shared("d_residual", kHead | kBackward, {tokens_, d});
    b.d_norm_output = shared("d_norm_output", kHead | kBackwardUpGate | kBackwardQkv | kBackwardNorm, {tokens_, d});
    b.d_product = shared("d_product", kBackwardDown | kBackwardSwiglu, {tokens_, f});
    b.d_up_gate = workspace("d_up_gate", gradient, tokens_, 2 * f, kBackwardSwiglu | kBackwardUpGate);
    b.d_attention = shared("d_attention", kBackwardAttentionOut | kBackwardAttention, {tokens_, heads});
    // Read by GEMMs, or by what makes their FP8 inputs of it.
    b.d_qkv = shared("d_qkv", kBackwardAttention | (formats_.fp8_gemm ? kBackwardQkvCodes : kBackwardQkv),
                     {tokens_, d_qkv});
    b.attention_scratch = attention_scratch();
    if (!formats_.fp8_gemm) return b;
    // One norm's backward makes it, the next linear layer reads it: in rows for its input gradient, and transposed
    // for its weight gradient, which for the down projection comes after SwiGLU.
    const PhaseMask rows = kHead | kBackwardNorm | rerun_ | kBackwardDown | kBackwardAttentionOut;
    const PhaseMask transposed = rows | kBackwardSwiglu;
    TensorId scale;
    if (gradient.scaling == Scaling::kTensor) {
      scale = plan_.add(workspace_category(), "d_branch.scale", DType::kF32, {1}, transposed);
      b.d_qkv_amax =
          plan_.add(workspace_category(), "d_qkv_amax", DType::kF32, {1}, kBackwardAttention | kBackwardQkvCodes);
    }
    b.d_branch = workspace("d_branch", gradient, tokens_, d, rows, scale);
    b.d_branch_t = workspace("d_branch_t", gradient, d, tokens_, transposed, scale);
    b.d_up_gate_t =
        workspace("d_up_gate_t", gradient, 2 * f, tokens_, kBackwardSwiglu | kBackwardUpGate, b.d_up_gate.scale);
    b.d_qkv_fp8 = workspace("d_qkv_fp8", gradient, tokens_, d_qkv, kBackwardQkvCodes | kBackwardQkv);
    b.d_qkv_fp8_t =
        workspace("d_qkv_fp8_t", gradient, d_qkv, tokens_, kBackwardQkvCodes | kBackwardQkv, b.d_qkv_fp8.scale);
    return b;
  }

  // A plain tensor of the workspace, and one that is kept for backward.
  TensorId shared(const std::string& name, PhaseMask phases, std::vector<int64_t> dims) {
    return plan_.add(workspace_category(), name, formats_.compute.dtype, std::move(dims), workspace_phases(phases));
  }
  TensorId kept(const std::string& name, std::vector<int64_t> dims) {
    return plan_.add(kept_category(), name, formats_.compute.dtype, std::move(dims), kept_phases());
  }
  // fp32 [T] of the workspace.
  TensorId shared_statistic(const std::string& name, PhaseMask phases) {
    return plan_.add(workspace_category(), name, DType::kF32, {tokens_}, workspace_phases(phases));
  }

 private:
  // On every device, so that a plan holds for all: where it is large, attention is not what needs most memory.
  TensorId attention_scratch() {
    if (formats_.compute.dtype != DType::kBF16 || shape_.separate_documents) return {};
    const int64_t bytes = cuda::attention_backward_scratch_bytes(
        shape_.num_sequences, shape_.sequence_length, model_.num_heads, model_.kv_heads(), model_.head_dim());
    if (bytes == 0) return {};
    return plan_.add(workspace_category(), "attention_scratch", DType::kU8, {bytes},
                     workspace_phases(kBackwardAttention));
  }

  // Evaluation with another precision works in the memory of training's activations, between steps.
  std::string kept_category() const { return evaluation_ ? "evaluation" : kSavedActivationsCategory; }
  std::string workspace_category() const { return evaluation_ ? "evaluation" : "workspace"; }
  PhaseMask kept_phases() const { return evaluation_ ? kEvaluation : kStep; }
  PhaseMask workspace_phases(PhaseMask training) const { return evaluation_ ? PhaseMask{kEvaluation} : training; }

  MatrixId kept(const std::string& name, const Format& format, int64_t rows, int64_t cols, TensorId scale = {}) {
    return add_matrix(plan_, kept_category(), name, format, rows, cols, kept_phases(), scale);
  }
  MatrixId workspace(const std::string& name, const Format& format, int64_t rows, int64_t cols, PhaseMask phases,
                     TensorId scale = {}) {
    return add_matrix(plan_, workspace_category(), name, format, rows, cols, workspace_phases(phases), scale);
  }

  // A GEMM input whose codes are workspace, declared once in `slot`, while its kTensor scale is kept per block:
  // with the scale at hand backward makes the same codes again in one pass.
  MatrixId with_kept_scale(MatrixId& slot, const std::string& name, int64_t rows, int64_t cols, PhaseMask phases,
                           TensorId scale) {
    if (!slot.valid()) slot = workspace(name, formats_.activation, rows, cols, phases, scale);
    MatrixId matrix = slot;
    if (scale.valid()) matrix.scale = scale;
    return matrix;
  }
  TensorId kept_scale(const std::string& name) {
    if (formats_.activation.scaling != Scaling::kTensor) return {};
    return plan_.add(kept_category(), name + ".scale", DType::kF32, {1}, kept_phases());
  }

  void keep_norm(NormBuffers& norm, NormBuffers& workspace, const std::string& prefix, const std::string& name,
                 PhaseMask forward, PhaseMask backward) {
    const int64_t d = model_.d_model;
    if (!norm.residual.valid()) norm.residual = kept(prefix + name + ".input", {tokens_, d});
    if (formats_.norm_input.scaling != Scaling::kNone) {
      norm.x = kept(prefix + name + ".input_fp8", formats_.norm_input, tokens_, d);
    }
    const auto statistic = [&](const char* which) {
      return plan_.add(kept_category(), prefix + name + which, DType::kF32, {tokens_}, kept_phases());
    };
    if (model_.norm == NormKind::kLayerNorm) norm.mean = statistic(".mean");
    norm.rstd = statistic(".rstd");
    keep_gemm_input(norm.y, norm.y_t, workspace.y, workspace.y_t, prefix, name + ".output", d,
                    precision_.save_norm_output, forward, backward);
  }

  // The input [T, width] of a GEMM, which its weight gradient reads again: kept, or workspace that backward
  // refills.
  void keep_gemm_input(MatrixId& y, MatrixId& y_t, MatrixId& y_slot, MatrixId& y_t_slot, const std::string& prefix,
                       const std::string& name, int64_t width, bool save, PhaseMask forward, PhaseMask backward) {
    if (!formats_.fp8_gemm) {
      y = save ? kept(prefix + name, formats_.activation, tokens_, width)
               : with_kept_scale(y_slot, name, tokens_, width, forward | backward, {});
      return;
    }
    const TensorId scale = kept_scale(prefix + name);
    y = with_kept_scale(y_slot, name, tokens_, width, forward, scale);
    if (evaluation_) return;
    y_t = save ? kept(prefix + name + "_t", formats_.activation, width, tokens_, scale)
               : with_kept_scale(y_t_slot, name + "_t", width, tokens_, backward, scale);
  }

  void keep_attention_fp8(BlockBuffers& block, const std::string& prefix, BlockBuffers& workspace, int64_t heads) {
    const TensorId scale = kept_scale(prefix + "attention_fp8");
    block.attention_fp8 = precision_.attention_output == Storage::kFp8
                              ? kept(prefix + "attention_fp8", formats_.activation, tokens_, heads, scale)
                              : with_kept_scale(workspace.attention_fp8, "attention_fp8", tokens_, heads,
                                                kForwardAttention | rerun_, scale);
    if (evaluation_) return;
    block.attention_fp8_t =
        with_kept_scale(workspace.attention_fp8_t, "attention_fp8_t", heads, tokens_, kBackwardAttentionOut, scale);
  }

  const ModelConfig& model_;
  const PrecisionConfig& precision_;
  Formats formats_;
  BatchShape shape_;
  int64_t tokens_;
  bool evaluation_;
  PhaseMask rerun_;
  MemoryPlan& plan_;
};

}  // namespace

Activations::Activations(const ModelConfig& model, const PrecisionConfig& precision, const BatchShape& shape,
                         int64_t logits_chunk_tokens, Purpose purpose, MemoryPlan& plan)
    : offload(model.num_layers, purpose == Purpose::kTraining ? precision.offload_blocks : 0) {
  const bool evaluation = purpose == Purpose::kEvaluation;
  const int64_t num_tokens = shape.num_tokens(), d = model.d_model;
  Declarer declare(model, precision, shape, purpose, plan);

  BlockBuffers workspace = declare.shared_block();
  for (int64_t l = 0; l < model.num_layers; ++l) {
    const std::string prefix = "blocks." + std::to_string(l) + ".";
    if (evaluation && l > 0) {
      blocks.push_back(blocks.front());
    } else if (const int64_t before = offload.block_before(l); before >= 0) {
      blocks.push_back(blocks[static_cast<size_t>(before)]);
    } else if (!evaluation && precision.recompute == Recompute::kBlock) {
      blocks.push_back(l == 0 ? workspace : blocks.front());
      blocks.back().attention_norm.residual = declare.kept(prefix + "input", {num_tokens, d});
      offload.set_buffer(l, {blocks.back().attention_norm.residual});
      if (l == 0) declare.keep(blocks.back(), "block.", workspace);
    } else {
      blocks.push_back(workspace);
      offload.set_buffer(l, declare.keep(blocks.back(), prefix, workspace));
    }
  }

  const PhaseMask always = evaluation ? PhaseMask{kEvaluation} : PhaseMask{kStep};
  tokens = plan.add("batch", "tokens", DType::kI32, {num_tokens}, always);
  targets = plan.add("batch", "targets", DType::kI32, {num_tokens}, always);
  if (!evaluation) {
    token_order = plan.add("batch", "token_order", DType::kI32, {num_tokens, kTokenRowInts}, always);
  }
  if (shape.separate_documents) {
    first_keys = plan.add("batch", "first_keys", DType::kI32, {num_tokens}, always);
  }
  losses = plan.add("batch", "losses", DType::kF32, {num_tokens}, always);
  const Formats formats(precision);
  if (formats.fp8_gemm && formats.activation.scaling == Scaling::kTensor) {
    attention_amax = plan.add(evaluation ? "evaluation" : "workspace", "attention_amax", DType::kF32, {1},
                              evaluation ? PhaseMask{kEvaluation} : kForwardAttention | declare.rerun());
  }
  branch = declare.shared("branch", kForward | kHead | declare.rerun(), {num_tokens, d});
  final_input = declare.shared("final_input", kHead, {num_tokens, d});
  if (model.norm == NormKind::kLayerNorm) final_mean = declare.shared_statistic("final_mean", kHead);
  final_rstd = declare.shared_statistic("final_rstd", kHead);
  final_output = declare.shared("final_output", kHead, {num_tokens, d});
  logits_chunk = std::min(num_tokens, logits_chunk_tokens);
  logits = declare.shared("logits", kHead, {logits_chunk, model.vocab_size});
  if (!evaluation) backward = declare.backward();
}

}  // namespace parka
