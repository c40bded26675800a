#include "kernels/ops/attention/rope_projection.h"

namespace parka::cpu {

void rope_projection(Device& device, const RopeProjection& a) {
  cpu::gemm(device, a.projection);
  cpu::rope_forward(device, a.rope);
}

}  // namespace parka::cpu
