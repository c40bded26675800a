#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx/sm90.cuh"

// PTX of compute capability 9.0 for products of large matrices of FP8, or bf16: wgmma of 128 or 256 columns, and
// bulk copies. A row of a tile is 128 codes or 64 numbers in 128 bytes, in the layout of sm90.cuh's blocks.
namespace parka::cuda {

constexpr int kCodesDepth = 128;  // codes of a row of a tile: terms of sums
constexpr int kCodesStep = 32;    // of them multiplied by one instruction

// Rows of a [rows, columns] matrix of codes, in boxes of `box_rows` rows and kCodesDepth columns. Copies fill what
// is outside of it with zeros. Its address and columns are multiples of 16.
CUtensorMap make_code_map(const void* codes, int64_t rows, int64_t columns, int box_rows);
// The same of numbers, kBlockColumns of a row.
CUtensorMap make_number_map(const BFloat16* x, int64_t rows, int64_t columns, int box_rows);

#if PARKA_SM90_CODE

// The same copy as copy_box_to_blocks_async() makes, to this block alone.
__device__ inline void copy_codes_async(uint32_t target, const CUtensorMap& map, int column, int row,
                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];\n" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Copies of boxes the other way around, from shared memory. Before one starts, each thread that wrote there calls
// fence_before_copies(), and then the threads synchronize. wait_copies_out() returns once what this thread has
// started was read, but for its last kPending groups.
__device__ inline void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
__device__ inline void copy_box_out_async(const CUtensorMap& map, int column, int row, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(&map),
               "r"(column), "r"(row), "r"(source)
               : "memory");
}
__device__ inline void commit_copies_out() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies_out() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

#define PARKA_C4(kind, n) kind(c[0][n][0]), kind(c[0][n][1]), kind(c[0][n][2]), kind(c[0][n][3])
#define PARKA_C16(kind, n) PARKA_C4(kind, n), PARKA_C4(kind, n + 1), PARKA_C4(kind, n + 2), PARKA_C4(kind, n + 3)
#define PARKA_C64(kind, n) \
  PARKA_C16(kind, n), PARKA_C16(kind, n + 4), PARKA_C16(kind, n + 8), PARKA_C16(kind, n + 12)
#define PARKA_R64                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PARKA_R128                                                                               \
  PARKA_R64                                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PARKA_WGMMA_128(types, majors)                                                                            \
  asm volatile(                                                                                                   \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"                                              \
      "wgmma.mma_async.sync.aligned.m64n128" types " {" PARKA_R64 "}, %64, %65, accumulate, 1, 1" majors ";\n}\n" \
      : PARKA_C64("+f", 0)                                                                                        \
      : "l"(a), "l"(b), "r"(int{accumulate}))
// `rest`: the factors of A and B, which products of integers do not have, and majors.
#define PARKA_WGMMA_256(kind, types, rest)                                                                   \
  asm volatile(                                                                                              \
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"                                        \
      "wgmma.mma_async.sync.aligned.m64n256" types " {" PARKA_R128 "}, %128, %129, accumulate" rest ";\n}\n" \
      : PARKA_C64(kind, 0), PARKA_C64(kind, 16)                                                              \
      : "l"(a), "l"(b), "r"(int{accumulate}))

// The numbers that products of T are summed in.
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;

// c = A B^T, or with `accumulate` c += A B^T, for 64 rows of A and 8 kN of B, 128 or 256. A has elements of T, and
// B of E4M3 where those are codes of FP8, or of INT8 where A has. kSummedA, kSummedB: rows of the tile are summed
// over (operand_descriptor). The tensor cores' accumulator keeps about 14 bits of a sum of codes (ops/gemm/gemm.h).
template <typename T, bool kSummedA, bool kSummedB, int kN>
__device__ inline void wgmma_wide_step(SumOf<T> (&c)[1][kN][4], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kBF16 = std::is_same_v<T, BFloat16>, kE4M3 = std::is_same_v<T, Float8E4M3>, kWide = kN == 32;
  static_assert((kN == 16 || kN == 32) && (kBF16 || !(kSummedA || kSummedB)));
  if constexpr (std::is_same_v<T, int8_t>) {
    static_assert(kWide);
    PARKA_WGMMA_256("+r", "k32.s32.s8.s8", "");
  } else if constexpr (kWide && kE4M3) {
    PARKA_WGMMA_256("+f", "k32.f32.e4m3.e4m3", ", 1, 1");
  } else if constexpr (kWide && !kBF16) {
    PARKA_WGMMA_256("+f", "k32.f32.e5m2.e4m3", ", 1, 1");
  } else if constexpr (kE4M3) {
    PARKA_WGMMA_128("k32.f32.e4m3.e4m3", "");
  } else if constexpr (!kBF16) {
    PARKA_WGMMA_128("k32.f32.e5m2.e4m3", "");
  } else if constexpr (kWide && !kSummedA && !kSummedB) {
    PARKA_WGMMA_256("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0");
  } else if constexpr (kWide && !kSummedA) {
    PARKA_WGMMA_256("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 1");
  } else {
    static_assert(!kWide && kSummedA && kSummedB);
    PARKA_WGMMA_128("k16.f32.bf16.bf16", ", 1, 1");
  }
}

#undef PARKA_C4
#undef PARKA_C16
#undef PARKA_C64
#undef PARKA_R64
#undef PARKA_R128
#undef PARKA_WGMMA_128
#undef PARKA_WGMMA_256

// Starts that for a step of the summed axis: kCodesDepth bytes of rows, or 64 rows in blocks of as many.
template <typename T, bool kSummedA = false, bool kSummedB = false, int kN>
__device__ inline void start_wide_product(SumOf<T> (&c)[1][kN][4], uint32_t a_tile, uint32_t b_tile,
                                          bool accumulate) {
  constexpr uint32_t kBlockBytes = kBlockColumns * kBlockRowBytes, kSummedStep = 16 * kBlockRowBytes;
  const uint64_t a = operand_descriptor<kSummedA>(a_tile, kBlockBytes);
  const uint64_t b = operand_descriptor<kSummedB>(b_tile, kBlockBytes);
#pragma unroll
  for (int k = 0; k < kCodesDepth / kCodesStep; ++k) {
    wgmma_wide_step<T, kSummedA, kSummedB>(c, a + k * (kSummedA ? kSummedStep : kCodesStep) / 16,
                                           b + k * (kSummedB ? kSummedStep : kCodesStep) / 16, accumulate || k > 0);
  }
}

// The other way around from ldmatrix_x4(): lane l has, in x[i], elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4
// of matrix i, and lanes 8i to 8i + 7 give the addresses of its rows.
__device__ inline void stmatrix_x4(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda
