#pragma once
#include "kernels/device/device.h"
#include "kernels/op/op.h"

namespace parka {

template <typename Args, typename Run>
void run_op(Device& device, const char* op, const Args& args, const Run& run) {
  if (OpRecorder* recorder = device.op_recorder()) {
    recorder->record(op, cost_of(args), workspace_of(args));
    return;
  }
  OpTimer* timer = device.op_timer();
  if (timer) timer->begin(op, cost_of(args));
  run();
  if (timer) timer->end();
}

}  // namespace parka

// How ops/*.cpp reach an implementation: after its checks, `PARKA_DISPATCH(rmsnorm, device, a)` calls
// cpu::rmsnorm(device, a) or cuda::rmsnorm(device, a). A macro because it pastes the op's name.
#ifdef PARKA_CUDA
#define PARKA_DISPATCH(op, device, args)                 \
  ::parka::run_op(device, #op, args, [&] {               \
    if ((device).kind() == ::parka::DeviceKind::kCuda) { \
      cuda::op(device, args);                            \
    } else {                                             \
      cpu::op(device, args);                             \
    }                                                    \
  })
#else
#define PARKA_DISPATCH(op, device, args) ::parka::run_op(device, #op, args, [&] { cpu::op(device, args); })
#endif
