// Holds core/number_formats.h against CUDA's own conversions: on the host those of cuda_fp8.h and cuda_bf16.h over
// a dense set of floats, on a GPU the hardware's over every one of the 2^32 floats. Exit status 0: all equal (the
// device part is skipped, and says so, where there is no GPU); 1: a mismatch, the first of each kind is printed.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "core/number_formats.h"

namespace {

using parka::BFloat16;
using parka::Float8E4M3;
using parka::Float8E5M2;

// The conversions compared. Inputs and outputs are bit patterns.
enum class Conversion : int { kEncodeBf16, kEncodeE4M3, kEncodeE5M2, kDecodeE4M3, kDecodeE5M2, kDecodeBf16 };
constexpr int kNumConversions = 6;
constexpr const char* kNames[kNumConversions] = {"float -> bf16", "float -> e4m3", "float -> e5m2",
                                                 "e4m3 -> float", "e5m2 -> float", "bf16 -> float"};

struct Results {
  uint32_t parka, cuda;
};

// A NaN's payload is not compared: CUDA decodes to half precision first.
__host__ __device__ uint32_t without_payload(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

__host__ __device__ float cuda_decode_fp8(uint8_t code, __nv_fp8_interpretation_t format) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, format)));
}

template <Conversion kConversion>
__host__ __device__ Results convert(uint32_t input) {
  const float x = std::bit_cast<float>(input);
  if constexpr (kConversion == Conversion::kEncodeBf16) {
    return {parka::encode_bf16(x).bits, __nv_bfloat16_raw(__float2bfloat16_rn(x)).x};
  } else if constexpr (kConversion == Conversion::kEncodeE4M3) {
    return {parka::encode_e4m3(x).bits, __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  } else if constexpr (kConversion == Conversion::kEncodeE5M2) {
    return {parka::encode_e5m2(x).bits, __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
  } else if constexpr (kConversion == Conversion::kDecodeE4M3) {
    const auto code = static_cast<uint8_t>(input);
    return {without_payload(parka::decode_e4m3({code})), without_payload(cuda_decode_fp8(code, __NV_E4M3))};
  } else if constexpr (kConversion == Conversion::kDecodeE5M2) {
    const auto code = static_cast<uint8_t>(input);
    return {without_payload(parka::decode_e5m2({code})), without_payload(cuda_decode_fp8(code, __NV_E5M2))};
  } else {
    const auto code = static_cast<uint16_t>(input);
    const __nv_bfloat16_raw raw{code};
    return {without_payload(parka::decode_bf16({code})), without_payload(__bfloat162float(__nv_bfloat16(raw)))};
  }
}

struct Count {
  unsigned long long inputs = 0, mismatches = 0;
  uint32_t first = 0xffffffffu;  // smallest mismatching input
};

// Prints one line; returns whether all were equal.
template <Conversion kConversion>
bool report(const char* where, const Count& count) {
  std::printf("%s %s: %llu inputs, %llu mismatches\n", where, kNames[static_cast<int>(kConversion)], count.inputs,
              count.mismatches);
  if (count.mismatches == 0) return true;
  const Results results = convert<kConversion>(count.first);
  std::printf("  first mismatch: input 0x%08x; on the host parka gives 0x%x and CUDA 0x%x\n", count.first,
              results.parka, results.cuda);
  return false;
}

template <Conversion kConversion>
void compare(uint32_t input, Count& count) {
  const Results results = convert<kConversion>(input);
  ++count.inputs;
  if (results.parka == results.cuda) return;
  ++count.mismatches;
  if (input < count.first) count.first = input;
}

// Floats with a prime stride over all patterns, and three on each side of every value and every midpoint between
// neighbours of a format with the given number of mantissa bits. (Those of its subnormals are among them, having
// fewer leading bits.)
template <Conversion kConversion>
bool compare_encode_on_host(int mantissa_bits) {
  Count count;
  for (uint64_t input = 0; input < (uint64_t{1} << 32); input += 4099) {
    compare<kConversion>(static_cast<uint32_t>(input), count);
  }
  const uint32_t half_step = 1u << (22 - mantissa_bits);
  for (uint64_t boundary = 0; boundary < (uint64_t{1} << 32); boundary += half_step) {
    for (int offset = -3; offset <= 3; ++offset) {
      compare<kConversion>(static_cast<uint32_t>(boundary) + static_cast<uint32_t>(offset), count);
    }
  }
  return report<kConversion>("host", count);
}

template <Conversion kConversion>
bool compare_decode_on_host(uint32_t num_codes) {
  Count count;
  for (uint32_t code = 0; code < num_codes; ++code) compare<kConversion>(code, count);
  return report<kConversion>("host", count);
}

bool host_part() {
  bool equal = true;
  equal &= compare_encode_on_host<Conversion::kEncodeBf16>(7);
  equal &= compare_encode_on_host<Conversion::kEncodeE4M3>(3);
  equal &= compare_encode_on_host<Conversion::kEncodeE5M2>(2);
  equal &= compare_decode_on_host<Conversion::kDecodeE4M3>(256);
  equal &= compare_decode_on_host<Conversion::kDecodeE5M2>(256);
  equal &= compare_decode_on_host<Conversion::kDecodeBf16>(65536);
  return equal;
}

void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct DeviceCount {
  unsigned long long inputs, mismatches;
  unsigned int first;
};

template <Conversion kConversion>
__global__ void compare_kernel(uint64_t num_inputs, DeviceCount* count) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  unsigned long long inputs = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_inputs; i += stride) {
    const auto input = static_cast<uint32_t>(i);
    const Results results = convert<kConversion>(input);
    ++inputs;
    if (results.parka == results.cuda) continue;
    atomicAdd(&count->mismatches, 1ull);
    atomicMin(&count->first, input);
  }
  atomicAdd(&count->inputs, inputs);
}

