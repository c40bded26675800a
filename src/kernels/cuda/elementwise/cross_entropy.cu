#include "kernels/ops/elementwise/cross_entropy.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"

// Shapes: T rows (tokens), V columns (the vocabulary). A thread has packs of 16 bytes of a row, a block's.
//
// A row of logits is read from memory once, with a running maximum and sum (online softmax), and stays in shared
// memory until its gradient is written. A block processes row after row. While it writes the gradient of one, each
// thread copies packs of the next row to the places that it has just read, so that memory is always busy. A row
// that does not fit in shared memory is read twice.
//
// A gradient in FP8 is wanted transposed, too, for which blocks must have many rows of few columns. So the first
// kernel finds the losses and what makes logits their gradient, and a second one, over tiles, reads them again.
namespace parka::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBatch = 4;          // packs that a thread has under way before it uses the first
constexpr int kScratchBytes = 64;  // shared memory for reductions: a float for each warp
static_assert(kScratchBytes == kThreads / kWarpSize * sizeof(float));

template <typename T>
constexpr int kWidth = 16 / sizeof(T);  // elements of a pack

// A row's logits become their gradient by these.
struct alignas(16) Gradient {
  float c, factor;   // of 2^(x * kLog2E - c)
  float grad_scale;  // subtracted at the target
  int target;        // kIgnoreTarget: the gradient is 0
};

template <typename T>
struct Arguments {
  T* logits_TV;
  const int32_t* targets_T;
  float* loss_T;
  float* z_loss_value_T;     // or null
  const float* grad_factor;  // or null
  int64_t num_rows;
  int V;
  int64_t stride;  // of rows, V or more
  float z_loss, grad_scale;
  bool write_gradient;
  Gradient* gradient_T;    // or null: for the second kernel
  float* gradient_scale;   // or null: of the codes that the second kernel makes
  float largest_gradient;  // of their format
};

// ---- A row ----

// Rows of any length begin anywhere: aligned packs from the first 16-byte boundary on, and fewer than a pack's
// elements before and after them, which the block's first threads take, one each.
template <typename T>
struct Row {
  T* first;
  int V, head, num_packs;

  __device__ Row(T* begin, int length) : first(begin), V(length) {
    const int misplaced = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % 16 / sizeof(T));
    const int to_boundary = misplaced == 0 ? 0 : kWidth<T> - misplaced;
    head = to_boundary < V ? to_boundary : V;
    num_packs = (V - head) / kWidth<T>;
  }
  __device__ uint4* packs() const { return reinterpret_cast<uint4*>(first + head); }
  // This thread's element outside of the packs, or -1.
  __device__ int edge() const {
    const int t = static_cast<int>(threadIdx.x), tail = V - head - num_packs * kWidth<T>;
    return t < head ? t : t < head + tail ? V - tail + (t - head) : -1;
  }
};

// Packs of this thread, kThreads apart: the `index`-th batch of a row of `count` packs.
struct Batch {
  uint4 pack[kBatch];
  int first, count;

  __device__ Batch(const uint4* packs, int count_of_row, int index) : first(first_of(index)), count(count_of_row) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (has(b)) pack[b] = packs[at(b)];
    }
  }
  static __device__ int first_of(int index) { return static_cast<int>(threadIdx.x) + index * kBatch * kThreads; }
  __device__ int at(int b) const { return first + b * kThreads; }
  __device__ bool has(int b) const { return at(b) < count; }
};

// Batches that hold any row of V elements, wherever it begins.
template <typename T>
__device__ int num_batches(int V) {
  constexpr int kBatchElements = kBatch * kThreads * kWidth<T>;
  return (V + kBatchElements - 1) / kBatchElements;
}

// Starts the copies of a batch to shared memory, as one group. A thread copies only what it reads itself.
template <typename T>
__device__ void start_copies(uint4* cache, const Row<T>& row, int index) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const int i = Batch::first_of(index) + b * kThreads;
    if (i < row.num_packs) cp_async_16(shared_address(cache + i), row.packs() + i, true);
  }
  cp_async_commit();
}

// Waits until at most `pending` of this thread's groups, the latest, are still under way (kMost at most).
template <int kMost = 7>
__device__ void wait_for_copies(int pending) {
  if constexpr (kMost == 0) {
    cp_async_wait<0>();
  } else if (pending >= kMost) {
    cp_async_wait<kMost>();
  } else {
    wait_for_copies<kMost - 1>(pending);
  }
}

template <typename T>
__device__ void write_zeros(const Row<T>& row) {
  for (int i = static_cast<int>(threadIdx.x); i < row.num_packs; i += kThreads) row.packs()[i] = uint4{};
  if (row.edge() >= 0) row.first[row.edge()] = T{};
}

// ---- Softmax ----

