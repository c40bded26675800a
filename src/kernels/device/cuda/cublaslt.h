#pragma once
#include <cublasLt.h>

namespace parka::cuda {

// The address of a function of cuBLASLt, which is loaded for the first of them: without it a program on the CPU
// starts in a tenth of the time. Throws Error(kBadInput) if the library is not there.
void* cublaslt_function(const char* name);

}  // namespace parka::cuda

// To be called as the function is: PARKA_CUBLASLT(cublasLtCreate)(&handle).
#define PARKA_CUBLASLT(name)                                                                                    \
  ([] {                                                                                                         \
    static auto* const function = reinterpret_cast<decltype(&(name))>(::parka::cuda::cublaslt_function(#name)); \
    return function;                                                                                            \
  }())
