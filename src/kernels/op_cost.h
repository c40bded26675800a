#pragma once
#include "kernels/device/op_timer.h"
#include "kernels/ops.h"

namespace parka {

// What must move and be computed for each op, tensors that are not given left out. In place counts as read and
// written; what a tensor-wide FP8 scale is found from counts twice.
OpCost cost_of(const EmbeddingForward& a);
OpCost cost_of(const EmbeddingBackward& a);
OpCost cost_of(const NormForward& a);
OpCost cost_of(const NormRecompute& a);
OpCost cost_of(const NormBackward& a);
OpCost cost_of(const Gemm& a);
OpCost cost_of(const RopeForward& a);
// Causal: half of the S x S scores. Backward counts 2.5 times forward, for its five products.
OpCost cost_of(const AttentionForward& a);
OpCost cost_of(const AttentionBackward& a);
OpCost cost_of(const CacheAppend& a);
// As if every row had max_keys keys: positions are on the device.
OpCost cost_of(const AttentionDecode& a);
OpCost cost_of(const SwigluForward& a);
OpCost cost_of(const SwigluBackward& a);
OpCost cost_of(const Quantize& a);
OpCost cost_of(const CrossEntropy& a);
OpCost cost_of(const SumOfSquares& a);
OpCost cost_of(const ClipCoefficient& a);
OpCost cost_of(const AddSum& a);
OpCost cost_of(const Add& a);
OpCost cost_of(const Amax& a);
OpCost cost_of(const BitHash& a);
OpCost cost_of(const AdamwStep& a);
OpCost cost_of(const MomentEncode& a);
OpCost cost_of(const MomentDecode& a);
OpCost cost_of(const QuantizationStatistics& a);
OpCost cost_of(const MomentStatistics& a);

}  // namespace parka
