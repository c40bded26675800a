#pragma once
#include <cstdint>

// PTX that CUDA C++ has no name for: tensor-core products of bf16 (mma), asynchronous copies to shared memory
// (cp.async), named barriers, and the base-2 exponential in one instruction. For compute capability 8.0 and later.
namespace parka::cuda {

// The address of shared memory as PTX takes it.
__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Starts a copy of 16 bytes, both ends aligned to 16. Where `valid` is false nothing is read and zeros are written.
__device__ inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// The same for 8 bytes.
__device__ inline void cp_async_8(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// The same for 4 bytes.
__device__ inline void cp_async_4(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Ends a group of the copies that this thread started.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most the latest kPending of this thread's groups are still in flight.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// The named barriers of a block (0 is __syncthreads): `threads` threads, in whole warps, wait or arrive.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lanes 8i to 8i + 7 give the addresses of the rows of matrix i, 16 bytes
// each; lane l gets, in x[i], elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i.
__device__ inline void ldmatrix_x4(uint32_t (&x)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// The same with each matrix transposed: lane l gets elements l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void ldmatrix_x4_trans(uint32_t (&x)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// Transposes one such matrix, of which lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4.
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(x));
  return transposed;
}

// c += a b for a [16, 16] and b [16, 8] of bf16 and c [16, 8] of fp32. Lane l holds, g = l / 4, t = 2 (l % 4):
//   c: row g, columns t and t + 1; row g + 8, the same columns
//   a: row g, columns t and t + 1; row g + 8, the same; row g, columns t + 8 and t + 9; row g + 8, the same
//   b0: rows t and t + 1 of column g; b1: rows t + 8 and t + 9 of it
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to bf16, the first in the low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x to within 2 units of the last place; 0 for results below 2^-126, and for -inf.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// blockIdx.x and threadIdx.x, read again by each call, so that what derives from them needs no registers.
__device__ inline unsigned read_block_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(index));
  return index;
}
__device__ inline unsigned read_thread_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

}  // namespace parka::cuda
