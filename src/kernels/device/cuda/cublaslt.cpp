#include "kernels/device/cuda/cublaslt.h"

#include <dlfcn.h>

#include "core/error.h"

namespace parka::cuda {
namespace {

// By its name, as any library is found, or where it was when this was built.
void* load() {
  constexpr const char* kName = PARKA_CUBLASLT_NAME;
  constexpr const char* kPath = PARKA_CUBLASLT_FOLDER "/" PARKA_CUBLASLT_NAME;
  void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen(kPath, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw_bad_input("a GPU needs cuBLAS, version {}: {}; install it", CUBLAS_VER_MAJOR, dlerror());
  return library;
}

}  // namespace

void* cublaslt_function(const char* name) {
  static void* const library = load();
  void* const function = dlsym(library, name);
  if (function == nullptr)
    throw_bad_input("{} has no {}: install that of the CUDA that parka was built with", PARKA_CUBLASLT_NAME, name);
  return function;
}

}  // namespace parka::cuda
