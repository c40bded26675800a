#include "kernels/cuda/ptx/sm90.cuh"

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "kernels/cuda/ptx/sm90_float8.cuh"
#include "kernels/device/cuda/driver_function.h"

namespace parka::cuda {
namespace {

// A map of kRank dimensions, the first contiguous, whose boxes have rows of kBlockRowBytes.
template <int kRank>
CUtensorMap make_map(CUtensorMapDataType type, const void* x, const cuuint64_t (&size)[kRank],
                     const cuuint64_t (&stride_bytes)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  cuuint32_t step[kRank];
  std::fill(std::begin(step), std::end(step), 1);
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, kRank, const_cast<void*>(x), size, stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PARKA_REQUIRE(result == CUDA_SUCCESS);
  return map;
}

}  // namespace

CUtensorMap make_tile_map(const BFloat16* x, int64_t columns, int64_t S, int64_t B, int box_rows) {
  const auto width = static_cast<cuuint64_t>(columns), rows = static_cast<cuuint64_t>(S);
  return make_map<3>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x, {width, rows, static_cast<cuuint64_t>(B)},
                     {width * 2, width * rows * 2}, {kBlockColumns, static_cast<cuuint32_t>(box_rows), 1});
}

CUtensorMap make_code_map(const void* codes, int64_t rows, int64_t columns, int box_rows) {
  const auto width = static_cast<cuuint64_t>(columns);
  return make_map<2>(CU_TENSOR_MAP_DATA_TYPE_UINT8, codes, {width, static_cast<cuuint64_t>(rows)}, {width},
                     {kCodesDepth, static_cast<cuuint32_t>(box_rows)});
}

CUtensorMap make_number_map(const BFloat16* x, int64_t rows, int64_t columns, int box_rows) {
  const auto width = static_cast<cuuint64_t>(columns);
  return make_map<2>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x, {width, static_cast<cuuint64_t>(rows)}, {width * 2},
                     {kBlockColumns, static_cast<cuuint32_t>(box_rows)});
}

}  // namespace parka::cuda
