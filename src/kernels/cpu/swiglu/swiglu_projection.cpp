#include "kernels/ops/swiglu/swiglu_projection.h"

namespace parka::cpu {

void swiglu_projection(Device& device, const SwigluProjection& a) {
  cpu::gemm(device, a.projection);
  cpu::swiglu_forward(device, a.swiglu);
}

}  // namespace parka::cpu
