#include "kernels/ops/elementwise/add.h"

#include "core/number_formats.h"
#include "core/parallel.h"

namespace parka::cpu {

void add(Device&, const Add& a) {
  constexpr int64_t kPiece = 16384;
  parallel_for(a.x.numel(), kPiece, [&](int64_t begin, int64_t end) {
    if (a.x.dtype == DType::kF32) {
      const float* x = a.x.as<float>();
      float* total = a.total.as<float>();
      for (int64_t i = begin; i < end; ++i) total[i] += x[i];
    } else {
      const BFloat16* x = a.x.as<BFloat16>();
      BFloat16* total = a.total.as<BFloat16>();
      for (int64_t i = begin; i < end; ++i) total[i] = encode_bf16(decode_bf16(total[i]) + decode_bf16(x[i]));
    }
  });
}

}  // namespace parka::cpu
