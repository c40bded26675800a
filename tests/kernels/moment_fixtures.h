#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "core/split_float.h"
#include "kernels/ops/optimizer/adamw.h"
#include "tests/kernels/op_checks.h"

namespace parka::test {

// How a moment is stored.
struct MomentStorage {
  DType format;
  bool expanded = false;
};

inline const std::vector<MomentStorage> kFloat8Storages = {{DType::kE4M3, false}, {DType::kE4M3, true}};

// The tensors of one moment of N elements; poisoned unless `zeroed`, which is how a moment starts.
class TestMoment {
 public:
  TestMoment(Device& device, const MomentStorage& storage, int64_t N, bool zeroed = false)
      : values(device, storage.format, {N}, fill(N, zeroed)),
        amax(device, DType::kF32, {ceil_div(N, kMomentGroup)}, fill(ceil_div(N, kMomentGroup), zeroed)),
        exponent(device, DType::kU8, {ceil_div(N, kMomentGroup)}, fill(ceil_div(N, kMomentGroup), zeroed)),
        storage_(storage) {}

  MomentView view() const {
    MomentView moment{values, {}, {}};
    if (is_float8(storage_.format)) moment.amax = amax;
    if (storage_.expanded) moment.exponent = exponent;
    return moment;
  }
  // The part [begin, end) as a moment of its own; `begin` is a multiple of 128.
  MomentView range(int64_t begin, int64_t end) const {
    const int64_t first_group = begin / kMomentGroup, groups = ceil_div(end - begin, kMomentGroup);
    MomentView moment = view();
    moment.values = moment.values.rows(begin, end - begin);
    if (!moment.amax.empty()) moment.amax = moment.amax.rows(first_group, groups);
    if (!moment.exponent.empty()) moment.exponent = moment.exponent.rows(first_group, groups);
    return moment;
  }
  // Of a moment stored alike on the same device.
  void copy_from(Device& device, const TestMoment& other) {
    for (const auto& [to, from] :
         {std::pair{&values, &other.values}, {&amax, &other.amax}, {&exponent, &other.exponent}})
      device.copy(to->view().data, from->view().data, from->view().bytes());
  }
  bool guard_intact() const { return values.guard_intact() && amax.guard_intact() && exponent.guard_intact(); }
  bool same_bits(const TestMoment& other) const {
    return values.bytes() == other.values.bytes() && amax.bytes() == other.amax.bytes() &&
           exponent.bytes() == other.exponent.bytes();
  }

  TestTensor values, amax, exponent;

 private:
  static std::vector<float> fill(int64_t count, bool zeroed) {
    return std::vector<float>(zeroed ? static_cast<size_t>(count) : 0);
  }
  MomentStorage storage_;
};

// What encoding `values` leaves behind, and what decoding gives back.
struct StoredMoment {
  std::vector<uint8_t> codes;
  std::vector<float> amax;
  std::vector<uint8_t> exponent;  // 16 everywhere without expansion
  std::vector<float> values;
  bool guard_intact;
};

inline std::vector<uint8_t> as_uint8(const std::vector<std::byte>& bytes) {
  std::vector<uint8_t> result;
  for (std::byte b : bytes) result.push_back(static_cast<uint8_t>(b));
  return result;
}

inline StoredMoment store_and_read(Device& device, const std::vector<float>& values, const MomentStorage& storage,
                                   bool is_second) {
  const auto N = static_cast<int64_t>(values.size());
  const TestTensor in(device, DType::kF32, {N}, values), out(device, DType::kF32, {N});
  const TestMoment moment(device, storage, N);
  moment_encode(device, {.values = in, .moment = moment.view(), .is_second = is_second});
  moment_decode(device, {.moment = moment.view(), .values = out});
  std::vector<uint8_t> exponent(static_cast<size_t>(ceil_div(N, kMomentGroup)), 16);
  if (storage.expanded) exponent = as_uint8(moment.exponent.bytes());
  return {as_uint8(moment.values.bytes()), moment.amax.host(), exponent, out.host(),
          moment.guard_intact() && in.guard_intact() && out.guard_intact()};
}

// `count` magnitudes spread evenly over the logarithm of [smallest, smallest * ratio], in random order.
inline std::vector<float> log_uniform(int64_t count, double smallest, double ratio, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double position = uniform_open(philox4x32(seed, 9, static_cast<uint64_t>(i))[0]);
    values[i] = static_cast<float>(smallest * std::pow(ratio, position));
  }
  return values;
}

