#include "kernels/ops/moe/router_bias.h"

#include <cmath>

namespace parka::cpu {

void move_router_bias(Device&, const MoveRouterBias& a) {
  if (std::isnan(a.coefficient.as<float>()[0])) return;
  const float* const load = a.load.as<float>();
  const int64_t E = a.bias.numel();
  int64_t sum = 0;
  for (int64_t e = 0; e < E; ++e) sum += static_cast<int64_t>(load[e]);
  for (int64_t e = 0; e < E; ++e) {
    const int64_t missing = sum - E * static_cast<int64_t>(load[e]);
    if (missing != 0) a.bias.as<float>()[e] += missing > 0 ? a.rate : -a.rate;
  }
}

}  // namespace parka::cpu
