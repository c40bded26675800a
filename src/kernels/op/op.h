#pragma once
#include "core/tensor.h"
#include "kernels/device/op_timer.h"

// The parts of an op, each in one place: `struct Args` with its tensors, whose header says the formula, shapes
// and formats (ops/<op>.h); its checks and cost (ops/<op>.cpp); the reference (cpu/<op>.cpp); the kernel
// (cuda/<folder>/<op>.cu).
namespace parka {
class Device;

// Bytes of workspace (Device::set_workspace) that an op takes on a GPU. Most take none. The header of one that
// takes some declares `int64_t workspace_of(const Args& a);` after its PARKA_OP.
template <typename Args>
int64_t workspace_of(const Args&) {
  return 0;
}
}  // namespace parka

// Declares the op `name` with its arguments, within namespace parka:
//   name(device, args)      checks the arguments and runs the device's implementation; what callers use
//   cpu::name, cuda::name   the implementations, whose arguments have been checked and have elements to work on
//   cost_of(args)           what must move and be computed, tensors that are not given left out. A tensor that is
//                           changed in place counts as read and written; the source of a tensor-wide FP8 scale,
//                           twice
#define PARKA_OP(name, Args)                         \
  void name(Device& device, const Args& a);          \
  OpCost cost_of(const Args& a);                     \
  namespace cpu {                                    \
  void name(::parka::Device& device, const Args& a); \
  }                                                  \
  namespace cuda {                                   \
  void name(::parka::Device& device, const Args& a); \
  }                                                  \
  static_assert(true, "a semicolon follows")
