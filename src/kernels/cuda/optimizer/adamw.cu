#include "kernels/ops/optimizer/adamw.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cuda/optimizer/adamw_update.cuh"
#include "kernels/cuda/optimizer/block_scheduler.cuh"
#include "kernels/cuda/ptx/early_launch.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

// A warp takes one group of 128 elements, or several: it reads them of every tensor as fp32, updates them and
// writes them back. There are two kernels: adamw_fp8_kernel for whole blocks of elements with expanded fp8 moments
// of one format, and adamw_kernel for everything else.
namespace parka::cuda {
namespace {

// ---- Kernels ----

// Calls f(part, first, kWhole) for the lane's part of a tensor of N elements, its first one's number and whether
// the block's elements are all there, in aligned tensors.
template <typename Part, typename F>
__device__ void with_part(int64_t N, bool aligned, const F& f) {
  const int64_t begin = int64_t{blockIdx.x} * Part::kBlockElements, first = begin + Part::offset();
  const Part part{N - first};
  if (aligned && begin + Part::kBlockElements <= N) {
    f(part, first, std::true_type());
  } else {
    f(part, first, std::false_type());
  }
}

// Raises *weight_amax, unless it is null, to what the threads of a block have found, as the last thing they do.
template <int kThreads, typename LargestWeight>
__device__ void raise_weight_amax(float* weight_amax, const LargestWeight& largest) {
  __shared__ uint32_t shared[kThreads / kWarpSize];
  if (weight_amax != nullptr) raise_to_block_max<kThreads>(weight_amax, largest.value(), shared);
}

template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads)
    adamw_kernel(Tensors tensors, const float* grad_scale, float* weight_amax, UpdateConstants constants, int64_t N,
                 bool aligned) {
  using Part = typename Tensors::Part;
  const float scale = *grad_scale;
  const bool changes = isfinite(scale);
  if (!changes && weight_amax == nullptr) return;
  typename Tensors::LargestWeight largest;  // elements past the end, read as zeros, stay zeros or become NaN
  with_part<Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    tensors.move(first);
    if (!changes) {
      largest.raise_to(load_part<whole.value>(tensors.weights.weight_N, part));
    } else if constexpr (kIsFp8Moment<decltype(Tensors::exp_avg)> && kIsFp8Moment<decltype(Tensors::exp_avg_sq)>) {
      const RootTable& roots = kRootTable<typename decltype(Tensors::exp_avg)::Format>;
      const RootTable& roots_sq = kRootTable<typename decltype(Tensors::exp_avg_sq)::Format>;
      const auto elements = load_elements<whole.value>(tensors, part);
      step_fp8<whole.value>(tensors, part, roots, roots_sq, scale, constants, elements, largest, [] {});
    } else {
      step_in_turn<whole.value>(tensors, part, scale, constants, largest);
    }
  });
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

