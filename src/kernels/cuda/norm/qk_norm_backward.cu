#include <algorithm>
#include <bit>

#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/norm/qk_norm_input.cuh"
#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/op/workspace.h"
#include "kernels/ops/norm/qk_norm.h"

// Shapes: T rows (tokens), N columns of the fused QKV matrix, G groups of a row, W columns of a group, D of a head,
// C columns of both weights, B blocks. Two kernels: one for heads that fit in a warp, with a team of threads for
// each, and one with a block for a group, which takes any shape.
namespace parka::cuda {
namespace {

// The queries, keys or values of a row.
struct QkvPart {
  int first_column;  // of the row
  int first_group;   // in rstd
  int first_weight;  // among the columns of both weights
  int groups, width;
};

struct QkNormShape {
  QkvPart queries, keys, values;
  int row_width, row_groups, weight_columns;

  __device__ QkvPart part(unsigned which) const { return which == 0 ? queries : which == 1 ? keys : values; }
};

QkNormShape qk_norm_shape(const QkNormBackward& a) {
  check_row_extents(a.x.num_rows(), a.x.num_cols());
  const int H = static_cast<int>(a.num_heads), Hkv = static_cast<int>(a.num_kv_heads);
  const int N = static_cast<int>(a.x.num_cols()), D = N / (H + 2 * Hkv), first_key = H * D,
            first_value = first_key + Hkv * D;
  if (a.kind == QkNormKind::kFull) {
    return {.queries = {0, 0, 0, 1, H * D},
            .keys = {first_key, 1, H * D, 1, Hkv * D},
            .values = {first_value, 0, 0, 1, Hkv * D},
            .row_width = N,
            .row_groups = 2,
            .weight_columns = (H + Hkv) * D};
  }
  return {.queries = {0, 0, 0, H, D},
          .keys = {first_key, H, D, Hkv, D},
          .values = {first_value, 0, 0, Hkv, D},
          .row_width = N,
          .row_groups = H + Hkv,
          .weight_columns = 2 * D};
}

template <typename T, typename W>
struct QkBackwardTensors {
  const float* rstd_TG;
  const W* weight[2];
  T* d_qkv_TN;
  float* d_weight_BC;  // what each block adds to the gradients of both weights
  float* amax;         // raised to max |d_qkv|; null: not wanted
  float weight_offset;
};

// d_x of an element, from its d_y * weight, and the mean of g * xhat over the group.
__device__ inline float qk_input_gradient(float g, float xhat, float mean_g_xhat, float rstd) {
  return rstd * (g - xhat * mean_g_xhat);
}

// ---- Heads that fit in a warp ----

constexpr int kTeamThreads = 256;

// A team of 1, 2, 4 ... 32 threads of one warp has a head of a row, kPacks packs of 16 bytes each thread.
template <typename T, int kPacks>
struct Team {
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kMaxDim = kWarpSize * kPacks * kWidth;
  static constexpr int kSharedFloats = kTeamThreads * kPacks * kWidth;  // columns of all teams of a block

  int lanes, lane, index, head_dim;

  __device__ Team(int lanes_, int head_dim_)
      : lanes(lanes_),
        lane(static_cast<int>(threadIdx.x) & (lanes_ - 1)),
        index(static_cast<int>(threadIdx.x) / lanes_),
        head_dim(head_dim_) {}

  __device__ int count() const { return kTeamThreads / lanes; }
  __device__ int column(int pack) const { return (pack * lanes + lane) * kWidth; }
  __device__ bool has(int pack) const { return column(pack) < head_dim; }

  template <typename E>
  __device__ void read(const E* head, bool wanted, Stored<E, kWidth> (&x)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      x[pack] = load_stored<kWidth>(head + column(pack), wanted && has(pack));
    }
  }
  // The input's head that begins at a column of a row.
  template <typename Input>
  __device__ void read(const Input& input, int64_t row, int row_width, int first_column, bool wanted,
                       float (&x)[kPacks][kWidth]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      input.template load<kWidth>(row, row_width, first_column + column(pack), wanted && has(pack), x[pack]);
    }
  }
  // The sum over the team, in all of its threads. All threads of the warp must be here.
  __device__ float sum(float x) const {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x = __fadd_rn(x, __shfl_xor_sync(kFullWarp, x, offset));
    return x;
  }
};

// Values are among the heads if the maximum is wanted: they are read for it.
template <typename Input, typename T, typename W, int kPacks>
__global__ void __launch_bounds__(kTeamThreads)
    qk_norm_backward_heads_kernel(const Input x_TN, const QkBackwardTensors<T, W> a, const QkNormShape shape,
                                  unsigned items, unsigned row_heads, int lanes, float inverse_dim) {
  using HeadTeam = Team<T, kPacks>;
  constexpr int kWidth = HeadTeam::kWidth;
  __shared__ float shared[HeadTeam::kSharedFloats];
  const HeadTeam team(lanes, shape.queries.width);
  float d_q_weight[kPacks][kWidth] = {}, d_k_weight[kPacks][kWidth] = {};  // of the team's heads
  float largest = 0.0f;
  const auto teams = static_cast<unsigned>(team.count());
  // A warp's teams take their last turn together.
  for (unsigned first = blockIdx.x * teams; first < items; first += gridDim.x * teams) {
    const unsigned item = first + static_cast<unsigned>(team.index);
    const bool wanted = item < items;
    const unsigned t = item / row_heads;
    const int head = static_cast<int>(item - t * row_heads);
    const bool is_value = head >= shape.row_groups, is_key = head >= shape.queries.groups;
    const bool normalizes = wanted && !is_value;
    const int64_t offset = int64_t{t} * shape.row_width + head * team.head_dim;
    float x[kPacks][kWidth];
    Stored<T, kWidth> d_y[kPacks];
    Stored<W, kWidth> weight[kPacks];
    team.read(a.d_qkv_TN + offset, wanted, d_y);
    team.read(x_TN, t, shape.row_width, head * team.head_dim, normalizes, x);
    team.read(is_key ? a.weight[1] : a.weight[0], normalizes, weight);
    const float rstd = normalizes ? a.rstd_TG[int64_t{t} * shape.row_groups + head] : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = normalized<false>(x[pack][i], 0.0f, rstd), d_weight = d_y[pack][i] * xhat;
        sum += d_y[pack][i] * (weight[pack][i] + a.weight_offset) * xhat;
        if (!normalizes) continue;
        if (is_key) {
          d_k_weight[pack][i] += d_weight;
        } else {
          d_q_weight[pack][i] += d_weight;
        }
      }
    }
    const float mean_g_xhat = team.sum(sum) * inverse_dim;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      float d_x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = normalized<false>(x[pack][i], 0.0f, rstd);
        const float g = d_y[pack][i] * (weight[pack][i] + a.weight_offset);
        d_x[i] = is_value ? d_y[pack][i] : qk_input_gradient(g, xhat, mean_g_xhat, rstd);
        largest = max_magnitude(largest, d_x[i]);
      }
      if (normalizes && team.has(pack)) store(a.d_qkv_TN + offset + team.column(pack), d_x);
    }
  }

  // The teams' sums, added in their order.
  const auto add_up = [&](const float(&d_weight)[kPacks][kWidth], int first_column) {
    __syncthreads();
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (team.has(pack)) shared[team.index * team.head_dim + team.column(pack) + i] = d_weight[pack][i];
      }
    }
    __syncthreads();
    float* const d_weight_C = a.d_weight_BC + int64_t{blockIdx.x} * shape.weight_columns + first_column;
    for (int column = static_cast<int>(threadIdx.x); column < team.head_dim; column += kTeamThreads) {
      float sum = 0.0f;
      for (int index = 0; index < team.count(); ++index) sum += shared[index * team.head_dim + column];
      d_weight_C[column] = sum;
    }
  };
  add_up(d_q_weight, 0);
  add_up(d_k_weight, shape.keys.first_weight);
  if (a.amax != nullptr) {
    __shared__ float shared_max[kMaxWarps];
    // Rounding keeps the order of numbers: the maximum of what is stored is that of the rest, rounded.
    largest = to_float(from_float<T>(row_max(largest, shared_max)));
    if (threadIdx.x == 0) raise_to(a.amax, largest);
  }
}

