#include "kernels/ops/quantize/quantize_4bit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/number_formats.h"
#include "core/parallel.h"

namespace parka::cpu {
namespace {

constexpr int64_t kBlocksPerPiece = 256;

float to_float(float x) { return x; }
float to_float(BFloat16 x) { return decode_bf16(x); }

// The inverse of a scale; 0 where it is infinite.
float inverse_of(float absmax) {
  const float inverse = 1.0f / absmax;
  return std::isinf(inverse) ? 0.0f : inverse;
}

template <Format4Bit kFormat, typename T>
void quantize_block(const T* x, int64_t count, uint8_t* codes, float& absmax) {
  absmax = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    absmax = std::max(absmax, std::abs(to_float(x[i])));
    finite &= std::isfinite(to_float(x[i]));
  }
  if (!finite) absmax = std::numeric_limits<float>::quiet_NaN();
  const float inverse = finite ? inverse_of(absmax) : 0;
  const auto code = [&](int64_t i) {
    return encode_4bit<kFormat>(i < count && inverse > 0 ? to_float(x[i]) * inverse : 0.0f);
  };
  for (int64_t i = 0; i < count; i += 2) codes[i / 2] = static_cast<uint8_t>(code(i) << 4 | code(i + 1));
}

template <Format4Bit kFormat, typename T>
void quantize_blocks(const Quantize4Bit& a, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * a.block_size, count = std::min(a.block_size, a.x.numel() - first);
    quantize_block<kFormat>(a.x.as<T>() + first, count, a.codes.as<uint8_t>() + first / 2,
                            a.absmax.as<float>()[block]);
  }
}

// In 1024 sums of every 1024th scale, which are then added in halves, as a block of threads does it.
double total_of(const float* x, int64_t count) {
  std::vector<double> sums(1024);
  for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i) % sums.size()] += x[i];
  for (size_t half = sums.size() / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// The scale of block `block` of a.
float scale_of(const Dequantize4Bit& a, int64_t block) {
  if (a.absmax.dtype == DType::kF32) return a.absmax.as<float>()[block];
  const int64_t P = a.offset.numel(), blocks = a.absmax.numel() / P, tensor = block / blocks;
  const int64_t nested = tensor * (a.nested_absmax.numel() / P) + block % blocks / kNestedBlock;
  const float value = a.map.as<float>()[a.absmax.as<uint8_t>()[block]];
  return value * a.nested_absmax.as<float>()[nested] + a.offset.as<float>()[tensor];
}

void quantize_absmax_of_one(const QuantizeAbsmax& a) {
  const int64_t count = a.absmax.numel();
  const float *absmax = a.absmax.as<float>(), *map = a.map.as<float>();
  const auto offset = static_cast<float>(total_of(absmax, count) / static_cast<double>(count));
  *a.offset.as<float>() = offset;
  std::vector<float> midpoints;
  for (int64_t i = 1; i < a.map.numel(); ++i) midpoints.push_back(0.5f * (map[i - 1] + map[i]));
  for (int64_t first = 0; first < count; first += kNestedBlock) {
    const int64_t end = std::min(first + kNestedBlock, count);
    float largest = 0;
    for (int64_t i = first; i < end; ++i) largest = std::max(largest, std::abs(absmax[i] - offset));
    a.nested_absmax.as<float>()[first / kNestedBlock] = largest;
    const float inverse = inverse_of(largest);
    for (int64_t i = first; i < end; ++i) {
      const auto above = std::lower_bound(midpoints.begin(), midpoints.end(), (absmax[i] - offset) * inverse);
      a.codes.as<uint8_t>()[i] = static_cast<uint8_t>(above - midpoints.begin());
    }
  }
}

}  // namespace

void quantize_4bit(Device&, const Quantize4Bit& a) {
  parallel_for(a.absmax.numel(), kBlocksPerPiece, [&](int64_t begin, int64_t end) {
    const bool is_nf4 = a.format == Format4Bit::kNf4;
    if (a.x.dtype == DType::kF32) {
      is_nf4 ? quantize_blocks<Format4Bit::kNf4, float>(a, begin, end)
             : quantize_blocks<Format4Bit::kFp4, float>(a, begin, end);
    } else {
      is_nf4 ? quantize_blocks<Format4Bit::kNf4, BFloat16>(a, begin, end)
             : quantize_blocks<Format4Bit::kFp4, BFloat16>(a, begin, end);
    }
  });
}

void quantize_absmax(Device&, const QuantizeAbsmax& a) {
  const int64_t P = a.offset.numel();
  parallel_for(P, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const auto of_one = [&](const TensorView& t) { return t.rows(p * (t.numel() / P), t.numel() / P); };
      quantize_absmax_of_one({of_one(a.absmax), a.map, of_one(a.codes), of_one(a.nested_absmax), of_one(a.offset)});
    }
  });
}

void dequantize_4bit(Device&, const Dequantize4Bit& a) {
  const Values4Bit& values = values_of(a.format);
  const auto* codes = a.codes.as<uint8_t>();
  parallel_for(a.absmax.numel(), kBlocksPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const float scale = scale_of(a, block);
      const int64_t first = block * a.block_size, last = std::min(first + a.block_size, a.out.numel());
      for (int64_t i = first; i < last; ++i) {
        const float x = values[codes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15] * scale;
        if (a.out.dtype == DType::kF32) {
          a.out.as<float>()[i] = x;
        } else {
          a.out.as<BFloat16>()[i] = encode_bf16(x);
        }
      }
    }
  });
}

}  // namespace parka::cpu