// What is left for adamw_fp8_kernel to do where nothing is changed. It has pointers of its own: sharing the step's
// would take registers from that.
template <typename Tensors, typename T>
__device__ void find_unchanged_amax(const T* weight_N, int count, float* weight_amax) {
  using Part = typename Tensors::Part;
  if (weight_amax == nullptr) return;
  typename Tensors::LargestWeight largest;
  for (int block = static_cast<int>(blockIdx.x); block < count; block += static_cast<int>(gridDim.x)) {
    const T* const first = weight_N + int64_t{block} * Part::kBlockElements + Part::offset();
    largest.raise_to(load_part<true>(first, Part{}));
  }
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

// `tensors` at the lane's first element of a block of elements.
template <typename Tensors>
__device__ Tensors of_block(const Tensors& tensors, int block) {
  Tensors moved = tensors;
  moved.move(int64_t{block} * Tensors::Part::kBlockElements + Tensors::Part::offset());
  return moved;
}

// The fast step with fp8 moments, of `count` times Part::kBlockElements elements of aligned tensors: both moments
// have one format, whose table of roots every block copies to its shared memory, so there is one block for each SM.
//
// A warp loads its next elements while it encodes; asynchronous copies all the time are slower. Dynamic scheduling
// matters: with equal shares for all warps, some multiprocessors wait for others during 8 % of the time. After
// memory, instructions are the limit, more so at the lower clock in a step. On sm_90, with a split master and a
// bf16 gradient, one element took 71 instructions before dynamic scheduling:
//   4  loads, stores and their addresses           10  decoding two moments
//   2  gradient: to fp32, scaled                    7  new moments
//   5  extremes of a group, a third in shuffles    14  direction: exact root and quotient
//   4  new weight                                   4  weight joined and split
//  15  encoding two moments                         4  exponents and constants of two groups
//   1  largest weight
// and about one more for codes in doubt. Of a scheduler's 71 cycles for 32 elements, MUFU is busy for 53 and the
// integer units for 43. Registers are used up: a few more live values spill.
template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads, 1)
    adamw_fp8_kernel(const __grid_constant__ Tensors tensors, const float* grad_scale, float* weight_amax,
                     UpdateConstants constants, int count, unsigned* counters) {
  using Part = typename Tensors::Part;
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    find_unchanged_amax<Tensors>(tensors.weights.weight_N, count, weight_amax);
    return;
  }
  BlockScheduler scheduler(counters, count);
  auto elements = load_elements<true>(of_block(tensors, scheduler.block()), Part{});

  extern __shared__ uint4 shared[];
  auto& roots = *reinterpret_cast<RootTable*>(shared);
  copy_roots<Part::kThreads>(kRootTable<typename decltype(Tensors::exp_avg)::Format>, roots);
  __syncthreads();

  typename Tensors::LargestWeight largest;
  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    step_fp8<true>(of_block(tensors, scheduler.block()), Part{}, roots, roots, scale, constants, elements, largest,
                   [&] {
                     if (scheduler.has_next())
                       elements = load_elements<true>(of_block(tensors, scheduler.next()), Part{});
                   });
  }
  BlockScheduler::end<Part::kThreads>(counters);
  raise_weight_amax<Part::kThreads>(weight_amax, largest);
}

// The tensors of several steps, which go to adamw_fp8_steps_kernel as an argument.
template <typename Tensors>
struct StepTable {
  static constexpr size_t kMostBytes = 30000;  // arguments of a kernel may take 32764
  struct Entry {
    Tensors tensors;
    float* weight_amax;
    float lr, weight_decay;
    int first_block;  // of all blocks of elements
  };
  static constexpr int kCapacity = kMostBytes / sizeof(Entry);

  int num_entries, num_blocks;
  Entry entries[kCapacity];

  // The entry that a block of elements belongs to, at or behind entry `from`.
  __device__ int entry_of(int block, int from) const {
    while (from + 1 < num_entries && entries[from + 1].first_block <= block) ++from;
    return from;
  }
  __device__ Tensors at(int entry, int block) const {
    return of_block(entries[entry].tensors, block - entries[entry].first_block);
  }
};

// The same for several tensors. One tensor's step is its own kernel, which is faster: it looks for no tensor, and
// finds the largest weight at the end alone.
template <typename Tensors>
__global__ void __launch_bounds__(Tensors::Part::kThreads, 1)
    adamw_fp8_steps_kernel(const __grid_constant__ StepTable<Tensors> table, const float* grad_scale,
                           UpdateConstants constants, unsigned* counters) {
  using Part = typename Tensors::Part;
  using LargestWeight = typename Tensors::LargestWeight;
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    int entry = 0;
    for (int block = static_cast<int>(blockIdx.x); block < table.num_blocks; block += static_cast<int>(gridDim.x)) {
      entry = table.entry_of(block, entry);
      LargestWeight largest;
      largest.raise_to(load_part<true>(table.at(entry, block).weights.weight_N, Part{}));
      raise_to_warp_max(table.entries[entry].weight_amax, largest);
    }
    return;
  }
  BlockScheduler scheduler(counters, table.num_blocks);
  int entry = table.entry_of(scheduler.block(), 0);
  auto elements = load_elements<true>(table.at(entry, scheduler.block()), Part{});

  extern __shared__ uint4 shared[];
  auto& roots = *reinterpret_cast<RootTable*>(shared);
  copy_roots<Part::kThreads>(kRootTable<typename decltype(Tensors::exp_avg)::Format>, roots);
  __syncthreads();

  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    UpdateConstants of_entry = constants;
    of_entry.lr = table.entries[entry].lr;
    of_entry.weight_decay = table.entries[entry].weight_decay;
    LargestWeight largest;
    int next_entry = entry;
    step_fp8<true>(table.at(entry, scheduler.block()), Part{}, roots, roots, scale, of_entry, elements, largest,
                   [&] {
                     if (!scheduler.has_next()) return;
                     next_entry = table.entry_of(scheduler.next(), entry);
                     elements = load_elements<true>(table.at(next_entry, scheduler.next()), Part{});
                   });
    raise_to_warp_max(table.entries[entry].weight_amax, largest);
    entry = next_entry;
  }
  BlockScheduler::end<Part::kThreads>(counters);
}

