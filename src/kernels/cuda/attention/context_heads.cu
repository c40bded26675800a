#include "kernels/ops/attention/attention.h"

#include "kernels/cuda/launch.cuh"

// Moves heads between rows that have all of them and parts that have some. A part is a rank's share of the heads of
// queries, keys and values; a block copies one row of a part, a thread kUnits accesses at a time.
namespace parka::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kUnits = 4;  // that a thread loads before it stores the first

// Sizes in units: of a part's query heads, of its key heads or its value heads, of a row of a part.
struct Runs {
  int queries, keys, width;
  int num_parts;
  int64_t length;
};

// A thread block copies a row of a part, to it or from it. Unit is what each access moves.
template <typename Unit, bool kMerges>
__global__ void __launch_bounds__(kThreads) copy_heads(const Unit* in, Unit* out, Runs runs) {
  const int64_t row = blockIdx.x, length = runs.length;
  const int64_t part = row / length % runs.num_parts, sequence = row / length / runs.num_parts;
  const int64_t of_part = row * runs.width,
                of_row = (sequence * length + row % length) * runs.num_parts * runs.width;
  const auto place = [&](int i) {
    const int before_keys = i - runs.queries;
    if (before_keys < 0) return part * runs.queries + i;
    const int values = before_keys >= runs.keys ? 1 : 0;
    return int64_t{runs.num_parts} * (runs.queries + values * runs.keys) + part * runs.keys + before_keys -
           values * runs.keys;
  };
  for (int first = threadIdx.x; first < runs.width; first += kUnits * kThreads) {
    Unit units[kUnits];
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const int i = first + n * kThreads;
      if (i < runs.width) units[n] = in[kMerges ? of_part + i : of_row + place(i)];
    }
#pragma unroll
    for (int n = 0; n < kUnits; ++n) {
      const int i = first + n * kThreads;
      if (i < runs.width) out[kMerges ? of_row + place(i) : of_part + i] = units[n];
    }
  }
}

template <bool kMerges>
void move_heads(Device& device, const char* op, const TensorView& in, const TensorView& out,
                const TensorView& parts, int64_t num_heads, int64_t num_kv_heads) {
  const int64_t C = parts.dim[1], element = size_of(parts.dtype);
  const int64_t head_bytes = C * parts.dim[3] / (num_heads + 2 * num_kv_heads) * element;
  const int64_t num_rows = parts.dim[0] * C * parts.dim[2];
  PARKA_REQUIRE(parts.dim[3] <= INT32_MAX);
  const auto run = [&](auto unit) {
    using Unit = decltype(unit);
    const auto per_head = head_bytes / static_cast<int64_t>(sizeof(Unit));
    const auto queries = static_cast<int>(num_heads / C * per_head),
               keys = static_cast<int>(num_kv_heads / C * per_head);
    const Runs runs = {queries, keys, queries + 2 * keys, static_cast<int>(C), parts.dim[2]};
    launch(as_cuda(device), op, copy_heads<Unit, kMerges>, {num_rows, kThreads}, static_cast<const Unit*>(in.data),
           static_cast<Unit*>(out.data), runs);
  };
  if (head_bytes % 16 == 0 && are_aligned({in.data, out.data})) {
    run(uint4{});
  } else if (element == 4) {
    run(uint32_t{});
  } else {
    run(uint16_t{});
  }
}

}  // namespace

void split_heads(Device& device, const SplitHeads& a) {
  move_heads</*kMerges=*/false>(device, "split_heads", a.x, a.parts, a.parts, a.num_heads, a.num_kv_heads);
}

void merge_heads(Device& device, const MergeHeads& a) {
  move_heads</*kMerges=*/true>(device, "merge_heads", a.parts, a.x, a.parts, a.num_heads, a.num_kv_heads);
}

}  // namespace parka::cuda