// ---- Any shape ----

// A thread's part of a group that begins at a column of a row.
template <typename Part, typename Input, int kWidth>
__device__ void read_part(const Part& part, const Input& input, unsigned row, int row_width, int first_column,
                          float (&x)[Part::kPacks][kWidth]) {
#pragma unroll
  for (int pack = 0; pack < Part::kPacks; ++pack) {
    const int column = first_column + part.column(pack);
    if constexpr (kWidth == 1) {
      x[pack][0] = part.has(pack) ? input.element(static_cast<int>(row), column) : 0.0f;
    } else {
      input.template load<kWidth>(row, row_width, column, part.has(pack), x[pack]);
    }
  }
}

// Blocks (b, p) have part p of every gridDim.x-th row. Values are only read, if the maximum is wanted.
template <typename Input, typename T, typename W, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    qk_norm_backward_groups_kernel(const Input x_TN, const QkBackwardTensors<T, W> a, const QkNormShape shape,
                                   unsigned rows) {
  using Part = RowPart<T, kWide>;
  constexpr int kPacks = Part::kPacks, kWidth = Part::kWidth;
  __shared__ float shared[2][kMaxWarps];
  const QkvPart qkv = shape.part(blockIdx.y);
  const W* const weight_W = blockIdx.y == 0 ? a.weight[0] : a.weight[1];
  float* const d_weight_W = a.d_weight_BC + int64_t{blockIdx.x} * shape.weight_columns + qkv.first_weight;
  const float inverse_width = 1.0f / static_cast<float>(qkv.width);
  float d_weight[kPacks][kWidth] = {};  // wide: of this thread's columns, over the block's rows
  float largest = 0.0f;
  int buffer = 0;
  for (unsigned t = blockIdx.x; t < rows; t += gridDim.x) {
    for (int group = 0; group < qkv.groups; ++group, buffer ^= 1) {
      const int64_t offset = int64_t{t} * shape.row_width + qkv.first_column + group * qkv.width;
      float x[kPacks][kWidth];
      Stored<T, kWidth> d_y[kPacks];
      if (blockIdx.y == 2) {
        Part::for_each_chunk(qkv.width, [&](const Part& part) {
          part.read(a.d_qkv_TN + offset, d_y);
          Part::for_each([&](int pack, int i) { largest = max_magnitude(largest, d_y[pack][i]); });
        });
        continue;
      }
      const bool is_first = t == blockIdx.x && group == 0;
      const float rstd = a.rstd_TG[int64_t{t} * shape.row_groups + qkv.first_group + group];
      Stored<W, kWidth> weight[kPacks];
      const auto read = [&](const Part& part) {
        read_part(part, x_TN, t, shape.row_width, qkv.first_column + group * qkv.width, x);
        part.read(a.d_qkv_TN + offset, d_y);
        part.read(weight_W, weight);
      };
      const auto xhat = [&](int pack, int i) { return normalized<false>(x[pack][i], 0.0f, rstd); };
      const auto g = [&](int pack, int i) { return d_y[pack][i] * (weight[pack][i] + a.weight_offset); };
      float sum = 0.0f;
      Part::for_each_chunk(qkv.width, [&](const Part& part) {
        read(part);
        Part::for_each([&](int pack, int i) {
          sum += g(pack, i) * xhat(pack, i);
          if constexpr (kWide) {
            d_weight[pack][i] += d_y[pack][i] * xhat(pack, i);
          } else if (part.has(pack)) {
            float& total = d_weight_W[part.column(pack)];
            total = d_y[pack][i] * xhat(pack, i) + (is_first ? 0.0f : total);
          }
        });
      });
      const float mean_g_xhat = row_sum(sum, shared[buffer]) * inverse_width;
      Part::for_each_chunk(qkv.width, [&](const Part& part) {
        if constexpr (!kWide) read(part);
        float d_x[kPacks][kWidth];
        Part::for_each([&](int pack, int i) {
          d_x[pack][i] = qk_input_gradient(g(pack, i), xhat(pack, i), mean_g_xhat, rstd);
          largest = max_magnitude(largest, d_x[pack][i]);
        });
        part.write(a.d_qkv_TN + offset, d_x);
      });
    }
  }
  if constexpr (kWide) {
    if (blockIdx.y != 2) Part(0, qkv.width).write(d_weight_W, d_weight);
  }
  if (a.amax != nullptr) {
    __shared__ float shared_max[kMaxWarps];
    largest = to_float(from_float<T>(row_max(largest, shared_max)));
    if (threadIdx.x == 0) raise_to(a.amax, largest);
  }
}

