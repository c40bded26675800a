#include "kernels/cuda/launch.cuh"
#include "kernels/op/workspace.h"
#include "kernels/ops/moe/routing.h"

// A warp has a token: its lane n has the experts n, n + 32 and so on, and the n-th of those that are chosen.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
static_assert(kMostChosen <= kWarpSize && kMostExpertGroups <= kWarpSize);

__device__ inline int lane_of_thread() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ inline int64_t token_of_warp() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; }
__device__ inline int expert_of(int i) { return lane_of_thread() + i * kWarpSize; }

// Calls f with a constant: how many experts a lane has.
template <typename F>
void with_experts_of_lane(int64_t E, const F& f) {
  if (E <= kWarpSize) return f(std::integral_constant<int, 1>());
  if (E <= 2 * kWarpSize) return f(std::integral_constant<int, 2>());
  if (E <= 4 * kWarpSize) return f(std::integral_constant<int, 4>());
  if (E <= 8 * kWarpSize) return f(std::integral_constant<int, 8>());
  static_assert(kMostExperts <= 16 * kWarpSize);
  f(std::integral_constant<int, 16>());
}

// What a token's logits become. Where a lane has no expert, all are 0.
template <int kExperts>
struct TokenScores {
  float p[kExperts], softmax[kExperts];
  float lse, sum;  // log-sum-exp of the logits; sum of p

  __device__ TokenScores(const float* logits_E, int E, RouterScore score) {
    float logit[kExperts], max = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      logit[i] = expert_of(i) < E ? logits_E[expert_of(i)] : -INFINITY;
      max = fmaxf(max, logit[i]);
    }
    max = warp_max(max);
#pragma unroll
    for (int i = 0; i < kExperts; ++i) total += softmax[i] = expf(logit[i] - max);
    total = warp_sum(total);
    lse = max + logf(total);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      softmax[i] /= total;
      p[i] = score == RouterScore::kSoftmax ? softmax[i] : 1.0f / (1.0f + expf(-logit[i]));
      sum += p[i];
    }
    sum = warp_sum(sum);
  }

  __device__ float p_of(int expert) const {  // in every lane
    float x = 0.0f;
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      if (expert / kWarpSize == i) x = p[i];
    }
    return __shfl_sync(kFullWarp, x, expert % kWarpSize);
  }
};

// ---- The choice ----

// Numbers as keys of the same order, all above kNoKey.
constexpr uint32_t kNoKey = 0, kSign = 0x80000000u;
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x);
  return bits & kSign ? ~bits : bits | kSign;
}
__device__ inline float number_of(uint32_t key) { return __uint_as_float(key & kSign ? key ^ kSign : ~key); }

struct Largest {
  uint32_t key;
  int index;
};

// The largest key of a warp, whose lane n has those of indices n, n + 32...; of equal ones, that of the lowest
// index. It becomes kNoKey.
template <int kKeys>
__device__ Largest take_largest(uint32_t (&keys)[kKeys]) {
  uint32_t largest = kNoKey;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) largest = max(largest, keys[i]);
  largest = __reduce_max_sync(kFullWarp, largest);
  unsigned index = UINT32_MAX;
#pragma unroll
  for (int i = kKeys - 1; i >= 0; --i) {
    if (keys[i] == largest) index = static_cast<unsigned>(expert_of(i));
  }
  index = __reduce_min_sync(kFullWarp, index);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (static_cast<unsigned>(expert_of(i)) == index) keys[i] = kNoKey;
  }
  return {largest, static_cast<int>(index)};
}

// Leaves the keys of the best groups alone.
template <int kExperts>
__device__ void keep_groups(uint32_t (&keys)[kExperts], int E, const RouterRule& rule) {
  const int groups = static_cast<int>(rule.groups), in_group = E / groups;
  uint32_t score[1] = {kNoKey};  // of the lane's group
  for (int g = 0; g < groups; ++g) {
    uint32_t of_group[kExperts];
#pragma unroll
    for (int i = 0; i < kExperts; ++i) of_group[i] = expert_of(i) / in_group == g ? keys[i] : kNoKey;
    const float first = number_of(take_largest(of_group).key), second = number_of(take_largest(of_group).key);
    if (lane_of_thread() == g) score[0] = key_of(first + second);
  }
  uint32_t kept = 0;
  for (int n = 0; n < rule.groups_kept; ++n) kept |= 1u << take_largest(score).index;
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    if (expert_of(i) < E && (kept >> expert_of(i) / in_group & 1u) == 0) keys[i] = kNoKey;
  }
}

