#pragma once
#include <span>

#include "core/dtype.h"
#include "engine/files/file_io.h"

// Converts weights in files to and from fp32 values, for all formats without scales.
namespace parka {

inline bool is_plain_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Exact. `bytes` holds values.size() elements of a plain float dtype, at any alignment.
void decode_floats(DType dtype, ByteSpan bytes, std::span<float> values);
// Rounds to nearest, ties to even.
void encode_floats(std::span<const float> values, DType dtype, std::span<std::byte> bytes);

bool all_finite(std::span<const float> values);
// The same for elements of any dtype, at any alignment; always true for integers. Uses all threads of
// parallel_for.
bool all_finite(DType dtype, ByteSpan bytes);
// The same on this thread alone.
bool piece_is_finite(DType dtype, ByteSpan bytes);

}  // namespace parka