template <typename Moment>
__global__ void __launch_bounds__(Moment::Part::kThreads)
    moment_encode_kernel(const float* values_N, Moment moment, int64_t N, bool aligned) {
  with_part<typename Moment::Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    moment.move(first);
    typename Moment::Values x;
    to_floats(load_part<whole.value>(values_N + first, part), x);
    moment.template write<whole.value>(part, x);
  });
}

template <typename Moment>
__global__ void __launch_bounds__(Moment::Part::kThreads)
    moment_decode_kernel(Moment moment, float* values_N, int64_t N, bool aligned) {
  with_part<typename Moment::Part>(N, aligned, [&](const auto& part, int64_t first, auto whole) {
    moment.move(first);
    typename Moment::Values x;
    moment.template read<whole.value>(part, x);
    store_part<whole.value>(values_N + first, part, to_stored<float, typename Moment::Part>(x));
  });
}

// ---- Launches ----

// Many lanes for each group, or few with wide accesses, which makes a group's own work cost less.
using SmallPart = LanePart<1, 4, 8>;
using LargePart = LanePart<2, 8, 16>;

// Calls f with the weights' device form.
template <typename F>
void with_weights(const AdamwStep& a, const F& f) {
  switch (a.master_form) {
    case MasterForm::kFp32: f(Fp32Master{a.weight.as<BFloat16>(), a.master.as<float>()}); return;
    case MasterForm::kFp32Split: f(SplitMaster{a.weight.as<BFloat16>(), a.master.as<uint16_t>()}); return;
    case MasterForm::kFp24Split: {
      const uint32_t phase = rounding_phase(a.step, a.first_element);
      f(Split24Master{a.weight.as<BFloat16>(), a.master.as<uint8_t>(), phase});
      return;
    }
    case MasterForm::kBf16Sr: f(StochasticWeight{a.weight.as<BFloat16>(), a.seed, a.step, a.first_element}); return;
    case MasterForm::kNone: f(Fp32Weight{a.weight.as<float>()}); return;
  }
}

// Calls f with the moment's device form.
template <typename F>
void with_plain_moment(const MomentView& moment, const F& f) {
  with_plain_type(moment.values.dtype, [&](auto type) {
    using T = decltype(type);
    f(PlainMoment<T, SmallPart>{moment.values.as<T>()});
  });
}

template <typename F8, typename Part, bool kIsSecond, bool kOfFastStep = false>
Fp8Moment<F8, Part, kIsSecond, kOfFastStep> fp8_moment(const MomentView& moment) {
  uint8_t* const exponent = moment.exponent.empty() ? nullptr : moment.exponent.as<uint8_t>();
  return {moment.values.as<F8>(), moment.amax.as<float>(), exponent};
}

template <typename Part, bool kIsSecond, typename F>
void with_fp8_moment(const MomentView& moment, const F& f) {
  with_float8_type(moment.values.dtype, [&](auto type) { f(fp8_moment<decltype(type), Part, kIsSecond>(moment)); });
}

template <typename F>
void with_moment(const MomentView& moment, bool is_second, const F& f) {
  if (!is_float8(moment.values.dtype)) {
    with_plain_moment(moment, f);
  } else if (is_second) {
    with_fp8_moment<LargePart, true>(moment, f);
  } else {
    with_fp8_moment<LargePart, false>(moment, f);
  }
}

// Calls f(weights, gradient) with their device forms.
template <typename F>
void with_weights_and_gradient(const AdamwStep& a, const F& f) {
  with_weights(a, [&](auto weights) {
    with_plain_type(a.gradient.dtype, [&](auto type) {
      using T = decltype(type);
      f(weights, Gradient<T>{a.gradient.as<T>()});
    });
  });
}

template <typename Part>
unsigned num_blocks(int64_t N) {
  return static_cast<unsigned>(ceil_div(N, Part::kBlockElements));
}

// Whether a lane can move a pack of `Part` as it likes to.
template <typename Part>
bool is_aligned_for(const TensorView& t) {
  constexpr int64_t kWidestAccess = 16;
  const int64_t pack_bytes = Part::kElements * size_of(t.dtype);
  return is_aligned(t.data, static_cast<size_t>(std::min(pack_bytes, kWidestAccess)));
}

