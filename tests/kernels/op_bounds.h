#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/op_checks.h"

// Inputs, rounding bounds and checks of the ops around the GEMMs: rope, attention, embedding, loss, gradient norm.
namespace parka::test {

// Largest relative error of rounding to the nearest value of the format, subnormals aside.
inline double unit_roundoff(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : 0x1p-24; }

// Standard normals times `scale`, as values that the format holds exactly.
inline std::vector<float> random_values(DType dtype, int64_t count, uint64_t seed, float scale = 1.0f) {
  return dtype == DType::kBF16 ? random_bf16(count, seed, scale) : random_normal(count, seed, scale);
}

// The message of the Error(kBadInput) that `call` throws; empty if it throws none.
template <typename Call>
std::string bad_input_error(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ExitCode::kBadInput ? error.what() : "";
  }
  return "";
}

// Whether `op`, which returns the bytes it made, makes the same ones on all threads and on one.
template <typename Op>
bool same_on_one_thread(const Op& op) {
  const std::vector<std::byte> many = op();
  set_num_threads(1);
  const std::vector<std::byte> one = op();
  set_num_threads(0);
  return many == one && !many.empty();
}

}  // namespace parka::test