// Exponentials are computed as 2^(x * kLog2E - c) with c = reference(max): one fused multiply-add and one
// instruction. The rounding error of c is large when max is, but common to the whole row: it cancels in the
// probabilities, and the loss corrects for it. It fits fp32 for |max| < 1e9; beyond that the loss is not finite.
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kLeastMax = -0x1p29f;  // lesser logits, -infinity among them, count 0

// A value of its own: contracted with an addition it would not be the same c everywhere.
__device__ float reference(float max) { return __fmul_rn(max, kLog2E); }

__device__ float exp_relative(float x, float c) { return exp2_approximate(fmaf(x, kLog2E, -c)); }

template <typename T>
__device__ void unpack(const uint4& packed, float (&x)[kWidth<T>]) {
  const auto pack = std::bit_cast<Pack<T, kWidth<T>>>(packed);
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) x[i] = to_float(pack.element[i]);
}

template <typename T>
__device__ float max_of(const uint4& packed) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
    const __nv_bfloat162 max = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(max), __high2float(max));
  } else {
    float x[kWidth<T>];
    unpack<T>(packed, x);
    return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }
}

// sum = sum of 2^(x * kLog2E - reference(max)) over some logits.
struct RunningSum {
  float max = kLeastMax;
  float sum = 0.0f;

  // Products that are to be added are rounded first, here and below: fused in one kernel and not in another, they
  // would make the loss depend on whether a gradient is wanted.
  __device__ void raise_max(float new_max) {
    sum = __fmul_rn(sum, exp2_approximate(reference(max) - reference(new_max)));
    max = new_max;
  }
  template <int N>
  __device__ void add(const float (&x)[N]) {
    const float c = reference(max);
    float added = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) added += exp_relative(x[i], c);
    sum += added;
  }
  template <typename T>
  __device__ void add(const Batch& batch) {
    float new_max = max;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (batch.has(b)) new_max = fmaxf(new_max, max_of<T>(batch.pack[b]));
    }
    raise_max(new_max);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!batch.has(b)) break;
      float x[kWidth<T>];
      unpack<T>(batch.pack[b], x);
      add(x);
    }
  }
};

// x holds the logits from column `first` on and becomes their gradient.
template <int N>
__device__ void apply(const Gradient& g, int first, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = exp_relative(x[i], g.c) * g.factor;
  if (g.target >= first && g.target < first + N) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] -= i == g.target - first ? g.grad_scale : 0.0f;
  }
}

template <typename T>
__device__ void write(const Gradient& g, const Row<T>& row, const Batch& batch) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    if (!batch.has(b)) break;
    float x[kWidth<T>];
    unpack<T>(batch.pack[b], x);
    const int first = row.head + batch.at(b) * kWidth<T>;
    apply(g, first, x);
    store(reinterpret_cast<T*>(row.packs() + batch.at(b)), x);
  }
}

template <typename T>
__device__ void write_losses(const Arguments<T>& a, int64_t t, float loss, float z_loss_value) {
  a.loss_T[t] = loss;
  if (a.z_loss_value_T != nullptr) a.z_loss_value_T[t] = z_loss_value;
}

template <typename T>
__device__ float scale_of_rows(const Arguments<T>& a) {
  return a.grad_factor == nullptr ? a.grad_scale : a.grad_scale * *a.grad_factor;
}

// Multiplies what a row's gradient is made of by row_factor().
template <typename T>
__device__ void scale_row(const Arguments<T>& a, float target_logit, Gradient& g) {
  const float scale = logits_gradient_scale(g.grad_scale, a.largest_gradient);
  const float at_target = exp_relative(target_logit, g.c) * g.factor - g.grad_scale;
  const float code = at_target * inverse_of_scale(scale);
  const float rounded =
      a.largest_gradient == kE4M3Traits.max ? decode_e4m3(encode_e4m3(code)) : decode_e5m2(encode_e5m2(code));
  const float factor = row_factor(at_target, rounded * scale);
  g.factor *= factor;
  g.grad_scale *= factor;
}

// ---- Kernel ----

// A row for start_copies: of length 0 when its target is to be ignored, as one after the last has it.
template <typename T>
__device__ Row<T> row_to_copy(const Arguments<T>& a, int64_t t, int target) {
  return Row<T>(a.logits_TV + t * a.stride, target == kIgnoreTarget ? 0 : a.V);
}

