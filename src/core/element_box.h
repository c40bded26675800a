#pragma once
#include <algorithm>
#include <cstdint>

namespace parka {

// Elements [begin, end) of a tensor in row-major order; rows or columns [begin, end) of a matrix.
struct ElementRange {
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

// The part of a tensor that a rank has or a file holds: a box [rows, columns] of the tensor as a matrix whose rows
// are `row_length` long. ZeRO divides a tensor flat, wherever a row ends: its parts are boxes of the matrix with
// one row. A split of columns is a box of the matrix [rows, cols].
struct ElementBox {
  ElementRange rows, columns;
  int64_t row_length = 0;

  // Elements [begin, end) of a tensor of `numel` elements.
  static ElementBox flat(ElementRange elements, int64_t numel) { return {{0, 1}, elements, numel}; }

  int64_t numel() const { return rows.size() * columns.size(); }
  // True if it is a part of a tensor of `tensor_numel` elements.
  bool lies_in(int64_t tensor_numel) const {
    const bool in_rows = 0 <= columns.begin && columns.begin <= columns.end && columns.end <= row_length;
    if (!in_rows || rows.begin < 0 || rows.begin > rows.end) return false;
    return row_length == 0
               ? tensor_numel == 0
               : tensor_numel % row_length == 0 && rows.end <= std::max<int64_t>(1, tensor_numel / row_length);
  }

  // The elements of the box, row by row, are `num_runs` runs of consecutive elements of the tensor.
  bool is_one_run() const { return numel() == 0 || rows.size() == 1 || columns.size() == row_length; }
  int64_t num_runs() const { return is_one_run() ? 1 : rows.size(); }
  ElementRange run(int64_t index) const {
    const int64_t begin = (rows.begin + index) * row_length + columns.begin;
    return {begin, begin + (is_one_run() ? numel() : columns.size())};
  }
  // The place in the box, row by row, of the tensor's element `element`.
  int64_t place_of(int64_t element) const {
    if (is_one_run()) return element - run(0).begin;
    return (element / row_length - rows.begin) * columns.size() + element % row_length - columns.begin;
  }

  bool operator==(const ElementBox&) const = default;
};

}  // namespace parka
