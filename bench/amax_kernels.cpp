#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <utility>

#include "bench/kernel_bench.h"

// What the maximum magnitude of a matrix costs, which a scale for the whole tensor needs before its first code can
// be written, in microseconds:
// - full: a pass of its own over the matrix, Quantize that searches less Quantize that is given the maximum;
// - groups: the same over the maxima of 1x16 groups, where those are there;
// - attention: what a kernel that makes the matrix takes longer for finding the maximum on the way, here
//   attention_forward with out_amax less the same without;
// - norm_backward: the same, with codes less without them and a Quantize that is given the maximum.
// Each is the difference of two timings, taken in turn so that a card that warms up favours neither.
namespace parka::bench {
namespace {

constexpr int64_t kGroup = 16;
constexpr int kPairs = 60, kWarmups = 3;            // a recording is made by the second run
constexpr double kMostRounds = 100;                 // over all sets, in one recording
constexpr int64_t kHeadDim = 128, kSequence = 512;  // short: what is common to both timings then hides less
constexpr int64_t kWidestNorm = 8192;               // columns up to which norm_backward holds a row in registers

struct AmaxShape {
  int64_t rows, cols;
};
constexpr std::array<AmaxShape, 4> kShapes = {{{16384, 11008}, {8192, 11008}, {16384, 4096}, {8192, 4096}}};

// Seconds of one run: the median and the quartiles of many.
struct Spread {
  double median, low, high;
};

Spread spread_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds[seconds.size() / 4], seconds[3 * seconds.size() / 4]};
}

struct Difference {
  Spread seconds;  // of a run of `with` less one of `without`
  double without;  // median
};

// Work that is recorded, so that the host's time for launches does not show in that of short kernels.
class RepeatedOp {
 public:
  RepeatedOp(Device& device, int count, std::function<void(int)> op)
      : device_(device), count_(count), work_([count, op = std::move(op)] {
          for (int i = 0; i < count; ++i) op(i);
        }) {}

  double seconds_each() {
    const auto begin = device_.mark();
    device_.replay(recording_, work_);
    return device_.mark()->seconds_since(*begin) / count_;
  }

 private:
  Device& device_;
  int count_;
  std::function<void()> work_;
  std::unique_ptr<Recording> recording_;
};

// `make(tensors)` gives what both need to run.
template <typename Make, typename With, typename Without>
Difference difference(Device& device, const Make& make, const With& with, const Without& without) {
  Tensors tensors(device);
  std::vector<decltype(make(tensors))> sets;
  sets.reserve(kSets);
  for (int i = 0; i < kSets; ++i) sets.push_back(make(tensors));
  const auto repeated = [&](const auto& op, int count) {
    return RepeatedOp(device, count, [&device, &sets, op](int i) { op(device, sets[i % kSets]); });
  };
  RepeatedOp few = repeated(without, kSets);
  for (int i = 0; i < kWarmups; ++i) few.seconds_each();
  const double rounds = std::ceil(kRunSeconds / (kSets * few.seconds_each()));
  const int count = kSets * static_cast<int>(std::clamp(rounds, 1.0, kMostRounds));
  RepeatedOp longer = repeated(with, count), shorter = repeated(without, count);
  for (int i = 0; i < kWarmups; ++i) {
    longer.seconds_each();
    shorter.seconds_each();
  }
  std::vector<double> differences, withouts;
  differences.reserve(kPairs);
  withouts.reserve(kPairs);
  for (int pair = 0; pair < kPairs; ++pair) {
    const bool longer_first = pair % 2 == 0;
    const double first = (longer_first ? longer : shorter).seconds_each();
    const double second = (longer_first ? shorter : longer).seconds_each();
    differences.push_back(longer_first ? first - second : second - first);
    withouts.push_back(longer_first ? second : first);
  }
  return {spread_of(std::move(differences)), spread_of(std::move(withouts)).median};
}

// A pass over a bf16 matrix.
Difference pass_alone(Device& device, int64_t rows, int64_t cols) {
  return difference(
      device,
      [&](Tensors& t) {
        return Quantize{.x = t.bf16({rows, cols}),
                        .out = t.fp8(DType::kE4M3, rows, cols, Scaling::kTensor),
                        .amax = t.fp32({1})};
      },
      [](Device& d, Quantize op) {
        op.amax = {};
        quantize(d, op);
      },
      quantize);
}