// Row t has a target. With a cache its packs are there or on their way, and those of the block's next row follow.
template <typename T, bool kCached>
__device__ void process_row(const Arguments<T>& a, int64_t t, int target, int next_target, uint4* cache,
                            float* scratch) {
  const Row<T> row(a.logits_TV + t * a.stride, a.V);
  // The CPU refuses other targets. Here the row becomes NaN, which the check of the loss finds.
  const bool in_vocabulary = target >= 0 && target < a.V;
  float target_logit = 0.0f;
  if (threadIdx.x == 0 && in_vocabulary) target_logit = to_float(row.first[target]);
  const int edge = row.edge();
  float edge_x[1] = {0.0f};
  if (edge >= 0) edge_x[0] = to_float(row.first[edge]);

  const int batches = num_batches<T>(a.V);
  const uint4* packs = row.packs();
  if constexpr (kCached) packs = cache;
  RunningSum running;
  for (int i = 0; i < batches; ++i) {
    if constexpr (kCached) wait_for_copies(batches - 1 - i);
    running.template add<T>(Batch(packs, row.num_packs, i));
  }
  if (edge >= 0) {
    running.raise_max(fmaxf(running.max, edge_x[0]));
    running.add(edge_x);
  }

  const float max = block_max<kThreads>(running.max, scratch), c = reference(max);
  running.raise_max(max);
  float sum = block_sum<kThreads>(running.sum, scratch);
  if (!in_vocabulary) sum = __int_as_float(0x7fffffff);
  const float c_error = -fmaf(max, kLog2E, -c);
  const float log_sum = fmaf(c_error, kLn2, logf(sum)), lse = max + log_sum;  // log_sum: of exp(x - max)
  if (threadIdx.x == 0) write_losses(a, t, log_sum - (target_logit - max), a.z_loss * lse * lse);
  if (!a.write_gradient) return;

  // p as a quotient of exponentials: exp(x - lse) would carry the rounding error of lse, large when logits are.
  const float grad_scale = scale_of_rows(a);
  Gradient gradient{c, grad_scale * (1.0f + 2.0f * a.z_loss * lse) / sum, grad_scale, target};
  if (a.gradient_T != nullptr) {
    if (threadIdx.x != 0) return;
    if (a.gradient_scale != nullptr) scale_row(a, target_logit, gradient);
    a.gradient_T[t] = gradient;
    return;
  }
  const Row<T> next = row_to_copy(a, t + gridDim.x, next_target);
  for (int i = 0; i < batches; ++i) {
    write(gradient, row, Batch(packs, row.num_packs, i));
    if constexpr (kCached) start_copies(cache, next, i);
  }
  if (edge >= 0) {
    apply(gradient, edge, edge_x);
    store(row.first + edge, edge_x);
  }
}

// kCached: the packs of a row fit in shared memory after the scratch, and the gradient is wanted. Otherwise packs
// are read from memory, and a second time for the gradient.
template <typename T, bool kCached>
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_kernel(Arguments<T> a) {
  wait_for_kernel_before();
  extern __shared__ uint4 shared_memory[];
  float* scratch = reinterpret_cast<float*>(shared_memory);
  uint4* cache = shared_memory + kScratchBytes / sizeof(uint4);

  const auto target_of = [&](int64_t t) { return t < a.num_rows ? a.targets_T[t] : kIgnoreTarget; };
  const auto copy_row = [&](int64_t t, int target) {
    const Row<T> row = row_to_copy(a, t, target);
    for (int i = 0; i < num_batches<T>(a.V); ++i) start_copies(cache, row, i);
  };

  if (a.gradient_scale != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *a.gradient_scale = logits_gradient_scale(scale_of_rows(a), a.largest_gradient);
  }
  int target = target_of(blockIdx.x);
  if constexpr (kCached) copy_row(blockIdx.x, target);
  for (int64_t t = blockIdx.x; t < a.num_rows; t += gridDim.x) {
    const int next_target = target_of(t + gridDim.x);
    if (target != kIgnoreTarget) {
      process_row<T, kCached>(a, t, target, next_target, cache, scratch);
    } else {
      if (threadIdx.x == 0) write_losses(a, t, 0.0f, 0.0f);
      if (a.gradient_T != nullptr) {
        if (threadIdx.x == 0) a.gradient_T[t] = {0.0f, 0.0f, 0.0f, kIgnoreTarget};
      } else if (a.write_gradient) {
        write_zeros(Row<T>(a.logits_TV + t * a.stride, a.V));
      }
      if constexpr (kCached) copy_row(t + gridDim.x, next_target);
    }
    target = next_target;
  }
}

// ---- Gradient in FP8 ----

// The gradient as a source of numbers (quantize_tiles.cuh), from logits with as many columns as it has.
template <typename T>
struct GradientSource {
  const T* logits_TV;
  const Gradient* gradient_T;
  int V;     // columns behind it are zeros
  int cols;  // of a row, V or more