template <int kExperts>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const float* logits_TE, const float* bias_E, int32_t* experts_Tk, float* weights_Tk, int64_t T,
                 int E, int k, RouterRule rule) {
  wait_for_kernel_before();
  const int64_t t = token_of_warp();
  if (t >= T) return;
  const TokenScores<kExperts> scores(logits_TE + t * E, E, rule.score);
  uint32_t keys[kExperts];
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    const int e = expert_of(i);
    keys[i] = e >= E ? kNoKey : key_of(bias_E == nullptr ? scores.p[i] : scores.p[i] + bias_E[e]);
  }
  if (rule.groups > 1) keep_groups(keys, E, rule);
  const int lane = lane_of_thread();
  float own_p = 0.0f, sum = 0.0f;
  int own_expert = 0;
  for (int j = 0; j < k; ++j) {
    const int expert = take_largest(keys).index;
    const float p = scores.p_of(expert);
    sum += p;
    if (lane == j) {
      own_p = p;
      own_expert = expert;
    }
  }
  if (lane >= k) return;
  experts_Tk[t * k + lane] = own_expert;
  weights_Tk[t * k + lane] = own_p / (rule.normalize ? sum + 1e-20f : 1.0f) * rule.scaling;
}

// ---- What the router did ----

// A block has a piece of the tokens.
template <int kExperts>
__global__ void __launch_bounds__(kThreads)
    sum_pieces_kernel(const float* logits_TE, const int32_t* experts_Tk, float* pieces_PL, int64_t T,
                      int64_t tokens_of_piece, int E, int k, RouterScore score) {
  __shared__ int counts[kExperts * kWarpSize];
  __shared__ float sums[kWarps][kExperts * kWarpSize], lse_sums[kWarps];
  wait_for_kernel_before();
  const int lane = lane_of_thread(), warp = static_cast<int>(threadIdx.x / kWarpSize);
  for (int e = static_cast<int>(threadIdx.x); e < E; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = blockIdx.x * tokens_of_piece, end = min(first + tokens_of_piece, T);
  float p_sum[kExperts] = {}, lse_sum = 0.0f;
  for (int64_t t = first + warp; t < end; t += kWarps) {
    const TokenScores<kExperts> scores(logits_TE + t * E, E, score);
    if (lane < k) atomicAdd(&counts[experts_Tk[t * k + lane]], 1);
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      p_sum[i] += score == RouterScore::kSigmoid ? scores.p[i] / scores.sum : scores.p[i];
    }
    lse_sum += scores.lse * scores.lse;
  }
#pragma unroll
  for (int i = 0; i < kExperts; ++i) sums[warp][expert_of(i)] = p_sum[i];
  if (lane == 0) lse_sums[warp] = lse_sum;
  __syncthreads();
  float* const piece = pieces_PL + blockIdx.x * int64_t{2 * E + 1};
  const auto sum_of_warps = [](const auto& of_warp) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warp(w);
    return sum;
  };
  for (int e = static_cast<int>(threadIdx.x); e < E; e += kThreads) {
    piece[e] = static_cast<float>(counts[e]);
    piece[E + e] = sum_of_warps([&](int w) { return sums[w][e]; });
  }
  if (threadIdx.x == 0) piece[2 * E] = sum_of_warps([&](int w) { return lse_sums[w]; });
}

constexpr int kPieceRows = 32;  // of threads, which share the pieces

// A block has 32 numbers.
__global__ void __launch_bounds__(kPieceRows* kWarpSize)
    add_pieces_kernel(const float* pieces_PL, float* load_L, int num_pieces, int size) {
  __shared__ double sums[kPieceRows][kWarpSize];
  wait_for_kernel_before();
  const int i = static_cast<int>(blockIdx.x * kWarpSize + threadIdx.x);
  double sum = 0.0;
  if (i < size) {
    for (int n = static_cast<int>(threadIdx.y); n < num_pieces; n += kPieceRows)
      sum += pieces_PL[int64_t{n} * size + i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= size) return;
  sum = 0.0;
  for (int n = 0; n < kPieceRows; ++n) sum += sums[n][threadIdx.x];
  load_L[i] = static_cast<float>(sum);
}

// ---- Backward ----

template <typename D>
struct BackwardArguments {
  const float* logits_TE;
  const int32_t *experts_Tk, *rows_Tk;
  const float *d_weights_R, *load_E;
  D* d_logits_TE;
  int64_t T;
  int E, k;
  RouterRule rule;
  float balance_factor, z_factor;
};

// Of the balance loss, to the token's p.
template <int kExperts, typename D>
__device__ void balance_gradient(const BackwardArguments<D>& a, const TokenScores<kExperts>& scores,
                                 float (&d_p)[kExperts]) {
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    d_p[i] = expert_of(i) < a.E ? a.load_E[expert_of(i)] : 0.0f;
    mean += d_p[i] * (scores.p[i] / scores.sum);
  }
  mean = warp_sum(mean);
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    d_p[i] = a.balance_factor * (a.rule.score == RouterScore::kSigmoid ? (d_p[i] - mean) / scores.sum : d_p[i]);
  }
}