template <typename Part>
bool is_aligned_for(const AdamwStep& a) {
  bool aligned = true;
  for (const TensorView& t : {a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values}) {
    aligned = aligned && is_aligned_for<Part>(t);
  }
  return aligned;
}

float* weight_amax_of(const AdamwStep& a) { return a.weight_amax.empty() ? nullptr : a.weight_amax.as<float>(); }

// Steps the elements from number `begin` on, a multiple of 128.
template <typename Tensors>
void launch_step(CudaDevice& device, const AdamwStep& a, Tensors tensors, int64_t begin = 0) {
  using Part = typename Tensors::Part;
  const int64_t N = a.weight.numel() - begin;
  if (N == 0) return;
  tensors.move(begin);
  adamw_kernel<<<num_blocks<Part>(N), Part::kThreads, 0, device.stream()>>>(
      tensors, a.grad_scale.as<float>(), weight_amax_of(a), UpdateConstants(a), N, is_aligned_for<Part>(a));
}

// Elements that the fast step can have, from the first on. Without range expansion there is one row of roots, which
// any cache holds.
int64_t num_fast_elements(const CudaDevice& device, const AdamwStep& a) {
  const bool can = a.exp_avg.values.dtype == a.exp_avg_sq.values.dtype && !a.exp_avg.exponent.empty() &&
                   !a.exp_avg_sq.exponent.empty() && is_aligned_for<LargePart>(a) &&
                   device.properties().sharedMemPerBlockOptin >= sizeof(RootTable);
  return can ? a.weight.numel() / LargePart::kBlockElements * LargePart::kBlockElements : 0;
}

template <typename Tensors>
void launch_fast_step(CudaDevice& device, const AdamwStep& a, const Tensors& tensors, int64_t num_elements) {
  auto* const kernel = adamw_fp8_kernel<Tensors>;
  constexpr int kSharedBytes = sizeof(RootTable);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "adamw_step");
  const int count = static_cast<int>(num_elements / LargePart::kBlockElements);
  const int blocks = std::min(count, device.num_multiprocessors());
  launch_early(device, kernel, {static_cast<unsigned>(blocks), LargePart::kThreads, kSharedBytes}, tensors,
               a.grad_scale.as<float>(), weight_amax_of(a), UpdateConstants(a), count, device.counters());
  check_launch("adamw_step");
}

void step_with_plain_moments(CudaDevice& device, const AdamwStep& a) {
  with_weights_and_gradient(a, [&](auto weights, auto gradient) {
    with_plain_moment(a.exp_avg, [&](auto exp_avg) {
      with_plain_moment(a.exp_avg_sq, [&](auto exp_avg_sq) {
        launch_step(device, a, Tensors{weights, gradient, exp_avg, exp_avg_sq});
      });
    });
  });
}

// Calls f with the tensors of a fast step.
template <typename F>
void with_fast_tensors(const AdamwStep& a, const F& f) {
  with_weights_and_gradient(a, [&](auto weights, auto gradient) {
    with_float8_type(a.exp_avg.values.dtype, [&](auto type) {
      using F8 = decltype(type);
      f(Tensors{weights, gradient, fp8_moment<F8, LargePart, false, true>(a.exp_avg),
                fp8_moment<F8, LargePart, true, true>(a.exp_avg_sq)});
    });
  });
}

// Calls f with the device form of a second moment beside an fp8 first one.
template <typename F>
void with_second_moment(const MomentView& moment, const F& f) {
  if (is_float8(moment.values.dtype)) {
    with_fp8_moment<SmallPart, true>(moment, f);
  } else {
    f(PlainMoment<BFloat16, SmallPart>{moment.values.as<BFloat16>()});
  }
}

// What the fast step leaves: the elements behind `num_fast`, the last ones of a tensor, or all where it cannot be.
void step_rest(CudaDevice& device, const AdamwStep& a, int64_t num_fast) {
  with_weights(a, [&](auto weights) {
    with_fp8_moment<SmallPart, false>(a.exp_avg, [&](auto exp_avg) {
      with_second_moment(a.exp_avg_sq, [&](auto exp_avg_sq) {
        launch_step(device, a, Tensors{weights, AnyGradient(a.gradient), exp_avg, exp_avg_sq}, num_fast);
      });
    });
  });
}

