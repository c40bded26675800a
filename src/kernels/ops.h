#pragma once
// The vocabulary of the model: every operation that forward, backward and optimizer need. Each op is one struct
// of views and one function; its header says shapes, number formats and the formula. kernels/cpu is the readable
// reference, kernels/cuda the fast one. All ops follow the same rules unless their header says otherwise:
//   - arguments are checked before any work is queued; a wrong shape or dtype throws Error(kInternal);
//   - fp32 arithmetic inside, rounding to nearest even on the way out; equal input gives equal bits;
//   - nothing is allocated on the device and the host does not wait;
//   - tensors with no elements are fine and do nothing.
#include "kernels/device/device.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/attention/rope.h"
#include "kernels/ops/elementwise/bit_hash.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "kernels/ops/elementwise/embedding.h"
#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/elementwise/side_network.h"
#include "kernels/ops/elementwise/vision.h"
#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/gemm/int8.h"
#include "kernels/ops/moe/grouped_gemm.h"
#include "kernels/ops/moe/routing.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/norm/qk_norm.h"
#include "kernels/ops/optimizer/adamw.h"
#include "kernels/ops/optimizer/grad_norm.h"
#include "kernels/ops/optimizer/muon.h"
#include "kernels/ops/quantize/quantization_statistics.h"
#include "kernels/ops/quantize/quantize.h"
#include "kernels/ops/quantize/quantize_4bit.h"
#include "kernels/ops/swiglu/swiglu.h"
