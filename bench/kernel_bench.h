#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "kernels/op/define.h"
#include "kernels/ops.h"

// Times ops alone, on tensors of their own.
namespace parka::bench {

inline constexpr int kSets = 3;
constexpr int kRuns = 20;
constexpr int kMostInARow = 8 * kSets;  // so that time stamps do not show
constexpr double kRunSeconds = 0.01;    // enough for an op that takes long to be run less often in a row

struct ModelShape {
  const char* name;
  NormKind norm;
  int64_t T, S, d, heads, f, vocab, chunk;
};

// Tensors of one measurement, released with it.
class Tensors {
 public:
  explicit Tensors(Device& device) : device_(device) {}
  ~Tensors() {
    for (void* p : memory_) device_.release(p);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  TensorView make(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView t(nullptr, dtype, shape);
    memory_.push_back(t.data = device_.allocate(t.bytes()));
    return t;
  }
  TensorView bf16(std::initializer_list<int64_t> shape) {
    const TensorView t = make(DType::kBF16, shape);
    static const std::vector<BFloat16> pattern = [] {
      std::vector<BFloat16> values(size_t{1} << 20);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = encode_bf16(static_cast<float>(philox_normal2(1, 2, i)[0]));
      }
      return values;
    }();
    const auto piece = static_cast<int64_t>(pattern.size());
    for (int64_t done = 0; done < t.numel(); done += piece) {
      device_.copy_to_device(t.as<BFloat16>() + done, pattern.data(), 2 * std::min(piece, t.numel() - done));
    }
    return t;
  }
  TensorView fp32(std::initializer_list<int64_t> shape) {
    const TensorView t = make(DType::kF32, shape);
    device_.copy_to_device(t.data, std::vector<float>(static_cast<size_t>(t.numel()), 1.0f).data(), t.bytes());
    return t;
  }
  // FP8 codes of any finite values, and scales of 1; a kTensor matrix gets `scale`, if given.
  ScaledView fp8(DType dtype, int64_t rows, int64_t cols, Scaling scaling, int64_t group = 0,
                 const TensorView& scale = {}) {
    const TensorView codes = make(dtype, {rows, cols});
    static const std::vector<uint8_t> pattern = [] {
      std::vector<uint8_t> bytes(size_t{1} << 20);
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<uint8_t>(philox4x32(5, 6, i)[0] & 0xb7);  // below 2 in both formats
      }
      return bytes;
    }();
    const auto piece = static_cast<int64_t>(pattern.size());
    for (int64_t done = 0; done < codes.numel(); done += piece) {
      device_.copy_to_device(static_cast<uint8_t*>(codes.data) + done, pattern.data(),
                             std::min(piece, codes.numel() - done));
    }
    if (scaling == Scaling::kTensor) return {codes, scale.empty() ? fp32({1}) : scale, scaling};
    const auto shape = scale_shape(scaling, group, rows, cols);
    return {codes, bf16_ones(shape[0], shape[1]), scaling, group};
  }
  // An optimizer's first moment in fp8 with range expansion.
  MomentView expanded_moment(int64_t numel) {
    const int64_t groups = ceil_div(numel, kMomentGroup);
    const TensorView codes = fp8(DType::kE4M3, 1, numel, Scaling::kTensor).data.reshaped({numel});
    const TensorView exponent = make(DType::kU8, {groups});
    copy(exponent, std::vector<uint8_t>(static_cast<size_t>(groups), 32).data());
    return {codes, fp32({groups}), exponent};
  }
  void copy(const TensorView& target, const void* host) {
    device_.copy_to_device(target.data, host, target.bytes());
  }
  void fill_zero(const TensorView& target) { device_.fill_zero(target.data, target.bytes()); }
  // Token ids with the skew of text.
  TensorView ids(int64_t count, int64_t vocab, std::vector<int32_t>* host = nullptr) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      const double u = uniform_open(philox4x32(3, 4, static_cast<uint64_t>(i))[0]);
      values[i] = static_cast<int32_t>(std::pow(static_cast<double>(vocab), u) - 1.0);
    }
    if (host) *host = values;
    return upload(values);
  }
  TensorView upload(const std::vector<int32_t>& values) {
    const TensorView t = make(DType::kI32, {static_cast<int64_t>(values.size())});
    device_.copy_to_device(t.data, values.data(), t.bytes());
    return t;
  }

 private:
  TensorView bf16_ones(int64_t rows, int64_t cols) {
    const TensorView t = make(DType::kBF16, {rows, cols});
    const std::vector<BFloat16> ones(static_cast<size_t>(t.numel()), encode_bf16(1.0f));
    device_.copy_to_device(t.data, ones.data(), t.bytes());
    return t;
  }

  Device& device_;
  std::vector<void*> memory_;
};

class Bench {
 public:
  // Times only ops whose names begin with `op`.
  Bench(Device& device, double copy_bandwidth, std::string op)
      : device_(device), copy_bandwidth_(copy_bandwidth), op_(std::move(op)) {}

