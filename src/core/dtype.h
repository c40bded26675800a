#pragma once
#include <cstdint>
#include <string_view>

#include "core/float16.h"
#include "core/number_formats.h"

namespace parka {

// Element types of tensors. Checkpoints and configs use the same names. No op computes in fp16 or with int64: they
// exist only to read and write the files of other programs.
enum class DType : uint8_t { kF32, kBF16, kE4M3, kE5M2, kI32, kU16, kU8, kI8, kF16, kI64 };

int64_t size_of(DType dtype);  // bytes per element
std::string_view name_of(DType dtype);

inline bool is_float8(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; }

// Limits of an FP8 dtype. Throws Error(kInternal) for any other dtype.
const Float8Traits& float8_traits(DType dtype);

// The DType of a C++ element type.
template <typename T>
inline constexpr DType dtype_of = [] {
  static_assert(sizeof(T) == 0, "no DType for this C++ type");
  return DType::kU8;
}();
template <>
inline constexpr DType dtype_of<float> = DType::kF32;
template <>
inline constexpr DType dtype_of<BFloat16> = DType::kBF16;
template <>
inline constexpr DType dtype_of<Float16> = DType::kF16;
template <>
inline constexpr DType dtype_of<Float8E4M3> = DType::kE4M3;
template <>
inline constexpr DType dtype_of<Float8E5M2> = DType::kE5M2;
template <>
inline constexpr DType dtype_of<int32_t> = DType::kI32;
template <>
inline constexpr DType dtype_of<uint16_t> = DType::kU16;
template <>
inline constexpr DType dtype_of<uint8_t> = DType::kU8;
template <>
inline constexpr DType dtype_of<int8_t> = DType::kI8;

}  // namespace parka
