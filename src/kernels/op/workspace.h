#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// Bytes of workspace (Device::set_workspace) that ops take on a GPU: functions of shapes alone, so that a plan
// needs none. workspace_of() of an op says which of them it takes, and its kernel takes them by the same function.
namespace parka::cuda {

// cuBLASLt's kernels. NVIDIA recommends 32 MiB for Hopper; no algorithm that tuning chose with that, for recipe
// parka at 1 and 7 billion parameters (configs/tuning), wants more than this.
inline constexpr int64_t kGemmWorkspaceBytes = int64_t{16} << 20;

// norm_backward: partial sums of d_weight, fp32 [blocks, C], of blocks that keep a GPU busy; twice with d_bias.
inline int64_t norm_backward_max_blocks(int64_t cols) {
  const int64_t fit = (int64_t{8} << 20) / (4 * cols);
  return fit > 256 ? fit : 256;
}
inline int64_t norm_backward_workspace_bytes(int64_t cols) { return norm_backward_max_blocks(cols) * cols * 4; }

// bias_backward: sums of pieces of the rows, fp32 [pieces, C], in an order of the rows' number alone.
inline int64_t bias_backward_pieces(int64_t rows) {
  constexpr int64_t kMostPieces = 128, kFewestRows = 64;
  const int64_t pieces = (rows + kFewestRows - 1) / kFewestRows;
  return pieces < kMostPieces ? pieces : kMostPieces;
}
inline int64_t bias_backward_workspace_bytes(int64_t rows, int64_t cols) {
  return bias_backward_pieces(rows) * cols * 4;
}

// mix_backward: a sum of each piece of the elements, fp32. A piece is one thread block's work.
inline constexpr int64_t kMixPiece = int64_t{1} << 13;  // elements
inline int64_t mix_pieces(int64_t numel) { return (numel + kMixPiece - 1) / kMixPiece; }
inline int64_t mix_backward_workspace_bytes(int64_t numel) { return mix_pieces(numel) * 4; }

// embedding_backward: fp32 sums [T / 32, C] of the pieces of tokens that have more than one. A token whose rows
// begin at position p of the order has slots p / 32 and on. No two tokens meet: one with n > 64 rows has n / 64
// pieces, rounded up, and the next token's slots begin at least n / 32, rounded down, after its own.
inline constexpr int64_t kEmbeddingSlotRows = 32;
inline int64_t embedding_backward_workspace_bytes(int64_t tokens, int64_t cols) {
  return tokens / kEmbeddingSlotRows * cols * 4;
}

// cross_entropy that leaves its gradient in FP8: what makes a row's logits their gradient, four numbers of 4 bytes.
inline int64_t cross_entropy_workspace_bytes(int64_t rows) { return rows * 16; }

// attention_forward: how many tiles blocks have taken.
inline constexpr int64_t kAttentionForwardWorkspaceBytes = 4;

// attention_backward: log-sum-exp and delta of each row, two fp32 [B, H, S]; each pass's counts of tiles.
inline constexpr int64_t kAttentionMaxPasses = 256;
inline int64_t attention_backward_workspace_bytes(int64_t tokens, int64_t num_heads) {
  return tokens * num_heads * 8 + kAttentionMaxPasses * 8;
}

// attention_backward's scratch: score gradients in bf16, of a pass over some key/value heads and their query heads,
// for all pairs of 64 queries and 128 keys of a head that are not masked entirely.
inline constexpr int64_t kScoreQueries = 64, kScorePairBytes = kScoreQueries * 128 * 2;
// The pairs of the first `query_tiles` tiles of 64 queries: 1, 1, 2, 2, 3, 3...
constexpr int64_t score_pairs(int64_t query_tiles) {
  const int64_t half = query_tiles / 2;
  return (half + 1) * (half + query_tiles % 2);
}
inline int64_t score_gradient_bytes(int64_t sequence_length) {  // of a query head
  return score_pairs((sequence_length + kScoreQueries - 1) / kScoreQueries) * kScorePairBytes;
}
// For passes of one length, long enough to keep a GPU busy to their end: one of 416 tiles takes 132 multiprocessors
// as many rounds as one of 512, and one of 256 loses a hundredth, which was measured without groups of query heads.
// So many key/value heads, at least, have a pass that does so.
inline constexpr int64_t kScoreHeadDim = 128, kTilesOfPass = 512;
constexpr int64_t attention_heads_of_pass(int64_t heads, int64_t sequence_length, int64_t tiles_of_pass) {
  constexpr int64_t kTileKeys = 128;
  const int64_t tiles = (sequence_length + kTileKeys - 1) / kTileKeys;
  const int64_t longest = (tiles_of_pass + tiles - 1) / tiles, passes = (heads + longest - 1) / longest;
  return (heads + passes - 1) / passes;
}
// The bytes that are worth memory of their own. 0 where nothing would be gained: other head dims, and sequences for
// which that is too much memory. Passes of kTilesOfPass tiles may take 10 bytes for each element of the output, and
// shorter ones 17, but none more than 1.34 GB. A block's other workspaces take about as much at another time: plans
// of OLMo-1B with 8192 to 32768 tokens grow by less than a tenth of it, those of Llama-2-7B by less than a third.
inline int64_t attention_backward_scratch_bytes(int64_t num_sequences, int64_t sequence_length, int64_t num_heads,
                                                int64_t num_kv_heads, int64_t head_dim) {
  constexpr int64_t kAlways = int64_t{320} << 20, kMost = 4 * kAlways;
  if (head_dim != kScoreHeadDim) return 0;
  const int64_t elements = num_sequences * sequence_length * num_heads * head_dim, group = num_heads / num_kv_heads;
  const auto bytes_of = [&](int64_t tiles_of_pass) {
    return attention_heads_of_pass(num_sequences * num_kv_heads, sequence_length, tiles_of_pass) * group *
           score_gradient_bytes(sequence_length);
  };
  const int64_t whole = bytes_of(kTilesOfPass), half = bytes_of(kTilesOfPass / 2);
  if (whole <= std::clamp(10 * elements, kAlways, kMost)) return whole;
  return group == 1 && half <= std::clamp(17 * elements, kAlways, kMost) ? half : 0;
}
// The bytes of passes of kTilesOfPass tiles, of half as many passes and so on up to one of all heads, ascending:
// worth taking where no plan grows by them. Others would leave most multiprocessors idle in the last round.
inline std::vector<int64_t> attention_backward_scratch_choices(int64_t num_sequences, int64_t sequence_length,
                                                               int64_t num_heads, int64_t num_kv_heads,
                                                               int64_t head_dim) {
  std::vector<int64_t> choices;
  if (head_dim != kScoreHeadDim) return choices;
  const int64_t heads = num_sequences * num_kv_heads, group = num_heads / num_kv_heads;
  const int64_t fewest = attention_heads_of_pass(heads, sequence_length, kTilesOfPass);
  for (int64_t passes = (heads + fewest - 1) / fewest;; passes = (passes + 1) / 2) {
    choices.push_back((heads + passes - 1) / passes * group * score_gradient_bytes(sequence_length));
    if (passes == 1) return choices;
  }
}

// attention_decode: of each piece of the keys of each row and query head the sum of its values, fp32 [D], with the
// maximum of its scores and the sum of its weights. The pieces are the same whatever else is in the batch.
inline constexpr int64_t kDecodePieceKeys = 256;
inline int64_t attention_decode_pieces(int64_t max_keys) {
  return (max_keys + kDecodePieceKeys - 1) / kDecodePieceKeys;
}
inline int64_t attention_decode_workspace_bytes(int64_t rows, int64_t num_heads, int64_t head_dim,
                                                int64_t max_keys) {
  return rows * num_heads * attention_decode_pieces(max_keys) * (head_dim + 2) * 4;
}

// sort_by_expert: of each piece of the slots how many each expert has, int32 [E, pieces]. A piece is one thread
// block's work.
inline constexpr int64_t kSortMostPieces = 256;
inline int64_t sort_piece_slots(int64_t num_slots) {
  constexpr int64_t kFewest = 1024, kStep = 256;
  const int64_t slots = (num_slots + kSortMostPieces - 1) / kSortMostPieces;
  return slots <= kFewest ? kFewest : (slots + kStep - 1) / kStep * kStep;
}
inline int64_t sort_pieces(int64_t num_slots) {  // one of no slots, too
  return num_slots == 0 ? 1 : (num_slots - 1) / sort_piece_slots(num_slots) + 1;
}
inline int64_t sort_by_expert_workspace_bytes(int64_t num_slots, int64_t num_experts) {
  return num_experts * sort_pieces(num_slots) * 4;
}

// router_load: the sums of pieces of the tokens, fp32 [pieces, 2 E + 1], in an order of the tokens' number alone.
inline int64_t router_load_pieces(int64_t tokens) {
  constexpr int64_t kMostPieces = 256, kFewestTokens = 32;
  const int64_t pieces = (tokens + kFewestTokens - 1) / kFewestTokens;
  return pieces < kMostPieces ? pieces : kMostPieces;
}
inline int64_t router_load_workspace_bytes(int64_t tokens, int64_t num_experts) {
  return router_load_pieces(tokens) * (2 * num_experts + 1) * 4;
}

// sum_of_squares: one fp64 sum for each part and for each piece of each part. A piece is one thread block's work.
inline constexpr int64_t kSumOfSquaresPiece = int64_t{1} << 14;  // elements
inline int64_t sum_of_squares_pieces(int64_t numel) {
  return (numel + kSumOfSquaresPiece - 1) / kSumOfSquaresPiece;
}
inline int64_t sum_of_squares_workspace_bytes(int64_t pieces, int64_t parts) { return (pieces + parts) * 8; }

// orthogonalize: one fp64 sum of squares for each piece of each matrix. A piece is one thread block's work.
inline constexpr int64_t kOrthogonalizePiece = int64_t{1} << 15;  // elements
inline int64_t orthogonalize_pieces(int64_t numel) {              // of a matrix
  return (numel + kOrthogonalizePiece - 1) / kOrthogonalizePiece;
}
inline int64_t orthogonalize_workspace_bytes(int64_t matrices, int64_t numel) {
  return matrices * orthogonalize_pieces(numel) * 8;
}

// gemm of 1x128 and 128x128 scaled operands: after cuBLASLt's workspace, the scales of both. The bytes of an
// operand [rows, depth] are those in cuBLASLt's layout as 1x128, which are more than as 128x128.
inline int64_t gemm_scales_bytes(int64_t rows, int64_t depth) {
  constexpr int64_t kAlignment = 256, kGroup = 128, kScale = 4;
  const int64_t bytes = rows * ((depth + kGroup - 1) / kGroup) * kScale;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Ops that find the maximum that a tensor-wide scale is made from: the maximum, fp32.
inline constexpr int64_t kAmaxWorkspaceBytes = 4;

// quantization_statistics: the totals of each block of threads, two fp64 and four of 4 bytes.
inline constexpr int64_t kStatisticsBlocks = 1024, kStatisticsWorkspaceBytes = kStatisticsBlocks * 32;

// attention_statistics: the same, four fp64 and two of 4 bytes.
inline constexpr int64_t kAttentionStatisticsWorkspaceBytes = kStatisticsBlocks * 40;

}  // namespace parka::cuda
