#include "kernels/cpu/codec.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;
constexpr float kTinyAmax = 0x1p-100f;  // below it 1 / scale would leave fp32's range

struct PieceScale {
  float scale;    // stored; decoding multiplies by it
  float inverse;  // encoding multiplies by it
};

// The rule of ops/quantize/quantize.h for one piece with maximum magnitude amax.
PieceScale scale_for(float amax, DType format, DType scale_dtype) {
  if (amax < kTinyAmax) return {1.0f, 0.0f};
  float scale = amax / float8_traits(format).max;
  if (scale_dtype == DType::kBF16) scale = decode_bf16(encode_bf16_round_up(scale));
  return {scale, 1.0f / scale};
}

void encode_scaled(const float* x, int64_t count, float inverse, const TensorView& out, int64_t offset) {
  if (out.dtype == DType::kE4M3) {
    Float8E4M3* codes = out.as<Float8E4M3>() + offset;
    for (int64_t i = 0; i < count; ++i) codes[i] = encode_e4m3(x[i] * inverse);
  } else {
    Float8E5M2* codes = out.as<Float8E5M2>() + offset;
    for (int64_t i = 0; i < count; ++i) codes[i] = encode_e5m2(x[i] * inverse);
  }
}

float read_scale(const TensorView& scale, int64_t index) {
  return scale.dtype == DType::kBF16 ? decode_bf16(scale.as<BFloat16>()[index]) : scale.as<float>()[index];
}

void write_scale(const TensorView& scale, int64_t index, float value) {
  if (scale.dtype == DType::kBF16) {
    scale.as<BFloat16>()[index] = encode_bf16(value);  // exact: scale_for has rounded
  } else {
    scale.as<float>()[index] = value;
  }
}

void encode_tensor(const Matrix& x, const ScaledView& out, ScaleSource source) {
  float inverse;
  if (source == ScaleSource::kGiven) {
    inverse = 1.0f / out.scale.as<float>()[0];
  } else {
    const PieceScale piece = scale_for(max_abs(x), out.data.dtype, DType::kF32);
    out.scale.as<float>()[0] = piece.scale;
    inverse = piece.inverse;
  }
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    encode_scaled(x.row(begin), (end - begin) * x.cols(), inverse, out.data, begin * x.cols());
  });
}

// Scales the groups into `scaled` first and encodes the row in one go: a loop over 16 elements is too short.
void encode_groups_of_row(const float* x, int64_t cols, const ScaledView& out, int64_t r, float* scaled) {
  const int64_t groups = ceil_div(cols, out.group);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t c = g * out.group, count = std::min(out.group, cols - c);
    const PieceScale piece = scale_for(max_abs(x + c, count), out.data.dtype, out.scale.dtype);
    write_scale(out.scale, r * groups + g, piece.scale);
    for (int64_t i = 0; i < count; ++i) scaled[c + i] = x[c + i] * piece.inverse;
  }
  encode_elements(scaled, r * cols, cols, out.data);
}

void encode_groups(const Matrix& x, const ScaledView& out) {
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> scaled(static_cast<size_t>(x.cols()));
    for (int64_t r = begin; r < end; ++r) encode_groups_of_row(x.row(r), x.cols(), out, r, scaled.data());
  });
}

void encode_blocks(const Matrix& x, const ScaledView& out) {
  const int64_t blocks = ceil_div(x.cols(), out.group);
  parallel_for(ceil_div(x.rows(), out.group), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row_begin = b * out.group, row_end = std::min(row_begin + out.group, x.rows());
      for (int64_t g = 0; g < blocks; ++g) {
        const int64_t c = g * out.group, count = std::min(out.group, x.cols() - c);
        float amax = 0;
        for (int64_t r = row_begin; r < row_end; ++r) amax = std::max(amax, max_abs(x.row(r) + c, count));
        const PieceScale piece = scale_for(amax, out.data.dtype, out.scale.dtype);
        write_scale(out.scale, b * blocks + g, piece.scale);
        for (int64_t r = row_begin; r < row_end; ++r) {
          encode_scaled(x.row(r) + c, count, piece.inverse, out.data, r * x.cols() + c);
        }
      }
    }
  });
}