  // `make(tensors)` gives the arguments of a run on tensors of its own.
  template <typename Make, typename Op>
  void time(const char* model, const char* name, const Make& make, const Op& op) {
    if (!std::string_view(name).starts_with(op_)) return;
    Tensors tensors(device_);
    std::vector<decltype(make(tensors))> sets;
    for (int i = 0; i < kSets; ++i) sets.push_back(make(tensors));
    const Times times = time_runs([&](int i) { op(device_, sets[i]); });
    const OpCost cost = cost_of(sets.front());
    std::printf(
        "{\"model\": \"%s\", \"op\": \"%s\", \"shape\": \"%s\", \"us\": %.2f, \"us_least\": %.2f, "
        "\"us_most\": %.2f, \"bytes\": %.0f, \"copy_fraction\": %.4f, \"us_copy_of_bytes\": %.2f, "
        "\"tflops\": %.1f}\n",
        model, name, cost.shape.c_str(), 1e6 * times.median, 1e6 * times.least, 1e6 * times.most, cost.bytes,
        cost.bytes / times.median / copy_bandwidth_,
        1e6 * time_copy(static_cast<int64_t>(cost.bytes / 2) / 256 * 256), 1e-12 * cost.flop / times.median);
    std::fflush(stdout);
  }

 private:
  struct Times {
    double median, least, most;
  };

  // Seconds that run(i) takes, i being one of kSets in turn: several runs in a row, replayed as a step's ops are.
  template <typename Run>
  Times time_runs(const Run& run) {
    const auto seconds_each = [&](int in_a_row, const auto& queue) {
      const auto begin = device_.mark();
      queue();
      return device_.mark()->seconds_since(*begin) / in_a_row;
    };
    const auto queue = [&](int in_a_row) {
      for (int i = 0; i < in_a_row; ++i) run(i % kSets);
    };
    queue(kSets);
    const double first = seconds_each(kSets, [&] { queue(kSets); });
    const int in_a_row = std::min(kMostInARow, kSets * static_cast<int>(std::ceil(kRunSeconds / (kSets * first))));
    std::unique_ptr<Recording> recording;
    const auto replay = [&] { device_.replay(recording, [&] { queue(in_a_row); }); };
    replay();
    std::vector<double> seconds;
    for (int n = 0; n < kRuns; ++n) seconds.push_back(seconds_each(in_a_row, replay));
    std::sort(seconds.begin(), seconds.end());
    return {seconds[seconds.size() / 2], seconds.front(), seconds.back()};
  }

  // The median time of a copy that reads and writes `bytes` each.
  double time_copy(int64_t bytes) {
    Tensors tensors(device_);
    std::array<std::array<void*, 2>, kSets> sets;
    for (auto& set : sets) {
      for (void*& memory : set) memory = tensors.make(DType::kU8, {std::max<int64_t>(bytes, 1)}).data;
    }
    return time_runs([&](int i) { device_.copy(sets[i][1], sets[i][0], bytes); }).median;
  }

 private:
  Device& device_;
  double copy_bandwidth_;
  std::string op_;
};

// Empty where the norm has none: rmsnorm has weights and no means, OLMo's layernorm means and no weights.
inline TensorView norm_weight(Tensors& t, const ModelShape& m) {
  return m.norm == NormKind::kRmsNorm ? t.bf16({m.d}) : TensorView();
}
inline TensorView norm_weight_gradient(Tensors& t, const ModelShape& m) {
  return m.norm == NormKind::kRmsNorm ? t.fp32({m.d}) : TensorView();
}
inline TensorView norm_mean(Tensors& t, const ModelShape& m) {
  return m.norm == NormKind::kLayerNorm ? t.fp32({m.T}) : TensorView();
}

inline TensorView cos_sin(Tensors& t, const ModelShape& m) { return t.fp32({m.S, m.d / m.heads}); }

// A first step on bf16 weights and gradients with a split master, in the moments' format.
inline AdamwStep make_adamw_step(Tensors& t, const MomentView& exp_avg, const MomentView& exp_avg_sq) {
  const int64_t N = exp_avg.values.numel();
  return {.weight = t.bf16({N}),
          .master = t.make(DType::kU16, {N}),
          .master_form = MasterForm::kFp32,
          .gradient = t.bf16({N}),
          .exp_avg = exp_avg,
          .exp_avg_sq = exp_avg_sq,
          .lr = 1e-6f,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias_correction1 = 0.1f,
          .bias_correction2 = 0.05f,
          .grad_scale = t.fp32({1}),
          .seed = 1,
          .step = 1,
          .first_element = 0};
}

// attention_kernels.cpp: of models that train and decode, and over all keys of vision towers.
void bench_attention(Bench& bench, const ModelShape& model);
void bench_towers(Bench& bench);
void bench_decode(Bench& bench, const ModelShape& model);
// finetune_kernels.cpp: what is beside frozen weights: adapters and their steps, side networks, 4 bits.
void bench_finetune(Bench& bench, const ModelShape& model);
// float8_kernels.cpp: the ops of the FP8 recipes.
void bench_float8(Bench& bench, const ModelShape& model);
// head_kernels.cpp: the head's products and loss, by the rows of a chunk.
void bench_head(Bench& bench);
// vision_kernels.cpp: the ops of vision towers, at the sizes of this one.
inline constexpr const char* kVisionModel = "so400m";
void bench_vision(Bench& bench);
// muon_kernels.cpp: Muon's ops.
void bench_muon(Bench& bench);
// moe_kernels.cpp: the ops of mixtures of experts.
void bench_moe(Device& device, Bench& bench);
// moe_products.cpp: the products of experts.
void bench_moe_products(Bench& bench);
// amax_kernels.cpp: the maximum of a matrix, found in a pass of its own or on the way.
void bench_amax(Device& device, double copy_bandwidth);

}  // namespace parka::bench
