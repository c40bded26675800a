#pragma once

namespace parka {
struct Gemm;

// What a device's op_recorder() may be too, to be told of matrix products with their tensors, before it is told of
// them as ops.
class ProductRecorder {
 public:
  virtual ~ProductRecorder() = default;
  virtual void record_product(const Gemm& a) = 0;
};

}  // namespace parka
