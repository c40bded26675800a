#include "core/error.h"
#include "kernels/device/device.h"
#include "kernels/device/gemm_tuning.h"

// The answers about GPUs of a program that was built without CUDA.
namespace parka {

int num_cuda_devices() { return 0; }
std::vector<std::string> describe_cuda_devices() { return {}; }
std::string cuda_version() { return {}; }
std::string cuda_architectures() { return {}; }

std::unique_ptr<Device> make_cuda_device(int) {
  throw_bad_input(
      "this parka was built without CUDA: install the CUDA toolkit and build again, or run on the CPU with "
      "device.kind=cpu");
}

std::string gemm_library_version() { return {}; }
void choose_gemm_algorithms(Device&, const std::vector<GemmChoice>&) { PARKA_REQUIRE(!"built with CUDA"); }
void replace_gemm_algorithms(Device&, const std::vector<GemmChoice>&) { PARKA_REQUIRE(!"built with CUDA"); }
std::vector<GemmChoice> tune_gemms(Device&, const GemmTuneOptions&) {
  throw_internal("tune_gemms: built without CUDA");
}

}  // namespace parka
