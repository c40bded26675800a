#include "kernels/ops/gemm/gemm.h"

#include <algorithm>
#include <iterator>

#include "kernels/device/recording_device.h"
#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

void check_operand(std::string_view name, const ScaledView& t, bool transposed, int64_t extent, int64_t depth,
                   int64_t padding) {
  check_matrix("gemm", name, t, transposed ? depth : extent, (transposed ? extent : depth) + padding);
  if (transposed && t.scaling != Scaling::kNone) {
    throw_internal("gemm: {} is {} and flagged transposed: give a transposed copy instead", name, describe(t));
  }
}

constexpr uint32_t kFullAlignment = 256;  // the most that cuBLASLt asks about

// FP8 tensor cores multiply so many elements of the summed axis at a time, and want operands so aligned.
constexpr int64_t kFloat8Unit = 16;
constexpr uint32_t kFloat8Alignment = 16;
constexpr int64_t kBlockScaleGroup = 128;  // the one that cuBLASLt has for fp32 scales

constexpr uint32_t kLowRankAlignment = 16;  // of what low_rank_update reads and writes at a time, 8 elements
constexpr int64_t kLowRankUnit = 8;

bool is_plain(const Gemm& a) { return a.a.scaling == Scaling::kNone; }
bool is_block_scaled(const ScaledView& x) { return x.scaling == Scaling::kGroup || x.scaling == Scaling::kBlock; }

bool has_low_rank_units(const TensorView& x) {
  return x.dtype == DType::kBF16 && x.dim[1] % kLowRankUnit == 0 && alignment_of(x) >= kLowRankAlignment;
}

std::string format_of(const ScaledView& x) {
  switch (x.scaling) {
    case Scaling::kNone: return std::string(name_of(x.data.dtype));
    case Scaling::kTensor: return fmt::format("{} per tensor", name_of(x.data.dtype));
    case Scaling::kGroup: return fmt::format("{} per 1x{}", name_of(x.data.dtype), x.group);
    case Scaling::kBlock: return fmt::format("{} per {}x{}", name_of(x.data.dtype), x.group, x.group);
  }
  throw_internal("unknown scaling");
}

}  // namespace

void check_gemm(const Gemm& a) {
  const auto [rows, cols, depth] = gemm_shape(a);
  check_tensor("gemm", "out", a.out, {rows, cols + a.out_padding}, {DType::kF32, DType::kBF16});
  check_operand("a", a.a, a.a_transposed, rows, depth, a.a_padding);
  check_operand("b", a.b, a.b_transposed, cols, depth, a.b_padding);
  const bool both_fp8 = a.a.scaling != Scaling::kNone && a.b.scaling != Scaling::kNone;
  if (!both_fp8 && a.a.data.dtype != a.b.data.dtype) {
    throw_internal("gemm: a is {} and b is {}: wanted two fp8 operands, or two of one dtype", describe(a.a),
                   describe(a.b));
  }
  if (a.a_padding != 0 || a.b_padding != 0 || a.out_padding != 0) {
    PARKA_REQUIRE(!both_fp8 && std::min({a.a_padding, a.b_padding, a.out_padding}) >= 0 && depth > 0);
  }
  PARKA_REQUIRE(!both_fp8 || a.factor == 1);
}

void record_product(Device& device, const Gemm& a) {
  if (auto* recorder = dynamic_cast<ProductRecorder*>(device.op_recorder())) recorder->record_product(a);
}

void gemm(Device& device, const Gemm& a) {
  check_gemm(a);
  const auto [rows, cols, depth] = gemm_shape(a);
  if (rows == 0 || cols == 0) return;
  if (depth == 0) {
    if (!a.accumulate) device.fill_zero(a.out.data, a.out.bytes());
    return;
  }
  record_product(device, a);
  PARKA_DISPATCH(gemm, device, a);
}

GemmShape gemm_shape(const Gemm& a) {
  const int64_t depth = a.a_transposed ? a.a.data.dim[0] : a.a.data.dim[1] - a.a_padding;
  return {a.out.dim[0], a.out.dim[1] - a.out_padding, depth};
}

