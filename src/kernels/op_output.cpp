#include "kernels/op_output.h"

#include <initializer_list>

namespace parka {
namespace {

TensorView first_given(std::initializer_list<TensorView> tensors) {
  for (const TensorView& tensor : tensors) {
    if (!tensor.empty()) return tensor;
  }
  return {};
}

}  // namespace

TensorView output_of(const EmbeddingForward& a) { return a.out; }
TensorView output_of(const EmbeddingBackward& a) { return a.d_table; }
TensorView output_of(const NormForward& a) { return a.y.data; }
TensorView output_of(const NormRecompute& a) { return first_given({a.y.data, a.y_t.data}); }
TensorView output_of(const NormBackward& a) { return a.d_residual_out; }
TensorView output_of(const Gemm& a) { return a.out; }
TensorView output_of(const RopeForward& a) { return a.qkv; }
TensorView output_of(const AttentionForward& a) { return a.out; }
TensorView output_of(const AttentionBackward& a) { return a.d_qkv; }
TensorView output_of(const CacheAppend& a) { return a.cache; }
TensorView output_of(const AttentionDecode& a) { return a.out; }
TensorView output_of(const SwigluForward& a) { return a.product.data; }
TensorView output_of(const SwigluBackward& a) {
  return first_given({a.d_up_gate.data, a.d_up_gate_t.data, a.product.data, a.product_t.data});
}
TensorView output_of(const Quantize& a) { return first_given({a.out.data, a.out_t.data}); }
TensorView output_of(const CrossEntropy& a) { return a.write_gradient ? a.logits : a.loss; }
TensorView output_of(const SumOfSquares& a) { return a.result; }
TensorView output_of(const ClipCoefficient& a) { return a.coefficient; }
TensorView output_of(const AddSum& a) { return a.total; }
TensorView output_of(const Add& a) { return a.total; }
TensorView output_of(const Amax& a) { return a.result; }
TensorView output_of(const BitHash& a) { return a.hash; }
TensorView output_of(const AdamwStep& a) { return a.weight; }
TensorView output_of(const MomentEncode& a) { return a.moment.values; }
TensorView output_of(const MomentDecode& a) { return a.values; }
TensorView output_of(const QuantizationStatistics& a) { return a.totals; }
TensorView output_of(const MomentStatistics& a) { return a.counts; }

}  // namespace parka
