#pragma once
#include "kernels/ops.h"

namespace parka {

// The tensor that an op writes; of several the one that the next op of a model's step reads, of quantized ones the
// codes, the transposed ones where no others are wanted. Empty where the op leaves nothing.
TensorView output_of(const EmbeddingForward& a);
TensorView output_of(const EmbeddingBackward& a);
TensorView output_of(const NormForward& a);
TensorView output_of(const NormRecompute& a);
TensorView output_of(const NormBackward& a);
TensorView output_of(const Gemm& a);
TensorView output_of(const RopeForward& a);
TensorView output_of(const AttentionForward& a);
TensorView output_of(const AttentionBackward& a);
TensorView output_of(const CacheAppend& a);
TensorView output_of(const AttentionDecode& a);
TensorView output_of(const SwigluForward& a);
TensorView output_of(const SwigluBackward& a);
TensorView output_of(const Quantize& a);
// The losses where no gradient is wanted.
TensorView output_of(const CrossEntropy& a);
TensorView output_of(const SumOfSquares& a);
TensorView output_of(const ClipCoefficient& a);
TensorView output_of(const AddSum& a);
TensorView output_of(const Add& a);
TensorView output_of(const Amax& a);
TensorView output_of(const BitHash& a);
TensorView output_of(const AdamwStep& a);
TensorView output_of(const MomentEncode& a);
TensorView output_of(const MomentDecode& a);
TensorView output_of(const QuantizationStatistics& a);
TensorView output_of(const MomentStatistics& a);

}  // namespace parka