void step_with_fp8_moments(CudaDevice& device, const AdamwStep& a) {
  const int64_t num_fast = num_fast_elements(device, a);
  if (num_fast > 0) {
    with_fast_tensors(a, [&](const auto& tensors) { launch_fast_step(device, a, tensors, num_fast); });
  }
  step_rest(device, a, num_fast);
}

template <typename Tensors>
void launch_fast_steps(CudaDevice& device, const AdamwStep& like, const StepTable<Tensors>& table) {
  auto* const kernel = adamw_fp8_steps_kernel<Tensors>;
  constexpr int kSharedBytes = sizeof(RootTable);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), "adamw_steps");
  const int blocks = std::min(table.num_blocks, device.num_multiprocessors());
  launch_early(device, kernel, {static_cast<unsigned>(blocks), LargePart::kThreads, kSharedBytes}, table,
               like.grad_scale.as<float>(), UpdateConstants(like), device.counters());
  check_launch("adamw_steps");
}

// The fast part of steps that have one, which are alike.
void fast_steps(CudaDevice& device, const std::vector<const AdamwStep*>& steps) {
  with_fast_tensors(*steps[0], [&](const auto& first) {
    using Table = StepTable<std::remove_cvref_t<decltype(first)>>;
    Table table{};
    for (size_t i = 0; i < steps.size(); ++i) {
      const AdamwStep& a = *steps[i];
      auto& entry = table.entries[table.num_entries++];
      with_fast_tensors(a, [&](const auto& tensors) {
        if constexpr (std::is_same_v<decltype(tensors), decltype(first)>) entry.tensors = tensors;
      });
      entry.weight_amax = weight_amax_of(a);
      entry.lr = a.lr;
      entry.weight_decay = a.weight_decay;
      entry.first_block = table.num_blocks;
      table.num_blocks += static_cast<int>(num_fast_elements(device, a) / LargePart::kBlockElements);
      if (table.num_entries < Table::kCapacity && i + 1 < steps.size()) continue;
      launch_fast_steps(device, a, table);
      table.num_entries = table.num_blocks = 0;
    }
  });
}

}  // namespace

// Both moments are plain, or the first is fp8 and the second fp8 or bf16: no config asks for others.
void adamw_step(Device& device, const AdamwStep& a) {
  const bool is_fp8 = is_float8(a.exp_avg.values.dtype);
  PARKA_REQUIRE(is_float8(a.exp_avg_sq.values.dtype) ? is_fp8
                                                     : !is_fp8 || a.exp_avg_sq.values.dtype == DType::kBF16);
  if (is_fp8) {
    step_with_fp8_moments(as_cuda(device), a);
  } else {
    step_with_plain_moments(as_cuda(device), a);
  }
  check_launch("adamw_step");
}

void adamw_steps(Device& device, const AdamwSteps& a) {
  CudaDevice& gpu = as_cuda(device);
  if (!is_float8(a.steps[0].exp_avg.values.dtype)) {
    for (const AdamwStep& step : a.steps) cuda::adamw_step(device, step);
    return;
  }
  std::vector<const AdamwStep*> fast;
  for (const AdamwStep& step : a.steps) {
    const int64_t num_fast = num_fast_elements(gpu, step);
    if (num_fast > 0) fast.push_back(&step);
    step_rest(gpu, step, num_fast);
  }
  if (!fast.empty()) fast_steps(gpu, fast);
  check_launch("adamw_steps");
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  with_moment(a.moment, a.is_second, [&](auto moment) {
    using Part = typename decltype(moment)::Part;
    const bool aligned = is_aligned_for<Part>(a.values) && is_aligned_for<Part>(a.moment.values);
    moment_encode_kernel<<<num_blocks<Part>(N), Part::kThreads, 0, as_cuda(device).stream()>>>(a.values.as<float>(),
                                                                                               moment, N, aligned);
  });
  check_launch("moment_encode");
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.values.numel();
  with_moment(a.moment, /*is_second=*/false, [&](auto moment) {
    using Part = typename decltype(moment)::Part;
    const bool aligned = is_aligned_for<Part>(a.values) && is_aligned_for<Part>(a.moment.values);
    moment_decode_kernel<<<num_blocks<Part>(N), Part::kThreads, 0, as_cuda(device).stream()>>>(
        moment, a.values.as<float>(), N, aligned);
  });
  check_launch("moment_decode");
}

}  // namespace parka::cuda
