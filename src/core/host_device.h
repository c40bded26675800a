#pragma once

// Marks functions that CUDA kernels call too, so that CPU and GPU share one definition. They may use std::bit_cast:
// it is constexpr, and nvcc accepts that in device code with --expt-relaxed-constexpr.
#ifdef __CUDACC__
#define PARKA_HOST_DEVICE __host__ __device__
#else
#define PARKA_HOST_DEVICE
#endif
