#pragma once
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka {

// Fills operands of products with numbers from a normal distribution, a million of them over and over: how much
// power a product takes depends on its numbers.
class RandomOperands {
 public:
  // For operands of up to so many elements.
  RandomOperands(Device& device, int64_t most_elements);
  ~RandomOperands();
  RandomOperands(const RandomOperands&) = delete;
  RandomOperands& operator=(const RandomOperands&) = delete;

  // Queues it for both, bf16 or FP8.
  void fill(const Gemm& a) const;

  // Of the larger operand.
  static int64_t elements_of(const Gemm& a);
  // That fill() takes of the device's workspace.
  static int64_t workspace_of(const Gemm& a);

 private:
  Device& device_;
  void* memory_;
};

}  // namespace parka
