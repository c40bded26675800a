#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

// What the tests of FP8 on another device than the CPU have in common: the same bits on two devices, and messages
// that name the first element that differs.
namespace parka::test {

// The devices that are not the reference.
inline std::vector<Device*> other_devices() {
  const std::vector<Device*> all = devices();
  return {all.begin() + 1, all.end()};
}

struct MatrixShape {
  int64_t rows, cols;
  int64_t numel() const { return rows * cols; }
};
inline std::ostream& operator<<(std::ostream& out, const MatrixShape& s) {
  return out << s.rows << " x " << s.cols;
}

inline Format plain_format(DType dtype) { return {dtype, Scaling::kNone, 0, DType::kF32}; }

// How the message of a failed check calls bytes: by element, as hexadecimal digits, most significant first.
inline std::string hexadecimal(const std::byte* bytes, int64_t count) {
  std::string text = "0x";
  for (int64_t i = count - 1; i >= 0; --i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned>(bytes[i]));
    text += digits;
  }
  return text;
}

// Where two tensors of one shape first differ, in words; empty if their bits are equal. Two NaNs are equal in fp32,
// where arithmetic may give one or another; every other format has one NaN.
inline std::string first_difference(const std::string& name, const TestTensor& got, const TestTensor& want) {
  const std::vector<std::byte> a = got.bytes(), b = want.bytes();
  const DType dtype = want.view().dtype;
  if (got.view().dtype != dtype || a.size() != b.size()) return name + " has another format or size";
  if (a == b) return "";
  const int64_t size = size_of(dtype), cols = want.view().rank == 2 ? want.view().dim[1] : want.view().numel();
  const bool is_fp32 = dtype == DType::kF32;
  const std::vector<float> x = is_fp32 ? got.host() : std::vector<float>(), y = is_fp32 ? want.host() : x;
  int64_t first = -1, count = 0;
  for (int64_t i = 0; i < want.view().numel(); ++i) {
    if (std::equal(&a[i * size], &a[i * size] + size, &b[i * size])) continue;
    if (is_fp32 && std::isnan(x[i]) && std::isnan(y[i])) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return "";
  return name + " " + describe(want.view()) + ": " + std::to_string(count) + " differ, first row " +
         std::to_string(first / cols) + " column " + std::to_string(first % cols) + ", " +
         hexadecimal(&a[first * size], size) + " for " + hexadecimal(&b[first * size], size);
}

// The same of codes and scales, and of the memory around `got`.
inline std::string first_difference(const std::string& name, const TestMatrix& got, const TestMatrix& want) {
  if (!got.guard_intact()) return name + ": written outside";
  if (!got.scale != !want.scale) return name + " has another scaling";
  // Scales first: where one is wrong so are codes.
  const std::string scales = got.scale ? first_difference("scale of " + name, *got.scale, *want.scale) : "";
  return scales.empty() ? first_difference(name, got.data, want.data) : scales;
}

inline void copy_bits(const TestTensor& from, Device& device, const TestTensor& to) {
  upload(device, to.view(), from.bytes());
}

// A matrix with the bits of another on a device.
inline std::unique_ptr<TestMatrix> copy_on(Device& device, const TestMatrix& m) {
  const ScaledView view = m.view();
  const Format format{view.data.dtype, view.scaling, view.group, m.scale ? view.scale.dtype : DType::kF32};
  std::unique_ptr<TestMatrix> copy(new TestMatrix(format.make(device, view.num_rows(), view.num_cols())));
  copy_bits(m.data, device, copy->data);
  if (m.scale) copy_bits(*m.scale, device, *copy->scale);
  return copy;
}

// Which copies of a matrix an op is asked for.
enum class Copies { kRow, kTransposed, kBoth };
inline constexpr Copies kAllCopies[] = {Copies::kRow, Copies::kTransposed, Copies::kBoth};
inline std::ostream& operator<<(std::ostream& out, Copies copies) {
  return out << (copies == Copies::kRow          ? "row-major"
                 : copies == Copies::kTransposed ? "transposed"
                                                 : "both copies");
}

// The output of an op in one format: a matrix, its transpose, or both, which then share a kTensor scale.
struct Output {
  Output(Device& device, const Format& format_, int64_t rows, int64_t cols, Copies copies_)
      : format(format_),
        copies(copies_),
        matrix(format_.make(device, rows, cols)),
        matrix_t(format_.make(device, cols, rows)) {}

  bool shares_scale() const { return copies == Copies::kBoth && format.scaling == Scaling::kTensor; }
  ScaledView row() const { return copies == Copies::kTransposed ? ScaledView() : matrix.view(); }
  ScaledView transposed() const {
    if (copies == Copies::kRow) return {};
    ScaledView view = matrix_t;
    if (shares_scale()) view.scale = matrix.scale->view();
    return view;
  }
  const TestTensor& tensor_scale() const { return copies == Copies::kTransposed ? *matrix_t.scale : *matrix.scale; }
  // Sets the scale that is an input where the other op has computed it. For kTensor scaling only.
  void set_scale(Device& device, const TestTensor& scale) const { copy_bits(scale, device, tensor_scale()); }

  Format format;
  Copies copies;
  TestMatrix matrix, matrix_t;
};

// Nothing that was not asked for may change either: both sides start out poisoned.
inline std::string first_difference(const std::string& name, const Output& got, const Output& want) {
  const std::string row = first_difference(name, got.matrix, want.matrix);
  return row.empty() ? first_difference(name + " transposed", got.matrix_t, want.matrix_t) : row;
}

// Whether `got` is what the CPU makes of `values`, which are on any device; with `amax`, on the CPU, for their
// maximum.
inline std::string unlike_quantized(const std::string& name, const Output& got, const TestTensor& values,
                                    const TensorView& amax = {}) {
  const int64_t rows = got.matrix.data.view().dim[0], cols = got.matrix.data.view().dim[1];
  const TestTensor x(cpu_device(), values.view().dtype, {rows, cols});
  copy_bits(values, cpu_device(), x);
  const Output want(cpu_device(), got.format, rows, cols, got.copies);
  quantize(cpu_device(), {.x = x, .out = want.row(), .out_t = want.transposed(), .amax = amax});
  return first_difference(name, got, want);
}

// 1e-5 of the largest magnitude of each row: what fp32 sums in another order may make of it.
inline std::vector<double> row_slack(const std::vector<float>& x, int64_t rows) {
  const size_t cols = x.size() / static_cast<size_t>(rows);
  std::vector<double> slack(static_cast<size_t>(rows));
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isfinite(x[i])) slack[i / cols] = std::max(slack[i / cols], 1e-5 * std::abs(double{x[i]}));
  }
  return slack;
}

// The first element further from `want` than its row's slack and, in bf16, one place. NaNs are to be in the same
// places. Empty if there is none.
inline std::string first_far(const std::string& name, const TestTensor& got, const TestTensor& want,
                             const std::vector<double>& slack) {
  const std::vector<float> x = got.host(), y = want.host();
  if (x.size() != y.size() || y.size() % slack.size() != 0) return name + " has another size";
  if (!got.guard_intact()) return name + ": written outside";
  const size_t cols = y.size() / slack.size();
  const double place = want.view().dtype == DType::kBF16 ? 0x1p-7 : 0.0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double magnitude = std::max(std::abs(double{x[i]}), std::abs(double{y[i]}));
    const bool is_near = std::abs(double{x[i]} - y[i]) <= slack[i / cols] + place * magnitude;
    if (is_near || x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
    return name + " " + describe(want.view()) + ": row " + std::to_string(i / cols) + " column " +
           std::to_string(i % cols) + " is " + std::to_string(x[i]) + ", not " + std::to_string(y[i]);
  }
  return "";
}

}  // namespace parka::test