inline std::vector<float> with_random_signs(std::vector<float> values, uint64_t seed) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (philox4x32(seed, 10, i)[0] & 1u) values[i] = -values[i];
  }
  return values;
}

// Root mean square of (stored - x) / x over the elements that are not 0.
inline double rms_relative_error(const std::vector<float>& stored, const std::vector<float>& x) {
  double squares = 0;
  int64_t count = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == 0) continue;
    const double relative = (double{stored[i]} - x[i]) / x[i];
    squares += relative * relative;
    ++count;
  }
  return std::sqrt(squares / static_cast<double>(count));
}

// Relative error of a decoded moment. The CPU rounds the power once and its product with amax once. A GPU may make
// 2^(log2(q / max) / k) in fp32: the logarithm is up to 32 and its rounding becomes a relative error, so some
// 2^-19. That is far below the error of the codes, 2^-4 at best.
inline double decode_error(const Device& device) { return device.kind() == DeviceKind::kCpu ? 0x1p-23 : 0x1p-18; }

inline constexpr MasterForm kMasterForms[] = {MasterForm::kFp32, MasterForm::kFp24Split, MasterForm::kBf16Sr,
                                              MasterForm::kNone};

struct Hyperparameters {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// How a parameter tensor and its moments are stored.
struct Storage {
  MasterForm master = MasterForm::kNone;
  MomentStorage exp_avg{DType::kF32};
  MomentStorage exp_avg_sq{DType::kF32};
  DType gradient = DType::kF32;
};

// One parameter tensor and what AdamW keeps for it.
class TestParameter {
 public:
  TestParameter(Device& device, const Storage& storage, const std::vector<float>& initial)
      : numel(static_cast<int64_t>(initial.size())),
        weight(device, storage.master == MasterForm::kNone ? DType::kF32 : DType::kBF16, {numel},
               rounded_for(storage.master, initial)),
        exp_avg(device, storage.exp_avg, numel, /*zeroed=*/true),
        exp_avg_sq(device, storage.exp_avg_sq, numel, /*zeroed=*/true),
        device_(device),
        storage_(storage) {
    if (storage.master == MasterForm::kFp32) {
      std::vector<float> remainders;
      for (float x : initial) remainders.push_back(split_float(x).remainder);
      master = std::make_unique<TestTensor>(device, DType::kU16, std::initializer_list<int64_t>{numel}, remainders);
    } else if (storage.master == MasterForm::kFp24Split) {
      std::vector<float> remainders;
      for (float x : initial) remainders.push_back(split_float24(round_to_float24(x, kNearestPhase)).remainder);
      master = std::make_unique<TestTensor>(device, DType::kU8, std::initializer_list<int64_t>{numel}, remainders);
    }
  }

