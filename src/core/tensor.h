#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/dtype.h"
#include "core/error.h"

namespace parka {

// A dense row-major tensor in memory owned by somebody else (an Arena, a test). Cheap to copy.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> dim{};

  TensorView() = default;
  TensorView(void* data_, DType dtype_, std::initializer_list<int64_t> shape);

  bool empty() const { return data == nullptr; }  // an optional tensor that was not given
  int64_t numel() const;
  int64_t bytes() const { return numel() * size_of(dtype); }

  // The elements, typed. Throws Error(kInternal) when T is not the tensor's dtype.
  template <typename T>
  T* as() const {
    if (dtype_of<T> != dtype) throw_wrong_dtype(dtype_of<T>);
    return static_cast<T*>(data);
  }

  [[noreturn]] void throw_wrong_dtype(DType read_as) const;

  // Rows [begin, begin + count) of the first dimension; same memory.
  TensorView rows(int64_t begin, int64_t count) const;
  // The same memory under another shape with the same number of elements.
  TensorView reshaped(std::initializer_list<int64_t> shape) const;
};

std::string describe(const TensorView& t);  // "bf16 [4, 128]", for messages

// How the codes of a quantized matrix map to values: value = code * scale.
enum class Scaling : uint8_t {
  kNone,    // not quantized: fp32 or bf16 elements, no scale
  kTensor,  // one fp32 scale for the whole matrix
  kGroup,   // one scale per 1 x group elements of a row; the last group of a row may be short
  kBlock,   // one fp32 scale per group x group tile; edge tiles may be short
};

// A matrix [R, C] with its scales: the type of activations, weights and gradients in every number format. Ops read
// and write it, and its format decides what they compute. So the model is written once for all formats.
//   scaling kTensor: scale is fp32 [1]
//   scaling kGroup:  scale is bf16 or fp32 [R, ceil(C / group)]
//   scaling kBlock:  scale is fp32 [ceil(R / group), ceil(C / group)]
// Scales are 16-byte aligned, as cuBLASLt requires.
struct ScaledView {
  TensorView data;
  TensorView scale;
  Scaling scaling = Scaling::kNone;
  int64_t group = 0;

  ScaledView() = default;
  ScaledView(const TensorView& plain) : data(plain) {}  // implicit: an unquantized tensor is a ScaledView
  ScaledView(const TensorView& data_, const TensorView& scale_, Scaling scaling_, int64_t group_ = 0)
      : data(data_), scale(scale_), scaling(scaling_), group(group_) {}

  bool empty() const { return data.empty(); }
  int64_t num_rows() const { return data.dim[0]; }
  int64_t num_cols() const { return data.dim[1]; }
};

std::string describe(const ScaledView& t);  // "e4m3 [4, 128], bf16 scale per 1x16"

// Rows and columns of the scales that go with [rows, cols] codes: {1, 1} for kTensor, {0, 0} for kNone.
std::array<int64_t, 2> scale_shape(Scaling scaling, int64_t group, int64_t rows, int64_t cols);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace parka
