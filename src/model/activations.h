#pragma once
#include <vector>

#include "model/activation_offload.h"
#include "model/formats.h"
#include "model/phases.h"

namespace parka {

// The category of the memory plan with what forward keeps for backward.
inline constexpr const char* kSavedActivationsCategory = "saved activations";

// How many tokens one forward works on. Row t of an activation is position t % sequence_length of sequence
// t / sequence_length.
struct BatchShape {
  int64_t num_sequences = 0;
  int64_t sequence_length = 0;
  bool separate_documents = false;  // attention stays within documents, whose beginnings come with the batch
  int64_t num_tokens() const { return num_sequences * sequence_length; }
  bool operator==(const BatchShape&) const = default;
};

// Matrices of one half of a block, seen from the norm in front of it (d wide, T tokens).
struct NormBuffers {
  TensorId
      residual;  // [T, d] the residual stream after the add; a block's first one is all that block recompute keeps
  MatrixId x;    // [T, d] FP8 copy that the norm reads; invalid: it reads residual
  TensorId mean, rstd;
  MatrixId y;    // [T, d] the norm's output, input of the next GEMM
  MatrixId y_t;  // [d, T] the same transposed, for FP8 weight gradients
};

// What a block's forward writes. Which of these are kept per block and which are workspace that all blocks
// share is decided where they are declared; forward and backward just use them.
struct BlockBuffers {
  NormBuffers attention_norm;
  TensorId qkv;              // [T, (H + 2 Hkv) D] rotated q, k, and v: what attention reads
  MatrixId qkv_saved;        // the same in FP8; invalid: qkv itself is kept
  TensorId lse;              // [B, H, S]
  TensorId attention;        // [T, H D] attention's output
  MatrixId attention_fp8;    // [T, H D] the output projection's input; invalid without FP8 GEMMs
  MatrixId attention_fp8_t;  // [H D, T]
  NormBuffers ffn_norm;
  TensorId up_gate_plain;  // [T, 2f] as the GEMM leaves it; invalid when `up_gate` is that
  MatrixId up_gate;        // [T, 2f]
  MatrixId silu;           // [T, f]
  MatrixId product;        // [T, f] SwiGLU's output, input of the down projection
  MatrixId product_t;      // [f, T]
};

// Buffers that backward needs beside what forward kept.
struct BackwardBuffers {
  TensorId d_residual;         // [T, d] gradient of the residual stream
  MatrixId d_branch;           // [T, d] the same in FP8: output gradient of down or attention_out
  MatrixId d_branch_t;         // [d, T]
  TensorId d_norm_output;      // [T, d]
  TensorId d_product;          // [T, f]
  MatrixId d_up_gate;          // [T, 2f]
  MatrixId d_up_gate_t;        // [2f, T]
  TensorId d_attention;        // [T, H D]
  TensorId d_qkv;              // [T, (H + 2 Hkv) D]
  TensorId d_qkv_amax;         // [1] fp32; only where its FP8 copies have a tensor-wide scale
  TensorId attention_scratch;  // [bytes] u8; invalid where attention_backward has no use for it
  MatrixId d_qkv_fp8;          // [T, (H + 2 Hkv) D]
  MatrixId d_qkv_fp8_t;        // [(H + 2 Hkv) D, T]
};

// All activations of a model for batches of up to `shape`.
struct Activations {
  enum class Purpose {
    kTraining,    // keeps what backward needs
    kEvaluation,  // forward only: one set for all blocks, in memory that training uses at other times
  };
  Activations(const ModelConfig& model, const PrecisionConfig& precision, const BatchShape& shape,
              int64_t logits_chunk_tokens, Purpose purpose, MemoryPlan& plan);

  TensorId tokens, targets;  // [T] int32
  TensorId token_order;      // [T, kTokenRowInts] int32 what embedding_order makes of tokens; training only
  TensorId first_keys;       // [T] int32 see AttentionForward; only where documents may be separate
  TensorId losses;           // [T] fp32
  std::vector<BlockBuffers> blocks;
  ActivationOffload offload;  // of what is kept for backward; training only
  TensorId attention_amax;    // [1] fp32 of the block at hand; only where its GEMM input has a tensor-wide scale
  TensorId branch;            // [T, d] output of attention_out or down, until the next norm adds it
  TensorId final_input;       // [T, d] residual stream after the last block
  TensorId final_mean, final_rstd;
  TensorId final_output;  // [T, d] input of the head
  TensorId logits;        // [chunk, V]
  int64_t logits_chunk = 0;
  BackwardBuffers backward;
};

}  // namespace parka
