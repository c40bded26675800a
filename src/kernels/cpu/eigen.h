#pragma once
// Eigen, as the CPU kernels use it. Work is spread over threads by parallel_for, so Eigen must not start its own.
#define EIGEN_DONT_PARALLELIZE
#pragma GCC diagnostic push
// GCC 12 takes its own AVX-512 intrinsics for uses of uninitialised variables (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <Eigen/Core>
#pragma GCC diagnostic pop
