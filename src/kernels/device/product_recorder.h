#pragma once

namespace parka {
struct Gemm;

// A device's op_recorder() may also be one, to be told of GEMMs with their tensors, before it is told of them as
// ops.
class ProductRecorder {
 public:
  virtual ~ProductRecorder() = default;
  virtual void record_product(const Gemm& a) = 0;
};

}  // namespace parka