  struct Fetched {
    Stored<T, kSourceWidth> logits;
    int row, col;
  };

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(logits_TV, 16); }
  __device__ Fetched fetch(int row, int col) const {
    return {load_constant<kSourceWidth>(logits_TV + offset_of(row, cols, col)), row, col};
  }
  __device__ void decode(const Fetched& stored, int quarter, float (&x)[4]) const {
    const Gradient g = gradient_of(stored.row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = value(g, stored.logits[4 * quarter + i], stored.col + 4 * quarter + i);
    }
  }
  __device__ float element(int row, int col) const {
    return value(gradient_of(row), to_float(logits_TV[int64_t{row} * cols + col]), col);
  }

 private:
  __device__ Gradient gradient_of(int row) const {
    const float4 g = __ldg(reinterpret_cast<const float4*>(gradient_T) + row);
    return {g.x, g.y, g.z, __float_as_int(g.w)};
  }
  // Each operation is rounded, so that all callers get the same bits.
  __device__ float value(const Gradient& g, float x, int col) const {
    const float p = __fmul_rn(exp_relative(x, g.c), g.factor);
    const float gradient = col == g.target ? __fsub_rn(p, g.grad_scale) : p;
    return col < V && g.target != kIgnoreTarget ? gradient : 0.0f;
  }
};

template <typename T>
void write_codes(CudaDevice& device, const CrossEntropy& a, const Gradient* gradient) {
  const int64_t rows = a.logits.dim[0], cols = a.logits.dim[1];
  const GradientSource<T> source{a.logits.as<T>(), gradient, static_cast<int>(cols - a.padding),
                                 static_cast<int>(cols)};
  if constexpr (std::is_same_v<T, BFloat16>) {
    const ScaledView& any = a.d_logits.empty() ? a.d_logits_t : a.d_logits;
    if (any.scaling == Scaling::kTensor && source.fits_wide() && is_aligned(a.d_logits.data.data, 16)) {
      tiles::check_extents(rows, cols);
      tiles::write_tensor(device, source, rows, cols, a.d_logits, a.d_logits_t, /*amax=*/nullptr);
      return;
    }
  }
  write_rare(device, source, rows, cols, a.d_logits, a.d_logits_t, /*amax=*/nullptr);
}

// ---- Launch ----

template <typename T>
void run(CudaDevice& device, const CrossEntropy& a) {
  const int64_t num_rows = a.logits.dim[0], stride = a.logits.dim[1], V = stride - a.padding;
  PARKA_REQUIRE(num_rows <= INT32_MAX && V <= INT32_MAX / 2);
  const bool makes_codes = !a.d_logits.empty() || !a.d_logits_t.empty();
  const ScaledView& codes = a.d_logits.empty() ? a.d_logits_t : a.d_logits;
  auto* const gradient =
      makes_codes ? static_cast<Gradient*>(device.workspace("cross_entropy", workspace_of(a))) : nullptr;
  const Arguments<T> arguments{
      .logits_TV = a.logits.as<T>(),
      .targets_T = a.targets.as<int32_t>(),
      .loss_T = a.loss.as<float>(),
      .z_loss_value_T = optional<float>(a.z_loss_value),
      .grad_factor = optional<float>(a.grad_factor),
      .num_rows = num_rows,
      .V = static_cast<int>(V),
      .stride = stride,
      .z_loss = a.z_loss,
      .grad_scale = a.grad_scale,
      .write_gradient = a.write_gradient,
      .gradient_T = gradient,
      .gradient_scale = codes.scaling == Scaling::kTensor ? codes.scale.as<float>() : nullptr,
      .largest_gradient = makes_codes ? float8_traits(codes.data.dtype).max : 0.0f,
  };
  const int64_t cached_bytes = kScratchBytes + V / kWidth<T> * static_cast<int64_t>(sizeof(uint4));
  const bool cached = a.write_gradient && !makes_codes &&
                      cached_bytes <= static_cast<int64_t>(device.properties().sharedMemPerBlockOptin);
  const auto kernel = cached ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
  const int shared_bytes = cached ? static_cast<int>(cached_bytes) : kScratchBytes;
  int64_t num_blocks = num_rows;
  if (cached) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cross_entropy");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "cross_entropy");
    int blocks_at_once = 0;  // on a multiprocessor
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_at_once, kernel, kThreads,
                                                        static_cast<size_t>(shared_bytes)),
          "cross_entropy");
    num_blocks = std::min(num_rows, static_cast<int64_t>(blocks_at_once) * device.num_multiprocessors());
  }
  launch_early(device, "cross_entropy", kernel, {num_blocks, kThreads, shared_bytes}, arguments);
  if (makes_codes) write_codes<T>(device, a, gradient);
}

}  // namespace

void cross_entropy(Device& device, const CrossEntropy& a) {
  with_plain_type(a.logits.dtype, [&](auto type) { run<decltype(type)>(as_cuda(device), a); });
}

}  // namespace parka::cuda
