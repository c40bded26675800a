// Every op of a model's step alone, at the shapes of a model, against the copy bandwidth of the device:
//   bench_kernels [MODEL...]     olmo-1b llama2-7b
// One line of JSON per op: median, least and most time of many runs over several sets of tensors, so that no cache
// holds what is read. Matrix products are timed by `parka tune` and `parka bench`.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "core/philox.h"
#include "kernels/op_cost.h"
#include "kernels/ops.h"

namespace parka {
namespace {

constexpr int kSets = 3;
constexpr int kRuns = 20;
constexpr int kInARow = 4 * kSets;  // so that launches and time stamps do not show

struct ModelShape {
  const char* name;
  NormKind norm;
  int64_t T, S, d, heads, f, vocab, chunk;
};
constexpr ModelShape kModels[] = {
    {"olmo-1b", NormKind::kLayerNorm, 32768, 2048, 2048, 16, 8192, 50304, 4096},
    {"llama2-7b", NormKind::kRmsNorm, 8192, 2048, 4096, 32, 11008, 32000, 4096},
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
  Device& device_;
  std::vector<void*> memory_;
};

class Bench {
 public:
  Bench(Device& device, double copy_bandwidth) : device_(device), copy_bandwidth_(copy_bandwidth) {}

  // `make(tensors)` gives the arguments of a run on tensors of its own.
  template <typename Make, typename Op>
  void time(const char* model, const char* name, const Make& make, const Op& op) {
    Tensors tensors(device_);
    std::vector<decltype(make(tensors))> sets;
    for (int i = 0; i < kSets; ++i) sets.push_back(make(tensors));
    for (const auto& arguments : sets) op(device_, arguments);
    std::vector<double> seconds;
    for (int run = 0; run < kRuns; ++run) {
      const auto begin = device_.mark();
      for (int i = 0; i < kInARow; ++i) op(device_, sets[i % kSets]);
      const auto end = device_.mark();
      seconds.push_back(end->seconds_since(*begin) / kInARow);
    }
    std::sort(seconds.begin(), seconds.end());
    const OpCost cost = cost_of(sets.front());
    const double median = seconds[seconds.size() / 2];
    std::printf(
        "{\"model\": \"%s\", \"op\": \"%s\", \"shape\": \"%s\", \"us\": %.2f, \"us_least\": %.2f, "
        "\"us_most\": %.2f, \"bytes\": %.0f, \"copy_fraction\": %.4f, \"tflops\": %.1f}\n",
        model, name, cost.shape.c_str(), 1e6 * median, 1e6 * seconds.front(), 1e6 * seconds.back(), cost.bytes,
        cost.bytes / median / copy_bandwidth_, 1e-12 * cost.flop / median);
  }

 private:
  Device& device_;
  double copy_bandwidth_;
};

void bench_activations(Bench& bench, const ModelShape& m) {
  const bool layernorm = m.norm == NormKind::kLayerNorm;
  const auto weight = [&](Tensors& t) { return layernorm ? TensorView() : t.bf16({m.d}); };
  const auto mean = [&](Tensors& t) { return layernorm ? t.fp32({m.T}) : TensorView(); };
  bench.time(
      m.name, "norm_forward",
      [&](Tensors& t) {
        return NormForward{.kind = m.norm,
                           .eps = 1e-5f,
                           .residual = t.bf16({m.T, m.d}),
                           .branch = t.bf16({m.T, m.d}),
                           .weight = weight(t),
                           .residual_out = t.bf16({m.T, m.d}),
                           .y = t.bf16({m.T, m.d}),
                           .mean = mean(t),
                           .rstd = t.fp32({m.T})};
      },
      norm_forward);
  bench.time(
      m.name, "norm_recompute",
      [&](Tensors& t) {
        return NormRecompute{.kind = m.norm,
                             .x = t.bf16({m.T, m.d}),
                             .weight = weight(t),
                             .mean = mean(t),
                             .rstd = t.fp32({m.T}),
                             .y = t.bf16({m.T, m.d})};
      },
      norm_recompute);
  bench.time(
      m.name, "norm_backward",
      [&](Tensors& t) {
        const TensorView d_residual = t.bf16({m.T, m.d});
        return NormBackward{.kind = m.norm,
                            .x = t.bf16({m.T, m.d}),
                            .weight = weight(t),
                            .mean = mean(t),
                            .rstd = t.fp32({m.T}),
                            .d_y = t.bf16({m.T, m.d}),
                            .d_residual = d_residual,
                            .d_residual_out = d_residual,
                            .d_weight = layernorm ? TensorView() : t.fp32({m.d})};
      },
      norm_backward);
  const auto cos_sin = [&](Tensors& t) { return t.fp32({m.S, m.d / m.heads}); };
  bench.time(
      m.name, "rope_forward",
      [&](Tensors& t) {
        return RopeForward{t.bf16({m.T, 3 * m.d}), cos_sin(t), m.heads, m.heads, {}};
      },
      rope_forward);
  bench.time(
      m.name, "rope_backward",
      [&](Tensors& t) {
        return RopeBackward{t.bf16({m.T, 3 * m.d}), cos_sin(t), m.heads, m.heads, {}, {}};
      },
      rope_backward);
  bench.time(
      m.name, "swiglu_forward",
      [&](Tensors& t) {
        return SwigluForward{.up_gate = t.bf16({m.T, 2 * m.f}), .product = t.bf16({m.T, m.f})};
      },
      swiglu_forward);
  bench.time(
      m.name, "swiglu_backward",
      [&](Tensors& t) {
        return SwigluBackward{.up_gate = t.bf16({m.T, 2 * m.f}),
                              .d_product = t.bf16({m.T, m.f}),
                              .d_up_gate = t.bf16({m.T, 2 * m.f})};
      },
      swiglu_backward);
}

void bench_attention(Bench& bench, const ModelShape& m) {
  const int64_t B = m.T / m.S;
  const float scale = 0.088f;
  bench.time(
      m.name, "attention_forward",
      [&](Tensors& t) {
        return AttentionForward{
            t.bf16({m.T, 3 * m.d}), t.bf16({m.T, m.d}), t.fp32({B, m.heads, m.S}), m.S, m.heads, m.heads, scale};
      },
      attention_forward);
  bench.time(
      m.name, "attention_backward",
      [&](Tensors& t) {
        return AttentionBackward{t.bf16({m.T, 3 * m.d}),
                                 t.bf16({m.T, m.d}),
                                 t.bf16({m.T, m.d}),
                                 t.fp32({B, m.heads, m.S}),
                                 t.bf16({m.T, 3 * m.d}),
                                 m.S,
                                 m.heads,
                                 m.heads,
                                 scale};
      },
      attention_backward);
}

void bench_ends(Bench& bench, const ModelShape& m) {
  bench.time(
      m.name, "embedding_forward",
      [&](Tensors& t) {
        return EmbeddingForward{t.ids(m.T, m.vocab), t.bf16({m.vocab, m.d}), t.bf16({m.T, m.d})};
      },
      embedding_forward);
  bench.time(
      m.name, "embedding_backward",
      [&](Tensors& t) {
        std::vector<int32_t> ids;
        const TensorView on_device = t.ids(m.T, m.vocab, &ids);
        return EmbeddingBackward{.ids = on_device,
                                 .order = t.upload(embedding_order(ids.data(), m.T, m.vocab)),
                                 .d_out = t.bf16({m.T, m.d}),
                                 .d_table = t.bf16({m.vocab, m.d})};
      },
      embedding_backward);
  bench.time(
      m.name, "cross_entropy",
      [&](Tensors& t) {
        return CrossEntropy{.logits = t.bf16({m.chunk, m.vocab}),
                            .targets = t.ids(m.chunk, m.vocab),
                            .loss = t.fp32({m.chunk}),
                            .z_loss_value = {}};
      },
      cross_entropy);
}

void bench_optimizer(Bench& bench, const ModelShape& m) {
  const int64_t N = 2 * m.f * m.d;  // the largest tensor of a block
  bench.time(
      m.name, "sum_of_squares",
      [&](Tensors& t) {
        return SumOfSquares{{t.bf16({N})}, t.fp32({1}), t.fp32({1})};
      },
      sum_of_squares);
  bench.time(
      m.name, "adamw_step",
      [&](Tensors& t) {
        const TensorView m1 = t.bf16({N}), m2 = t.bf16({N});
        return AdamwStep{.weight = t.bf16({N}),
                         .master = t.make(DType::kU16, {N}),
                         .master_form = MasterForm::kFp32Split,
                         .gradient = t.bf16({N}),
                         .exp_avg = {m1, {}, {}},
                         .exp_avg_sq = {m2, {}, {}},
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
      },
      adamw_step);
}

double copy_bandwidth(Device& device) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  constexpr int kCopies = 20;
  Tensors tensors(device);
  const TensorView a = tensors.bf16({kBytes / 2}), b = tensors.bf16({kBytes / 2});
  device.copy(b.data, a.data, kBytes);
  const auto begin = device.mark();
  for (int i = 0; i < kCopies; ++i) device.copy(b.data, a.data, kBytes);
  return 2.0 * kBytes * kCopies / device.mark()->seconds_since(*begin);
}

int run(int argc, char** argv) {
  if (num_cuda_devices() == 0) {
    std::fprintf(stderr, "kernels: there is no GPU\n");
    return 2;
  }
  const std::unique_ptr<Device> device = make_cuda_device();
  constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
  device->set_workspace(device->allocate(kWorkspaceBytes), kWorkspaceBytes);
  const double copy = copy_bandwidth(*device);
  std::printf("{\"device\": \"%s\", \"copy_gb_s\": %.1f}\n", device->name().c_str(), 1e-9 * copy);
  Bench bench(*device, copy);
  for (const ModelShape& model : kModels) {
    const bool wanted = argc == 1 || std::any_of(argv + 1, argv + argc,
                                                 [&](const char* arg) { return std::string(arg) == model.name; });
    if (!wanted) continue;
    bench_activations(bench, model);
    bench_attention(bench, model);
    bench_ends(bench, model);
    bench_optimizer(bench, model);
  }
  return 0;
}

}  // namespace
}  // namespace parka

int main(int argc, char** argv) {
  try {
    return parka::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernels: %s\n", error.what());
    return 1;
  }
}