template <int kExperts, typename D>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(BackwardArguments<D> a) {
  wait_for_kernel_before();
  const int64_t t = token_of_warp();
  if (t >= a.T) return;
  const int lane = lane_of_thread();
  const TokenScores<kExperts> scores(a.logits_TE + t * a.E, a.E, a.rule.score);
  const bool has_choice = lane < a.k;
  const int own_expert = has_choice ? a.experts_Tk[t * a.k + lane] : 0;
  const int64_t slot = t * a.k + lane;
  const float d_weight = has_choice ? a.d_weights_R[a.rows_Tk == nullptr ? slot : a.rows_Tk[slot]] : 0.0f;
  float own_p = 0.0f, divisor = 0.0f;
  for (int j = 0; j < a.k; ++j) {
    const float p = scores.p_of(__shfl_sync(kFullWarp, own_expert, j));
    divisor += p;
    if (lane == j) own_p = p;
  }
  divisor = a.rule.normalize ? divisor + 1e-20f : 1.0f;
  const float weights_mean = a.rule.normalize ? warp_sum(own_p / divisor * d_weight) : 0.0f;
  const float own_d_p = a.rule.scaling * (d_weight - weights_mean) / divisor;
  float d_p[kExperts] = {};
  if (a.balance_factor != 0.0f) balance_gradient(a, scores, d_p);
  for (int j = 0; j < a.k; ++j) {
    const int expert = __shfl_sync(kFullWarp, own_expert, j);
    const float x = __shfl_sync(kFullWarp, own_d_p, j);
#pragma unroll
    for (int i = 0; i < kExperts; ++i) {
      if (expert_of(i) == expert) d_p[i] += x;
    }
  }
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kExperts; ++i) mean += scores.p[i] * d_p[i];
  mean = warp_sum(mean);
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    const float p = scores.p[i];
    float d_logit = p * (a.rule.score == RouterScore::kSoftmax ? d_p[i] - mean : d_p[i] * (1.0f - p));
    if (a.z_factor != 0.0f) d_logit += 2.0f * a.z_factor * scores.lse * scores.softmax[i];
    if (expert_of(i) < a.E) a.d_logits_TE[t * a.E + expert_of(i)] = from_float<D>(d_logit);
  }
}

}  // namespace

void route(Device& device, const Route& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1];
  with_experts_of_lane(E, [&](auto experts) {
    launch_early(as_cuda(device), "route", route_kernel<decltype(experts)::value>, {ceil_div(T, kWarps), kThreads},
                 static_cast<const float*>(a.logits.as<float>()),
                 static_cast<const float*>(optional<float>(a.bias)), a.experts.as<int32_t>(), a.weights.as<float>(),
                 T, static_cast<int>(E), static_cast<int>(a.experts.dim[1]), a.rule);
  });
}

void router_load(Device& any_device, const RouterLoad& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1], size = 2 * E + 1, pieces = router_load_pieces(T);
  auto* const pieces_PL = static_cast<float*>(device.workspace("router_load", workspace_of(a)));
  if (T > 0) {
    with_experts_of_lane(E, [&](auto experts) {
      launch_early(device, "router_load", sum_pieces_kernel<decltype(experts)::value>, {pieces, kThreads},
                   static_cast<const float*>(a.logits.as<float>()),
                   static_cast<const int32_t*>(a.experts.as<int32_t>()), pieces_PL, T, ceil_div(T, pieces),
                   static_cast<int>(E), static_cast<int>(a.experts.dim[1]), a.score);
    });
  }
  launch_early(device, "router_load", add_pieces_kernel, {ceil_div(size, kWarpSize), dim3(kWarpSize, kPieceRows)},
               static_cast<const float*>(pieces_PL), a.load.as<float>(), static_cast<int>(pieces),
               static_cast<int>(size));
}

void route_backward(Device& device, const RouteBackward& a) {
  const int64_t T = a.logits.dim[0], E = a.logits.dim[1];
  with_plain_type(a.d_logits.dtype, [&](auto d) {
    using D = decltype(d);
    const BackwardArguments<D> arguments = {
        .logits_TE = a.logits.as<float>(),
        .experts_Tk = a.experts.as<int32_t>(),
        .rows_Tk = optional<int32_t>(a.row_of_slot),
        .d_weights_R = a.d_row_weights.as<float>(),
        .load_E = optional<float>(a.load),
        .d_logits_TE = a.d_logits.as<D>(),
        .T = T,
        .E = static_cast<int>(E),
        .k = static_cast<int>(a.experts.dim[1]),
        .rule = a.rule,
        .balance_factor = a.balance_factor,
        .z_factor = a.z_factor,
    };
    with_experts_of_lane(E, [&](auto experts) {
      launch_early(as_cuda(device), "route_backward", route_backward_kernel<decltype(experts)::value, D>,
                   {ceil_div(T, kWarps), kThreads}, arguments);
    });
  });
}

}  // namespace parka::cuda
