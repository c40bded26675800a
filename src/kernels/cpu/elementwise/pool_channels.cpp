#include "kernels/ops/elementwise/pool_channels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {

void pool_channels(Device&, const PoolChannels& a) {
  const int64_t T = a.x.dim[0], C = a.x.dim[1], s = a.out.dim[1];
  constexpr int64_t kRowGrain = 16;
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(C)), out(static_cast<size_t>(s));
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.x, t * C, C, x.data());
      for (int64_t i = 0; i < s; ++i) {
        const int64_t first = std::min(i * a.group, C), last = std::min(first + a.group, C);
        float largest = first < last ? x[first] : 0.0f, sum = 0.0f;
        for (int64_t c = first; c < last; ++c) {
          if (x[c] > largest || std::isnan(x[c])) largest = x[c];
          sum += x[c];
        }
        const bool is_mean = a.kind == PoolKind::kAverage && first < last;
        out[i] = is_mean ? sum / static_cast<float>(last - first) : largest;
      }
      encode_elements(out.data(), t * s, s, a.out);
    }
  });
}

}  // namespace parka::cpu