constexpr int64_t kTransposeTile = 32;  // so that both sides stay in the first-level cache

// y [C, R] = x [R, C] transposed, rows [begin, end) of x. A function with its own copies of all sizes and pointers:
// a store to bytes could change anything that a lambda refers to, so there the compiler would read them all anew.
template <typename T>
void transpose_rows(const T* x, int64_t rows, int64_t cols, T* y, int64_t begin, int64_t end) {
  for (int64_t r_begin = begin; r_begin < end; r_begin += kTransposeTile) {
    const int64_t r_end = std::min(r_begin + kTransposeTile, end);
    for (int64_t c_begin = 0; c_begin < cols; c_begin += kTransposeTile) {
      const int64_t c_end = std::min(c_begin + kTransposeTile, cols);
      for (int64_t c = c_begin; c < c_end; ++c) {
        for (int64_t r = r_begin; r < r_end; ++r) y[c * rows + r] = x[r * cols + c];
      }
    }
  }
}

template <typename T>
void transpose(const T* x, int64_t rows, int64_t cols, T* y) {
  parallel_for(rows, 4 * kTransposeTile,
               [&](int64_t begin, int64_t end) { transpose_rows(x, rows, cols, y, begin, end); });
}

}  // namespace

void decode_elements(const TensorView& x, int64_t offset, int64_t count, float* out) {
  switch (x.dtype) {
    case DType::kF32: std::memcpy(out, x.as<float>() + offset, static_cast<size_t>(count) * sizeof(float)); return;
    case DType::kBF16: {
      const BFloat16* values = x.as<BFloat16>() + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = decode_bf16(values[i]);
      return;
    }
    case DType::kE4M3: {
      const Float8E4M3* codes = x.as<Float8E4M3>() + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = decode_e4m3(codes[i]);
      return;
    }
    case DType::kE5M2: {
      const Float8E5M2* codes = x.as<Float8E5M2>() + offset;
      for (int64_t i = 0; i < count; ++i) out[i] = decode_e5m2(codes[i]);
      return;
    }
    default: throw_internal("cannot decode {}", describe(x));
  }
}

void encode_elements(const float* values, int64_t offset, int64_t count, const TensorView& out) {
  switch (out.dtype) {
    case DType::kF32:
      std::memcpy(out.as<float>() + offset, values, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBF16: {
      BFloat16* target = out.as<BFloat16>() + offset;
      for (int64_t i = 0; i < count; ++i) target[i] = encode_bf16(values[i]);
      return;
    }
    case DType::kE4M3:
    case DType::kE5M2: encode_scaled(values, count, 1.0f, out, offset); return;
    default: throw_internal("cannot encode {}", describe(out));
  }
}

Matrix decode_codes(const TensorView& x) { return decode(ScaledView(x)); }

void decode_rows(const ScaledView& x, int64_t begin, int64_t count, float* out) {
  const int64_t cols = x.data.rank >= 2 ? x.num_cols() : x.data.numel();
  decode_elements(x.data, begin * cols, count * cols, out);
  if (x.scaling == Scaling::kNone) return;
  const int64_t group = x.scaling == Scaling::kTensor ? std::max<int64_t>(cols, 1) : x.group;
  const int64_t groups = ceil_div(cols, group);
  for (int64_t r = begin; r < begin + count; ++r, out += cols) {
    const int64_t scale_row = x.scaling == Scaling::kTensor ? 0 : x.scaling == Scaling::kGroup ? r : r / group;
    for (int64_t g = 0; g < groups; ++g) {
      const float scale = read_scale(x.scale, scale_row * groups + g);
      const int64_t c_begin = g * group, c_end = std::min(c_begin + group, cols);
      for (int64_t c = c_begin; c < c_end; ++c) out[c] *= scale;
    }
  }
}

Matrix decode(const ScaledView& x) {
  const int64_t rows = x.data.rank >= 2 ? x.num_rows() : 1;
  Matrix values(rows, rows == 0 ? 0 : x.data.numel() / rows);
  parallel_for(rows, kRowGrain,
               [&](int64_t begin, int64_t end) { decode_rows(x, begin, end - begin, values.row(begin)); });
  return values;
}

// NaN is skipped here; it stays visible because its code is NaN. Magnitudes are compared as signed integers:
// compilers vectorise that reduction, but not the ones over floats or unsigned integers.
float max_abs(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
    const int32_t counted = magnitude > 0x7f800000 ? 0 : magnitude;
    largest = std::max(largest, counted);
  }
  return std::bit_cast<float>(largest);
}

