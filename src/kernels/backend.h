#pragma once
#include "kernels/device.h"

// How ops/*.cpp reach an implementation: after its checks, `PARKA_DISPATCH(rmsnorm, device, a)` calls
// cpu::rmsnorm(device, a) or cuda::rmsnorm(device, a). A macro because it pastes the op's name.
#ifdef PARKA_CUDA
#define PARKA_DISPATCH(op, device, args) \
  ((device).kind() == ::parka::DeviceKind::kCuda ? cuda::op(device, args) : cpu::op(device, args))
#else
#define PARKA_DISPATCH(op, device, args) cpu::op(device, args)
#endif
