#include "kernels/cuda/ptx/sm90.cuh"

#include "core/error.h"
#include "kernels/device/cuda/driver_function.h"

namespace parka::cuda {

CUtensorMap make_tile_map(const BFloat16* x, int64_t columns, int64_t S, int64_t B, int box_rows) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(S),
                              static_cast<cuuint64_t>(B)};
  const cuuint64_t stride_bytes[2] = {size[0] * 2, size[0] * size[1] * 2};
  const cuuint32_t box[3] = {kBlockColumns, static_cast<cuuint32_t>(box_rows), 1}, step[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<BFloat16*>(x), size,
                                 stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  PARKA_REQUIRE(result == CUDA_SUCCESS);
  return map;
}

}  // namespace parka::cuda