Difference within_attention(Device& device, const AmaxShape& shape) {
  const int64_t T = shape.rows, heads = shape.cols / kHeadDim;
  return difference(
      device,
      [&](Tensors& t) {
        return AttentionForward{.qkv = t.bf16({T, 3 * shape.cols}),
                                .out = t.bf16({T, shape.cols}),
                                .lse = t.fp32({T / kSequence, heads, kSequence}),
                                .sequence_length = kSequence,
                                .num_heads = heads,
                                .num_kv_heads = heads,
                                .scale = 0.088f,
                                .out_amax = t.fp32({1})};
      },
      attention_forward,
      [](Device& d, AttentionForward op) {
        op.out_amax = {};
        attention_forward(d, op);
      });
}

// The gradient and its codes by norm_backward alone; or without codes, followed by a Quantize that has the maximum.
Difference within_norm_backward(Device& device, const AmaxShape& shape) {
  struct Ops {
    NormBackward with, without;
    Quantize codes;
  };
  const int64_t T = shape.rows, C = shape.cols;
  return difference(
      device,
      [&](Tensors& t) {
        const TensorView d_residual = t.bf16({T, C});
        NormBackward norm{.kind = NormKind::kLayerNorm,
                          .x = t.bf16({T, C}),
                          .mean = t.fp32({T}),
                          .rstd = t.fp32({T}),
                          .d_y = t.bf16({T, C}),
                          .d_residual = d_residual,
                          .d_residual_out = t.bf16({T, C})};
        const Quantize codes{
            .x = norm.d_residual_out, .out = t.fp8(DType::kE5M2, T, C, Scaling::kTensor), .amax = t.fp32({1})};
        NormBackward with = norm;
        with.d_quantized = codes.out;
        return Ops{with, norm, codes};
      },
      [](Device& d, const Ops& ops) { norm_backward(d, ops.with); },
      [](Device& d, const Ops& ops) {
        norm_backward(d, ops.without);
        quantize(d, ops.codes);
      });
}

void print_times(const char* name, const Difference& d) {
  std::printf(", \"%s_us\": %.2f, \"%s_quartiles_us\": [%.2f, %.2f], \"%s_without_us\": %.2f", name,
              1e6 * d.seconds.median, name, 1e6 * d.seconds.low, 1e6 * d.seconds.high, name, 1e6 * d.without);
}

// Of a full pass to what is found on the way; where that does not stand out of the spread of its timings, to the
// upper quartile: then the ratio is at least this.
void print_ratio(const char* name, const Difference& full, const Difference& on_the_way) {
  const Spread& s = on_the_way.seconds;
  const bool is_measured = s.low > 0;
  const double least = is_measured ? s.median : s.high;
  if (least <= 0) {
    std::printf(", \"%s_ratio\": null, \"%s_ratio_is_bound\": true", name, name);
  } else {
    std::printf(", \"%s_ratio\": %.1f, \"%s_ratio_is_bound\": %s", name, full.seconds.median / least, name,
                is_measured ? "false" : "true");
  }
}

}  // namespace

void bench_amax(Device& device, double copy_bandwidth) {
  for (const AmaxShape& shape : kShapes) {
    const double bytes = 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.cols);
    const Difference full = pass_alone(device, shape.rows, shape.cols);
    const Difference groups = pass_alone(device, shape.rows, shape.cols / kGroup);
    const Difference attention = within_attention(device, shape);
    std::printf("{\"op\": \"amax\", \"rows\": %lld, \"cols\": %lld, \"bytes\": %.0f, \"full_copy_fraction\": %.4f",
                static_cast<long long>(shape.rows), static_cast<long long>(shape.cols), bytes,
                bytes / full.seconds.median / copy_bandwidth);
    print_times("full", full);
    print_times("groups", groups);
    print_ratio("groups", full, groups);
    print_times("attention", attention);
    print_ratio("attention", full, attention);
    if (shape.cols <= kWidestNorm) {
      const Difference norm = within_norm_backward(device, shape);
      print_times("norm_backward", norm);
      print_ratio("norm_backward", full, norm);
    }
    std::printf("}\n");
    std::fflush(stdout);
  }
}

}  // namespace parka::bench