OpCost cost_of(const Gemm& a) {
  const auto [M, N, K] = gemm_shape(a);
  return {all_bytes(a.a, a.b) + (a.accumulate ? 2 : 1) * bytes_of(a.out),
          2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
          fmt::format("{} x {} x {} {}{}{} {}{}", M, N, K, name_of(a.a.data.dtype), a.a_transposed ? " T" : " N",
                      a.b_transposed ? "T" : "N", name_of(a.out.dtype), a.accumulate ? kOntoOutput : ""),
          Products::kGemm};
}
int64_t workspace_of(const Gemm& a) {
  // Other products of scaled operands leave the scales where they are.
  if (a.a.scaling != Scaling::kGroup && a.a.scaling != Scaling::kBlock) return cuda::kGemmWorkspaceBytes;
  return cuda::kGemmWorkspaceBytes + cuda::gemm_scales_bytes(a.a.num_rows(), a.a.num_cols()) +
         cuda::gemm_scales_bytes(a.b.num_rows(), a.b.num_cols());
}

// Block scaling adds up every 128 terms in fp32 as it is.
bool accumulates_fast(const Gemm& a) { return a.fast_accumulation && a.a.scaling == Scaling::kTensor; }

uint32_t alignment_of(const TensorView& t) {
  const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(t.data) % kFullAlignment);
  return address == 0 ? kFullAlignment : address & (~address + 1u);
}

bool suits_low_rank_update(const Gemm& a) {
  if (!is_plain(a) || !a.accumulate || a.a_transposed) return false;
  const auto [rows, cols, depth] = gemm_shape(a);
  if (depth > kMostLowRankTerms || depth % kLowRankUnit != 0 || cols % kLowRankUnit != 0) return false;
  constexpr int64_t kMostIndex = int64_t{1} << 30;  // the kernel counts in 32 bits
  if (std::max(rows, cols) >= kMostIndex) return false;
  return has_low_rank_units(a.a.data) && has_low_rank_units(a.b.data) && has_low_rank_units(a.out);
}

bool suits_float8_tiles(const Gemm& a) {
  const auto is_operand = [](const ScaledView& x) {
    return x.scaling == Scaling::kTensor && x.data.dtype == DType::kE4M3;
  };
  return is_operand(a.a) && is_operand(a.b) && suits_cublaslt(a) && accumulates_fast(a) && !a.accumulate &&
         a.out.dtype == DType::kBF16 && gemm_shape(a).depth > 0;
}

bool suits_cublaslt(const Gemm& a) {
  if (is_plain(a)) return !suits_low_rank_update(a);
  for (const ScaledView* x : {&a.a, &a.b}) {
    if (x->num_cols() % kFloat8Unit != 0) return false;
    if (alignment_of(x->data) < kFloat8Alignment || alignment_of(x->scale) < kFloat8Alignment) return false;
    if (is_block_scaled(*x) && (x->group != kBlockScaleGroup || x->scale.dtype != DType::kF32)) return false;
  }
  if (a.b.num_rows() % kFloat8Unit != 0 || alignment_of(a.out) < kFloat8Alignment) return false;
  if (is_block_scaled(a.a) != is_block_scaled(a.b)) return false;
  if (!is_block_scaled(a.a)) return true;
  return a.a.num_rows() % kFloat8Unit == 0 && (a.a.scaling != Scaling::kBlock || a.b.scaling != Scaling::kBlock);
}

std::string key_of(const Gemm& a) {
  std::string key = cost_of(a).shape;
  if (!is_plain(a)) {
    key += fmt::format(" [{}, {}{}]", format_of(a.a), format_of(a.b), accumulates_fast(a) ? ", fast" : "");
  }
  if (a.a_padding != 0 || a.out_padding != 0) key += fmt::format(" padded {} {}", a.a_padding, a.out_padding);
  if (a.b_padding != 0) key += fmt::format(" b padded {}", a.b_padding);
  const uint32_t alignments[] = {alignment_of(a.a.data), alignment_of(a.b.data), alignment_of(a.out)};
  if (*std::min_element(std::begin(alignments), std::end(alignments)) < kFullAlignment) {
    key += fmt::format(" aligned {} {} {}", alignments[0], alignments[1], alignments[2]);
  }
  return key;
}

}  // namespace parka
