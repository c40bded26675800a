#pragma once

namespace parka {
struct FusedProduct;
struct Gemm;

// What a device's op_recorder() may be too, to be told of matrix products with their tensors, before it is told of
// them as ops; and of products that may be one kernel with what follows them, when that is decided.
class ProductRecorder {
 public:
  virtual ~ProductRecorder() = default;
  virtual void record_product(const Gemm& a) = 0;
  virtual void record_fused_product(const FusedProduct& a) = 0;
};

}  // namespace parka
