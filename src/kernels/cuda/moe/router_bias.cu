#include "kernels/cuda/launch.cuh"
#include "kernels/ops/moe/router_bias.h"

// E experts: one block moves the bias of each towards the mean load.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;

// One block: whole numbers, whose sum has no order.
__global__ void __launch_bounds__(kThreads)
    move_router_bias_kernel(const float* load_E, const float* coefficient, float rate, float* bias_E, int E) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  if (isnan(*coefficient)) return;
  for (int e = static_cast<int>(threadIdx.x); e < E; e += kThreads) {
    atomicAdd(&sum, static_cast<unsigned long long>(load_E[e]));
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < E; e += kThreads) {
    const long long missing =
        static_cast<long long>(sum) - static_cast<long long>(E) * static_cast<long long>(load_E[e]);
    if (missing != 0) bias_E[e] += missing > 0 ? rate : -rate;
  }
}

}  // namespace

void move_router_bias(Device& device, const MoveRouterBias& a) {
  launch(as_cuda(device), "move_router_bias", move_router_bias_kernel, {1, kThreads}, a.load.as<float>(),
         a.coefficient.as<float>(), a.rate, a.bias.as<float>(), static_cast<int>(a.bias.numel()));
}

}  // namespace parka::cuda
