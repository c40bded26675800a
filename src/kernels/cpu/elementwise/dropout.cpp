#include "kernels/ops/elementwise/dropout.h"

#include <algorithm>

#include "core/number_formats.h"
#include "core/parallel.h"

namespace parka::cpu {
namespace {

float read(float x) { return x; }
float read(BFloat16 x) { return decode_bf16(x); }
void write(float& y, float x) { y = x; }
void write(BFloat16& y, float x) { y = encode_bf16(x); }

template <typename T>
void run(const Dropout& a) {
  const int64_t rows = a.x.dim[a.transposed ? 1 : 0], cols = a.x.dim[a.transposed ? 0 : 1];
  const int64_t S = a.sequence_length, chunks = ceil_div(cols, 4);
  const int32_t* const position = a.position.as<int32_t>();
  const auto step = static_cast<uint32_t>(position[0]);
  const int64_t first = position[1], stride = position[2];
  const uint32_t threshold = dropout_threshold(a.probability);
  const float factor = dropout_factor(a.probability);
  const T* const x = a.x.as<T>();
  T* const y = a.y.as<T>();
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t place = (first + t / S * stride) * S + t % S;
      for (int64_t c = 0; c < chunks; ++c) {
        const auto words = dropout_words(a.seed, a.stream, step, static_cast<uint64_t>(place),
                                         static_cast<uint64_t>(chunks), static_cast<uint64_t>(c));
        for (int64_t k = 4 * c; k < std::min(4 * c + 4, cols); ++k) {
          const int64_t i = a.transposed ? k * rows + t : t * cols + k;
          const float kept = words[static_cast<size_t>(k % 4)] < threshold ? 0.0f : read(x[i]) * factor;
          write(y[i], a.accumulate ? read(y[i]) + kept : kept);
        }
      }
    }
  });
}

}  // namespace

void dropout(Device&, const Dropout& a) {
  if (a.x.dtype == DType::kF32) {
    run<float>(a);
  } else {
    run<BFloat16>(a);
  }
}

}  // namespace parka::cpu
