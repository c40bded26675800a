#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/tensor.h"
#include "kernels/device/op_fault.h"

namespace parka {

// Flips bit `bit` % 8, counted from the lowest, of byte `bit` / 8 of x, behind the work that is queued; the host
// waits for it. Throws Error(kInternal) where x has no such bit.
void flip_bit(Device& device, const TensorView& x, int64_t bit);

// Flips one bit of what one op writes: of the n-th op of this name (1: the first) that runs while the fault is set.
// `bit` is taken modulo the number of bits of the output.
class BitFlip final : public OpFault {
 public:
  BitFlip(std::string op, int64_t n, int64_t bit);
  void after(Device& device, std::string_view op, const TensorView& output) override;
  bool is_done() const { return to_come_ <= 0; }

 private:
  std::string op_;
  int64_t to_come_;  // ops of the name up to the one that is hit
  int64_t bit_;
};

}  // namespace parka