// ---- Launches ----

// How many columns of a group a block's or a team's thread moves at once.
template <typename T>
constexpr int kQkWidth = 16 / static_cast<int>(sizeof(T));

constexpr int kMostPacks = 2;

// Calls f(packs) with a constant, the packs of a team's thread; false where no team has the heads.
template <typename T, typename F>
bool with_team_packs(QkNormKind kind, int head_dim, std::initializer_list<const void*> tensors, const F& f) {
  const bool fits = kind == QkNormKind::kPerHead && head_dim <= Team<T, kMostPacks>::kMaxDim;
  if (!fits || !fits_wide(head_dim, kQkWidth<T>, tensors)) return false;
  if (head_dim <= Team<T, 1>::kMaxDim) {
    f(std::integral_constant<int, 1>());
  } else {
    f(std::integral_constant<int, kMostPacks>());
  }
  return true;
}

template <typename T>
int team_lanes(int head_dim, int packs) {
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(ceil_div(head_dim, kQkWidth<T> * packs))));
}

bool fits_wide_groups(const QkNormShape& shape, int width, std::initializer_list<const void*> tensors) {
  return shape.queries.groups == 1 && fits_wide(shape.queries.width, width, tensors) &&
         fits_wide(shape.keys.width, width, tensors);
}

// Blocks of a kernel that run at once, as far as there is work and workspace for them.
template <typename Kernel>
unsigned backward_blocks(CudaDevice& device, const Kernel& kernel, unsigned threads, int64_t parts, int64_t work,
                         int weight_columns) {
  int resident = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0), "qk_norm_backward");
  const int64_t at_once = std::max<int64_t>(resident, 1) * device.num_multiprocessors();
  return static_cast<unsigned>(
      std::min({work, ceil_div(at_once, parts), norm_backward_max_blocks(weight_columns)}));
}

// The arguments of a launch besides the input.
template <typename T, typename W>
struct QkBackwardLaunch {
  CudaDevice& device;
  const QkNormBackward& a;
  const QkNormShape& shape;
  QkBackwardTensors<T, W> tensors;

  bool wants_amax() const { return tensors.amax != nullptr; }