  // The step of the elements [begin, end) alone.
  AdamwStep range_step(const TestTensor& gradient, const TestTensor& grad_scale, const Hyperparameters& h,
                       int64_t t, int64_t begin, int64_t end, uint64_t first_element = 0) const {
    const auto rows = [&](const TensorView& view) { return view.rows(begin, end - begin); };
    return {.weight = rows(weight),
            .master = master ? rows(*master) : TensorView{},
            .master_form = storage_.master,
            .gradient = rows(gradient),
            .exp_avg = exp_avg.range(begin, end),
            .exp_avg_sq = exp_avg_sq.range(begin, end),
            .lr = static_cast<float>(h.lr),
            .beta1 = h.beta1,
            .beta2 = h.beta2,
            .eps = static_cast<float>(h.eps),
            .weight_decay = static_cast<float>(h.weight_decay),
            .bias_correction1 = static_cast<float>(1 - std::pow(h.beta1, static_cast<double>(t))),
            .bias_correction2 = static_cast<float>(1 - std::pow(h.beta2, static_cast<double>(t))),
            .grad_scale = grad_scale,
            .weight_amax = weight_amax ? weight_amax->view() : TensorView{},
            .seed = 77,
            .step = static_cast<uint64_t>(t),
            .first_element = first_element + static_cast<uint64_t>(begin)};
  }
  void step_range(const TestTensor& gradient, const Hyperparameters& h, int64_t t, int64_t begin, int64_t end,
                  float grad_scale = 1.0f, uint64_t first_element = 0) {
    const TestTensor scale(device_, DType::kF32, {1}, {grad_scale});
    adamw_step(device_, range_step(gradient, scale, h, t, begin, end, first_element));
  }
  void step(const std::vector<float>& gradient, const Hyperparameters& h, int64_t t, float grad_scale = 1.0f,
            uint64_t first_element = 0) {
    step_range(TestTensor(device_, storage_.gradient, {numel}, gradient), h, t, 0, numel, grad_scale,
               first_element);
  }

  // The weights as exactly as they are kept.
  std::vector<float> master_values() const {
    std::vector<float> values = weight.host();
    if (storage_.master != MasterForm::kFp32 && storage_.master != MasterForm::kFp24Split) return values;
    const std::vector<float> remainders = master->host();
    for (size_t i = 0; i < values.size(); ++i) {
      const BFloat16 high{static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16)};
      const auto low = static_cast<uint16_t>(remainders[i]);
      values[i] = storage_.master == MasterForm::kFp32 ? join_float(high, low)
                                                       : join_float24(high, static_cast<uint8_t>(low));
    }
    return values;
  }
  bool same_bits(const TestParameter& other) const {
    return weight.bytes() == other.weight.bytes() && exp_avg.same_bits(other.exp_avg) &&
           exp_avg_sq.same_bits(other.exp_avg_sq) && (!master || master->bytes() == other.master->bytes());
  }
  bool guard_intact() const {
    return weight.guard_intact() && exp_avg.guard_intact() && exp_avg_sq.guard_intact() &&
           (!master || master->guard_intact());
  }

  int64_t numel;
  TestTensor weight;
  std::unique_ptr<TestTensor> master;
  TestMoment exp_avg, exp_avg_sq;
  std::unique_ptr<TestTensor> weight_amax;  // given to steps if it is set

 private:
  // Master forms round ties away from zero, not to even as TestTensor would.
  static std::vector<float> rounded_for(MasterForm form, std::vector<float> values) {
    if (form == MasterForm::kNone) return values;
    for (float& x : values) {
      if (form == MasterForm::kFp24Split) x = round_to_float24(x, kNearestPhase);
      x = decode_bf16(split_float(x).weight);
    }
    return values;
  }

  Device& device_;
  Storage storage_;
};

// Gradients whose size differs by element and step, as bf16 so that both gradient dtypes hold them; some are 0.
inline std::vector<float> gradient_at(int64_t count, int64_t t) {
  std::vector<float> g = random_normal(count, 1000 + static_cast<uint64_t>(t), 1e-3f);
  for (int64_t i = 0; i < count; ++i) {
    g[i] *= std::ldexp(1.0f, static_cast<int>((i * 7) % 13) - 6);
    if ((i + t) % 17 == 0) g[i] = 0;
    g[i] = decode_bf16(encode_bf16(g[i]));
  }
  return g;
}

}  // namespace parka::test