template <Conversion kConversion>
bool compare_on_device(uint64_t num_inputs) {
  DeviceCount host{0, 0, 0xffffffffu};
  DeviceCount* device = nullptr;
  require_success(cudaMalloc(&device, sizeof(host)), "cudaMalloc");
  require_success(cudaMemcpy(device, &host, sizeof(host), cudaMemcpyHostToDevice), "copy to the device");
  compare_kernel<kConversion><<<1024, 256>>>(num_inputs, device);
  require_success(cudaGetLastError(), "kernel launch");
  require_success(cudaMemcpy(&host, device, sizeof(host), cudaMemcpyDeviceToHost), "kernel");
  require_success(cudaFree(device), "cudaFree");
  const bool complete = host.inputs == num_inputs;
  if (!complete)
    std::printf("the kernel compared %llu of %llu inputs\n", host.inputs, (unsigned long long)num_inputs);
  return report<kConversion>("device", {host.inputs, host.mismatches, host.first}) && complete;
}

bool device_part() {
  constexpr uint64_t kAllFloats = uint64_t{1} << 32;
  bool equal = true;
  equal &= compare_on_device<Conversion::kEncodeBf16>(kAllFloats);
  equal &= compare_on_device<Conversion::kEncodeE4M3>(kAllFloats);
  equal &= compare_on_device<Conversion::kEncodeE5M2>(kAllFloats);
  equal &= compare_on_device<Conversion::kDecodeE4M3>(256);
  equal &= compare_on_device<Conversion::kDecodeE5M2>(256);
  equal &= compare_on_device<Conversion::kDecodeBf16>(65536);
  return equal;
}

}  // namespace

int main() {
  bool equal = host_part();
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0) {
    equal &= device_part();
  } else {
    std::printf("device part skipped: no GPU\n");
  }
  std::printf("%s\n", equal ? "all equal" : "MISMATCH");
  return equal ? 0 : 1;
}
