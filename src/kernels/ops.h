#pragma once
// The vocabulary of the model: every operation that forward, backward and optimizer need. Each op is one struct
// of views and one function; its header says shapes, number formats and the formula. kernels/cpu is the readable
// reference, kernels/cuda the fast one. All ops follow the same rules unless their header says otherwise:
//   - arguments are checked before any work is queued; a wrong shape or dtype throws Error(kInternal);
//   - fp32 arithmetic inside, rounding to nearest even on the way out; equal input gives equal bits;
//   - nothing is allocated on the device and the host does not wait;
//   - tensors with no elements are fine and do nothing.
#include "kernels/device/device.h"
#include "kernels/ops/activation.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/add.h"
#include "kernels/ops/amax.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/attention_decode.h"
#include "kernels/ops/bias.h"
#include "kernels/ops/bit_hash.h"
#include "kernels/ops/context_heads.h"
#include "kernels/ops/cross_entropy.h"
#include "kernels/ops/dropout.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/grad_norm.h"
#include "kernels/ops/mix.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/pool_channels.h"
#include "kernels/ops/qk_norm.h"
#include "kernels/ops/quantization_statistics.h"
#include "kernels/ops/quantize.h"
#include "kernels/ops/quantize_4bit.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/swiglu.h"
#include "kernels/ops/vision.h"
