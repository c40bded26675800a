#include "kernels/ops/elementwise/side_network.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

struct Weight {
  float value, slope;  // w and w'(c)
};

Weight weight_of(MixWeight kind, const TensorView& c) {
  float value = 0;
  decode_elements(c, 0, 1, &value);
  if (kind == MixWeight::kScalar) return {value, 1.0f};
  const float w = 1.0f / (1.0f + std::exp(-value));
  return {w, w * (1.0f - w)};
}

}  // namespace

void mix_forward(Device&, const MixForward& a) {
  const int64_t T = a.x.dim[0], C = a.x.dim[1];
  const float w = weight_of(a.kind, a.c).value;
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(C)), y(x), branch(x), out(x);
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.x, t * C, C, x.data());
      decode_elements(a.residual, t * C, C, y.data());
      if (!a.branch.empty()) {
        decode_elements(a.branch, t * C, C, branch.data());
        for (int64_t c = 0; c < C; ++c) y[c] += branch[c];
      }
      for (int64_t c = 0; c < C; ++c) out[c] = (1.0f - w) * x[c] + w * y[c];
      encode_elements(out.data(), t * C, C, a.out);
      if (a.difference.empty()) continue;
      for (int64_t c = 0; c < C; ++c) out[c] = y[c] - x[c];
      encode_elements(out.data(), t * C, C, a.difference);
    }
  });
}

void mix_backward(Device&, const MixBackward& a) {
  const int64_t T = a.d_out.dim[0], C = a.d_out.dim[1];
  const Weight w = weight_of(a.kind, a.c);
  std::vector<float> sums(static_cast<size_t>(T));
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> d_out(static_cast<size_t>(C)), difference(d_out), part(d_out);
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.d_out, t * C, C, d_out.data());
      decode_elements(a.difference, t * C, C, difference.data());
      float sum = 0;
      for (int64_t c = 0; c < C; ++c) sum += d_out[c] * difference[c];
      sums[static_cast<size_t>(t)] = sum;
      if (!a.d_x.empty()) {
        for (int64_t c = 0; c < C; ++c) part[c] = (1.0f - w.value) * d_out[c];
        encode_elements(part.data(), t * C, C, a.d_x);
      }
      if (a.d_y.empty()) continue;
      for (int64_t c = 0; c < C; ++c) part[c] = w.value * d_out[c];
      encode_elements(part.data(), t * C, C, a.d_y);
    }
  });
  if (a.d_c.empty()) return;
  float total = 0, d_c = 0;
  for (const float sum : sums) total += sum;
  decode_elements(a.d_c, 0, 1, &d_c);
  d_c += w.slope * total;
  encode_elements(&d_c, 0, 1, a.d_c);
}

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