  // Each returns how many rows of d_weight_BC were written.
  template <int kPacks, typename Input>
  unsigned by_heads(const Input& x) const {
    const int width = shape.queries.width, lanes = team_lanes<T>(width, kPacks);
    const int64_t row_heads = a.num_heads + (wants_amax() ? 2 : 1) * a.num_kv_heads,
                  items = a.x.num_rows() * row_heads;
    PARKA_REQUIRE(items <= INT32_MAX);
    const auto kernel = qk_norm_backward_heads_kernel<Input, T, W, kPacks>;
    const unsigned blocks = backward_blocks(device, kernel, kTeamThreads, 1,
                                            ceil_div(items, int64_t{kTeamThreads / lanes}), shape.weight_columns);
    launch(device, "qk_norm_backward", kernel, {blocks, kTeamThreads}, x, tensors, shape,
           static_cast<unsigned>(items), static_cast<unsigned>(row_heads), lanes, 1.0f / static_cast<float>(width));
    return blocks;
  }
  template <bool kWide, typename Input>
  unsigned by_groups(const Input& x) const {
    const unsigned parts = wants_amax() ? 3 : 2;
    const unsigned threads = threads_for(shape.queries.width);
    const auto rows = static_cast<unsigned>(a.x.num_rows());
    const auto kernel = qk_norm_backward_groups_kernel<Input, T, W, kWide>;
    const unsigned blocks = backward_blocks(device, kernel, threads, parts, rows, shape.weight_columns);
    launch(device, "qk_norm_backward", kernel, {dim3(blocks, parts), threads}, x, tensors, shape, rows);
    return blocks;
  }
  // The fastest that takes the shape; 0 where none does.
  template <typename Input>
  unsigned wide(const Input& x) const {
    const std::initializer_list<const void*> pointers = {a.q_weight.data, a.k_weight.data, a.d_qkv.data};
    unsigned blocks = 0;
    if (!with_team_packs<T>(a.kind, shape.queries.width, pointers,
                            [&](auto packs) { blocks = by_heads<packs.value>(x); }) &&
        fits_wide_groups(shape, kQkWidth<T>, pointers)) {
      blocks = by_groups<true>(x);
    }
    return blocks;
  }
};

template <typename T, typename W>
unsigned launch_qk_backward(CudaDevice& device, const QkNormBackward& a, const QkNormShape& shape,
                            float* d_weight_BC) {
  const QkBackwardLaunch<T, W> launch{device, a, shape,
                                      QkBackwardTensors<T, W>{.rstd_TG = a.rstd.as<float>(),
                                                              .weight = {a.q_weight.as<W>(), a.k_weight.as<W>()},
                                                              .d_qkv_TN = a.d_qkv.as<T>(),
                                                              .d_weight_BC = d_weight_BC,
                                                              .amax = optional<float>(a.d_qkv_amax),
                                                              .weight_offset = a.weight_offset}};
  unsigned blocks = 0;
  if (PlainInput<T>::fits(a.x)) blocks = launch.wide(PlainInput<T>(a.x));
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<W, BFloat16>) {
    if (CodesInput<Float8E4M3>::fits(a.x, kQkWidth<T>)) {
      with_float8_type(a.x.data.dtype, [&](auto f8) { blocks = launch.wide(CodesInput<decltype(f8)>(a.x)); });
    }
  }
  return blocks > 0 ? blocks : launch.template by_groups<false>(AnySource(a.x));
}

}  // namespace

void qk_norm_backward(Device& any_device, const QkNormBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const QkNormShape shape = qk_norm_shape(a);
  auto* const d_weight_BC = static_cast<float*>(device.workspace("qk_norm_backward", workspace_of(a)));
  if (!a.d_qkv_amax.empty()) {
    check(cudaMemsetAsync(a.d_qkv_amax.data, 0, sizeof(float), device.stream()), "qk_norm_backward");
  }
  unsigned blocks = 0;
  with_plain_type(a.d_qkv.dtype, [&](auto x) {
    with_plain_type(a.q_weight.dtype, [&](auto w) {
      blocks = launch_qk_backward<decltype(x), decltype(w)>(device, a, shape, d_weight_BC);
    });
  });
  add_column_sums<true>(device, "qk_norm_backward", d_weight_BC, blocks, shape.weight_columns, a.d_q_weight,
                        a.d_k_weight, a.q_weight.dim[0]);
}

}  // namespace parka::cuda