float max_abs(const Matrix& x) {
  std::vector<float> row_max(static_cast<size_t>(x.rows()));
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) row_max[r] = max_abs(x.row(r), x.cols());
  });
  return row_max.empty() ? 0.0f : *std::max_element(row_max.begin(), row_max.end());
}

float tensor_scale(float amax, DType format) { return scale_for(amax, format, DType::kF32).scale; }

Matrix transposed(const Matrix& x) {
  Matrix y(x.cols(), x.rows());
  transpose(x.data(), x.rows(), x.cols(), y.data());
  return y;
}

void transpose_codes(const TensorView& x, const TensorView& x_t) {
  PARKA_REQUIRE(size_of(x.dtype) == 1 && x.dtype == x_t.dtype && x.numel() == x_t.numel());
  transpose(static_cast<const uint8_t*>(x.data), x.dim[0], x.dim[1], static_cast<uint8_t*>(x_t.data));
}

void round_to(DType dtype, Matrix& x) {
  if (dtype == DType::kF32) return;
  PARKA_REQUIRE(dtype == DType::kBF16);
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    float* values = x.row(begin);
    for (int64_t i = 0; i < (end - begin) * x.cols(); ++i) values[i] = decode_bf16(encode_bf16(values[i]));
  });
}

void encode(const Matrix& x, const ScaledView& out, ScaleSource source) {
  if (out.empty()) return;
  PARKA_REQUIRE(out.data.numel() == x.rows() * x.cols());
  switch (out.scaling) {
    case Scaling::kNone:
      parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
        encode_elements(x.row(begin), begin * x.cols(), (end - begin) * x.cols(), out.data);
      });
      return;
    case Scaling::kTensor: encode_tensor(x, out, source); return;
    case Scaling::kGroup: encode_groups(x, out); return;
    case Scaling::kBlock: encode_blocks(x, out); return;
  }
}

void encode_row(const float* values, int64_t r, const ScaledView& out) {
  const int64_t cols = out.num_cols();
  if (out.scaling == Scaling::kNone) {
    encode_elements(values, r * cols, cols, out.data);
    return;
  }
  PARKA_REQUIRE(out.scaling == Scaling::kGroup);
  std::vector<float> scaled(static_cast<size_t>(cols));
  encode_groups_of_row(values, cols, out, r, scaled.data());
}

void encode_with_transpose(const Matrix& x, const ScaledView& out, const ScaledView& out_t, ScaleSource source) {
  encode(x, out, source);
  if (out_t.empty()) return;
  if (out_t.scaling != Scaling::kTensor) {
    encode(transposed(x), out_t, source);
    return;
  }
  // With one scale both orders have the same codes, and codes are fewer bytes to transpose than values.
  if (!out.empty() && out.scaling == Scaling::kTensor) {
    transpose_codes(out.data, out_t.data);
    return;
  }
  const auto memory = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(x.rows() * x.cols()));
  const TensorView codes(memory.get(), out_t.data.dtype, {x.rows(), x.cols()});
  encode(x, ScaledView(codes, out_t.scale, Scaling::kTensor), source);
  transpose_codes(codes, out_t.data);
}

}  // namespace parka::cpu
