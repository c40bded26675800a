#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/split_float.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"
#include "tests/support/updates.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr ParameterRole kLinear = ParameterRole::kLinear;

// Odd sizes, a vector, groups of 128 that end short; one of the three is not decayed.
std::vector<ParameterInfo> small_table() {
  return {{"first", 3, 50, kLinear, true, 0},
          {"norm", 1, 7, ParameterRole::kNorm, false, 256},
          {"last", 5, 129, kLinear, true, 384}};
}

// An optimizer with its memory and the weights that a model would own.
// The same, of a rank of several that divide what ZeRO's stage says.
std::vector<ParameterInfo> divided_table(int64_t stage, int64_t rank, int64_t num_ranks) {
  std::vector<ParameterInfo> table = small_table();
  for (ParameterInfo& p : table) {
    const auto from = [&](int64_t first) { return stage >= first ? Shard{rank, num_ranks} : Shard{}; };
    p.placement = {.gradient = from(2), .states = from(1)};
  }
  return table;
}

class TestRun {
 public:
  TestRun(const OptimizerConfig& config, std::vector<ParameterInfo> table = small_table(), int64_t num_sums = 1)
      : device(*devices().front()),
        compute(config.master == MasterForm::kNone ? DType::kF32 : DType::kBF16),
        optimizer(config, compute, table, plan, false, StateStream::kPartElements, kAllPhases, num_sums) {
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : table) {
      ids.push_back(plan.add("weights", p.name, compute, {p.own_elements().size()}));
    }
    const TensorId amax = plan.add("amax", "weight_amax", DType::kF32, {static_cast<int64_t>(table.size())});
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    for (TensorId id : ids) weights.push_back((*arena)[id]);
    weight_amax = (*arena)[amax];
    optimizer.bind(*arena, weights, weight_amax);
  }

  void initialize(uint64_t seed) {
    for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
      optimizer.set_weight(device, i, random_normal(optimizer.parameters()[i].numel(), seed + i, 0.02f));
    }
  }
  void set_gradient(size_t i, const std::vector<float>& values) {
    const TensorView& gradient = optimizer.gradients()[i];
    if (gradient.dtype == DType::kF32) {
      device.copy_to_device(gradient.data, values.data(), gradient.bytes());
    } else {
      std::vector<BFloat16> rounded(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), encode_bf16);
      device.copy_to_device(gradient.data, rounded.data(), gradient.bytes());
    }
  }
  std::vector<float> gradient_of(size_t i, int64_t step, float scale) const {
    std::vector<float> g =
        random_normal(optimizer.parameters()[i].numel(), 1000 * static_cast<uint64_t>(step) + i, scale);
    for (float& x : g) x = decode_bf16(encode_bf16(x));
    return g;
  }
  StepResult step_with_random_gradient(int64_t step, float scale = 1e-3f, double lr = 1e-3) {
    for (size_t i = 0; i < optimizer.parameters().size(); ++i) set_gradient(i, gradient_of(i, step, scale));
    return queue_step(optimizer, device, {.step = step, .lr = lr, .seed = 99}).wait();
  }
  // Weights and states, but not gradients.
  std::vector<std::vector<std::byte>> bytes() const {
    std::vector<TensorView> all = weights;
    for (const NamedTensor& tensor : optimizer.state()) all.push_back(tensor.view);
    std::vector<std::vector<std::byte>> copies;
    for (const TensorView& view : all) {
      copies.emplace_back(static_cast<size_t>(view.bytes()));
      device.copy_to_host(copies.back().data(), view.data, view.bytes());
    }
    return copies;
  }
  void restore(const std::vector<std::vector<std::byte>>& saved) {
    std::vector<TensorView> all = weights;
    for (const NamedTensor& tensor : optimizer.state()) all.push_back(tensor.view);
    REQUIRE(saved.size() == all.size());
    for (size_t i = 0; i < all.size(); ++i) device.copy_to_device(all[i].data, saved[i].data(), all[i].bytes());
  }

  Device& device;
  DType compute;
  MemoryPlan plan;
  Optimizer optimizer;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> weights;
  TensorView weight_amax;
};

OptimizerConfig config_of(StateFormat states, MasterForm master, DType gradient = DType::kF32) {
  OptimizerConfig config;
  config.states = states;
  config.master = master;
  config.gradient = gradient;
  return config;
}

std::vector<OptimizerConfig> all_configs() {
  std::vector<OptimizerConfig> configs;
  for (StateFormat states :
       {StateFormat::kFp32, StateFormat::kBf16, StateFormat::kFp8, StateFormat::kFp8Expanded}) {
    for (const auto& [master, name] : EnumNames<MasterForm>::kAll) {
      configs.push_back(config_of(states, master, master == MasterForm::kBf16Sr ? DType::kBF16 : DType::kF32));
    }
  }
  return configs;
}

int64_t bytes_of(const MemoryPlan& plan, const std::string& category) {
  for (const auto& total : plan.summary()) {
    if (total.category == category) return total.bytes;
  }
  return 0;
}

// f(w) = sum_i c_i (w_i - target_i)^2 / 2 with curvatures c over two decades, from w = 0, with noise in the
// gradients. Returns f of the exact weights after 400 steps.
double minimise_quadratic(const OptimizerConfig& config) {
  const int64_t N = 1000, num_steps = 400;
  const std::vector<float> target = random_normal(N, 21);
  std::vector<float> curvature(N);
  for (int64_t i = 0; i < N; ++i) curvature[i] = std::pow(10.0f, -2.0f * static_cast<float>(i) / 1000.0f);
  TestRun run(config, {{"w", 1, N, kLinear, false, 0}});
  run.optimizer.set_weight(run.device, 0, std::vector<float>(N));
  for (int64_t t = 1; t <= num_steps; ++t) {
    const std::vector<float> w = master_weight(run.device, run.optimizer, 0, run.weights[0]);
    std::vector<float> gradient = random_normal(N, 5000 + static_cast<uint64_t>(t), 0.02f);
    for (int64_t i = 0; i < N; ++i) gradient[i] = curvature[i] * (w[i] - target[i] + gradient[i]);
    run.set_gradient(0, gradient);
    const double lr = 0.02 * (1.0 - 0.9 * static_cast<double>(t) / static_cast<double>(num_steps));
    REQUIRE(queue_step(run.optimizer, run.device, {.step = t, .lr = lr, .seed = 7}).wait().applied);
  }
  double loss = 0;
  const std::vector<float> w = master_weight(run.device, run.optimizer, 0, run.weights[0]);
  for (int64_t i = 0; i < N; ++i) loss += 0.5 * curvature[i] * (w[i] - target[i]) * (w[i] - target[i]);
  return loss;
}

}  // namespace

TEST_CASE("the plan has what each state format and master form needs, per parameter", "[optim][optimizer]") {
  struct Case {
    StateFormat states;
    MasterForm master;
    double states_bytes, master_bytes;
  };
  const std::vector<Case> cases = {
      {StateFormat::kFp32, MasterForm::kNone, 8, 0},
      {StateFormat::kBf16, MasterForm::kBf16Sr, 4, 0},
      {StateFormat::kFp8, MasterForm::kFp32, 2 + 8.0 / 128, 2},
      {StateFormat::kFp8Expanded, MasterForm::kFp24Split, 2 + 10.0 / 128, 1},
  };
  constexpr int64_t kRows = 256, kCols = 1024;  // sizes that need no padding to 256 bytes
  int wrong = 0;
  for (const Case& c : cases) {
    const TestRun run(config_of(c.states, c.master, DType::kBF16), {{"w", kRows, kCols, kLinear, true, 0}});
    constexpr double kNumel = kRows * kCols;
    wrong += static_cast<double>(bytes_of(run.plan, "optimizer states")) != c.states_bytes * kNumel;
    wrong += static_cast<double>(bytes_of(run.plan, "master weights")) != c.master_bytes * kNumel;
    wrong += static_cast<double>(bytes_of(run.plan, "gradients")) != 2 * kNumel;
  }
  CHECK(wrong == 0);
}

TEST_CASE("state() names every tensor with its dtype and shape", "[optim][optimizer]") {
  const auto described = [](const OptimizerConfig& config) {
    const TestRun run(config);
    std::vector<std::string> names;
    for (const NamedTensor& tensor : run.optimizer.state())
      names.push_back(tensor.name + " " + describe(tensor.view));
    return names;
  };
  const OptimizerConfig mixed = config_of(StateFormat::kFp8Expanded, MasterForm::kFp32);
  CHECK(described(mixed) == std::vector<std::string>{"first.master uint16 [150]",
                                                     "first.exp_avg e4m3 [150]",
                                                     "first.exp_avg.amax fp32 [2]",
                                                     "first.exp_avg.exponent uint8 [2]",
                                                     "first.exp_avg_sq e4m3 [150]",
                                                     "first.exp_avg_sq.amax fp32 [2]",
                                                     "first.exp_avg_sq.exponent uint8 [2]",
                                                     "norm.master uint16 [7]",
                                                     "norm.exp_avg e4m3 [7]",
                                                     "norm.exp_avg.amax fp32 [1]",
                                                     "norm.exp_avg.exponent uint8 [1]",
                                                     "norm.exp_avg_sq e4m3 [7]",
                                                     "norm.exp_avg_sq.amax fp32 [1]",
                                                     "norm.exp_avg_sq.exponent uint8 [1]",
                                                     "last.master uint16 [645]",
                                                     "last.exp_avg e4m3 [645]",
                                                     "last.exp_avg.amax fp32 [6]",
                                                     "last.exp_avg.exponent uint8 [6]",
                                                     "last.exp_avg_sq e4m3 [645]",
                                                     "last.exp_avg_sq.amax fp32 [6]",
                                                     "last.exp_avg_sq.exponent uint8 [6]"});
  const auto plain = described(config_of(StateFormat::kFp8, MasterForm::kBf16Sr));
  CHECK(plain.size() == 3 * 4);  // no masters, no exponents
  CHECK(plain[1] == "first.exp_avg.amax fp32 [2]");
  CHECK(described(config_of(StateFormat::kBf16, MasterForm::kFp24Split))[0] == "first.master uint8 [150]");
  CHECK(described(config_of(StateFormat::kFp32, MasterForm::kNone)) ==
        std::vector<std::string>{"first.exp_avg fp32 [150]", "first.exp_avg_sq fp32 [150]", "norm.exp_avg fp32 [7]",
                                 "norm.exp_avg_sq fp32 [7]", "last.exp_avg fp32 [645]",
                                 "last.exp_avg_sq fp32 [645]"});
}

TEST_CASE("set_weight and master_weight are inverse as far as the form keeps fp32", "[optim][optimizer]") {
  const std::vector<float> values = random_normal(645, 4);
  for (const auto& [form, name] : EnumNames<MasterForm>::kAll) {
    TestRun run(config_of(StateFormat::kFp32, form));
    run.optimizer.set_weight(run.device, 2, values);
    const std::vector<float> master = master_weight(run.device, run.optimizer, 2, run.weights[2]);
    int wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const float nearest = decode_bf16(encode_bf16(values[i]));
      const float kept = form == MasterForm::kBf16Sr      ? nearest
                         : form == MasterForm::kFp24Split ? round_to_float24(values[i], kNearestPhase)
                                                          : values[i];
      wrong += master[i] != kept;
      if (form == MasterForm::kNone) continue;
      const BFloat16 weight = run.weights[2].as<BFloat16>()[i];
      const float rounded = form == MasterForm::kBf16Sr ? nearest : decode_bf16(split_float(kept).weight);
      wrong += decode_bf16(weight) != rounded;
    }
    CAPTURE(name_of(form));
    CHECK(wrong == 0);
  }
}

TEST_CASE("step follows AdamW in double: clipping, decay of decayed parameters only", "[optim][optimizer]") {
  OptimizerConfig config = config_of(StateFormat::kFp32, MasterForm::kNone);
  config.beta2 = 0.99;
  config.eps = 1e-8;
  config.clip_norm = 0.02;  // below the norm of about 0.03 after the warm-up of the limit
  config.clip_warmup_steps = 10;
  TestRun run(config);
  run.initialize(1);
  const size_t num_parameters = run.optimizer.parameters().size();
  std::vector<std::vector<double>> w, m, v;
  for (size_t i = 0; i < num_parameters; ++i) {
    const auto values = master_weight(run.device, run.optimizer, i, run.weights[i]);
    w.emplace_back(values.begin(), values.end());
    m.emplace_back(values.size());
    v.emplace_back(values.size());
  }
  int wrong_norms = 0;
  for (int64_t t = 1; t <= 100; ++t) {
    const double lr = 1e-3 * static_cast<double>(t % 5 + 1);
    const auto result = run.step_with_random_gradient(t, 1e-3f, lr);
    double sum = 0;
    for (size_t i = 0; i < num_parameters; ++i) {
      for (float g : run.gradient_of(i, t, 1e-3f)) sum += double{g} * g;
    }
    wrong_norms += !(std::abs(result.grad_norm - std::sqrt(sum)) <= 1e-6 * std::sqrt(sum)) || !result.applied;
    const double limit = t <= 10 ? 0.2 : 0.02, clip = std::min(1.0, limit / (std::sqrt(sum) + 1e-6));
    const double step = static_cast<double>(t);
    for (size_t i = 0; i < num_parameters; ++i) {
      const auto gradient = run.gradient_of(i, t, 1e-3f);
      const double decay = run.optimizer.parameters()[i].decayed ? config.weight_decay : 0;
      for (size_t n = 0; n < w[i].size(); ++n) {
        const double g = clip * gradient[n];
        m[i][n] = config.beta1 * m[i][n] + (1 - config.beta1) * g;
        v[i][n] = config.beta2 * v[i][n] + (1 - config.beta2) * g * g;
        const double m_hat = m[i][n] / (1 - std::pow(config.beta1, step));
        const double v_hat = v[i][n] / (1 - std::pow(config.beta2, step));
        w[i][n] -= lr * (m_hat / (std::sqrt(v_hat) + config.eps) + decay * w[i][n]);
      }
    }
  }
  int wrong = 0;
  for (size_t i = 0; i < num_parameters; ++i) {
    const auto got = master_weight(run.device, run.optimizer, i, run.weights[i]);
    // A hundred updates of up to 5e-3, each rounded at the size of the weight.
    for (size_t n = 0; n < got.size(); ++n)
      wrong += !(std::abs(got[n] - w[i][n]) <= 2e-6 * (std::abs(w[i][n]) + 0.02));
  }
  CHECK(wrong == 0);
  CHECK(wrong_norms == 0);
}

TEST_CASE("released gradients are aligned as kept ones", "[optim][optimizer]") {
  for (const DType gradient : {DType::kF32, DType::kBF16}) {
    for (const bool releases : {false, true}) {
      CAPTURE(name_of(gradient), releases);
      OptimizerConfig config = config_of(StateFormat::kFp32, MasterForm::kFp32);
      config.clip_norm = 0;
      config.gradient = gradient;
      config.release_gradients = releases;
      std::vector<ParameterInfo> table = small_table();
      table[0].rows = table[0].cols = 1;  // a gate before all else
      const TestRun run(config, table);
      for (const TensorView& view : run.optimizer.gradients()) {
        CHECK(reinterpret_cast<uintptr_t>(view.data) % MemoryPlan::kAlignment == 0);
      }
    }
  }
}

TEST_CASE("released gradients are clipped by the norm of the step before", "[optim][optimizer]") {
  std::vector<ParameterInfo> table = small_table();
  for (size_t i = 0; i < table.size(); ++i) table[i].unit = static_cast<int>(i);
  OptimizerConfig config = config_of(StateFormat::kFp32, MasterForm::kFp32);
  config.clip_norm = 0;
  TestRun plain(config, table);
  config.clip_norm = 0.03;  // norms are about 0.03, 0.06 and 0.09
  config.clip_warmup_steps = 3;
  config.release_gradients = true;
  TestRun released(config, table), resumed(config, table);
  plain.initialize(1);
  released.initialize(1);
  released.optimizer.set_last_norm(released.device, 0);
  const auto step = [](TestRun& run, int64_t t, float scale) {
    run.optimizer.begin_step(run.device);
    run.optimizer.begin_update(run.device);
    for (int unit = 2; unit >= 0; --unit) {  // the first and the last lie in one buffer
      run.set_gradient(static_cast<size_t>(unit), run.gradient_of(static_cast<size_t>(unit), t, scale));
      queue_unit(run.optimizer, run.device, {.step = t, .lr = 1e-3, .seed = 99}, unit);
    }
    return run.optimizer.end_step(run.device).wait();
  };
  float squares = 0;  // of the step before
  int num_clipped = 0;
  for (int64_t t = 1; t <= 9; ++t) {
    const float scale = 1e-3f * static_cast<float>(t % 3 + 1), limit = t <= 3 ? 0.3f : 0.03f;
    const float coefficient = std::min(1.0f, limit / (std::sqrt(squares) + 1e-6f));
    num_clipped += coefficient < 1;
    double sum = 0;
    for (size_t i = 0; i < table.size(); ++i) {
      std::vector<float> gradient = plain.gradient_of(i, t, scale);
      for (float& g : gradient) {
        sum += double{g} * g;
        g *= coefficient;
      }
      plain.set_gradient(i, gradient);
    }
    REQUIRE(queue_step(plain.optimizer, plain.device, {.step = t, .lr = 1e-3, .seed = 99}).wait().applied);
    if (t == 6) {
      resumed.restore(released.bytes());
      resumed.optimizer.set_last_norm(resumed.device, std::sqrt(double{squares}));
    }
    const StepResult result = step(released, t, scale);
    CAPTURE(t, coefficient);
    CHECK(result.applied);
    CHECK(std::abs(result.grad_norm - std::sqrt(sum)) <= 1e-6 * std::sqrt(sum));
    CHECK(released.bytes() == plain.bytes());
    if (t >= 6) step(resumed, t, scale);
    if (t >= 6) CHECK(resumed.bytes() == plain.bytes());
    squares = static_cast<float>(result.grad_norm * result.grad_norm);
  }
  CHECK((num_clipped >= 3 && num_clipped <= 6));
}

TEST_CASE("hazard: a released gradient that is not finite reaches its weights or those of later units",
          "[optim][optimizer][hazards]") {
  const auto bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e20f);
  std::vector<ParameterInfo> table = small_table();
  for (size_t i = 0; i < table.size(); ++i) table[i].unit = static_cast<int>(i);
  for (OptimizerConfig config : all_configs()) {
    config.release_gradients = true;
    TestRun run(config, table);
    run.initialize(2);
    run.optimizer.set_last_norm(run.device, 1);
    const auto bytes_of_parameter = [&](size_t i) {
      std::vector<TensorView> views = {run.weights[i]};
      for (const NamedTensor& tensor : run.optimizer.state()) {
        if (tensor.parameter == i) views.push_back(tensor.view);
      }
      std::vector<std::byte> bytes;
      for (const TensorView& view : views) {
        const auto* const data = static_cast<const std::byte*>(view.data);
        bytes.insert(bytes.end(), data, data + view.bytes());
      }
      return bytes;
    };
    run.optimizer.begin_step(run.device);
    run.optimizer.begin_update(run.device);
    std::vector<bool> has_changed;
    for (const size_t i : {2, 1, 0}) {
      std::vector<float> gradient = run.gradient_of(i, 1, 1e-3f);
      if (i == 1) gradient[3] = bad;
      run.set_gradient(i, gradient);
      const std::vector<std::byte> before = bytes_of_parameter(i);
      queue_unit(run.optimizer, run.device, {.step = 1, .lr = 1e-3, .seed = 99}, static_cast<int>(i));
      has_changed.push_back(bytes_of_parameter(i) != before);
    }
    const StepResult result = run.optimizer.end_step(run.device).wait();
    CHECK(has_changed == std::vector<bool>{true, false, false});
    CHECK_FALSE(result.applied);
    CHECK_FALSE(std::isfinite(result.grad_norm));
    CHECK(result.culprit == "norm");
  }
}

TEST_CASE("clip_limit is the limit of the step itself, and 0 switches clipping off", "[optim][optimizer]") {
  OptimizerConfig config;
  config.clip_norm = 0.5;
  config.clip_warmup_steps = 1000;
  const TestRun run(config);
  CHECK(run.optimizer.clip_limit(1) == 5.0);
  CHECK(run.optimizer.clip_limit(1000) == 5.0);
  CHECK(run.optimizer.clip_limit(1001) == 0.5);
  config.clip_norm = 0;
  CHECK(TestRun(config).optimizer.clip_limit(1) == std::numeric_limits<double>::infinity());
}

TEST_CASE("without clipping a large gradient is used as it is", "[optim][optimizer]") {
  OptimizerConfig config = config_of(StateFormat::kFp32, MasterForm::kNone);
  config.clip_norm = 0;
  TestRun run(config);
  const auto result = run.step_with_random_gradient(1, 1e4f);
  REQUIRE(result.applied);
  const NamedTensor m = run.optimizer.state()[0];
  const auto gradient = run.gradient_of(0, 1, 1e4f);
  int wrong = 0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    wrong += !(std::abs(m.view.as<float>()[i] - 0.1 * gradient[i]) <= 1e-6 * std::abs(gradient[i]));
  }
  CHECK(wrong == 0);
}

TEST_CASE("a step begins without a loss, and with padding that adds nothing to the norm", "[optim][optimizer]") {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t stage : {0, 1, 2}) {
    TestRun run(config_of(StateFormat::kFp32, MasterForm::kFp32), divided_table(stage, 1, 2));
    CAPTURE(stage);
    for (size_t i = 0; i < run.optimizer.parameters().size(); ++i) {
      const auto& [whole, own] = run.optimizer.gradient_pieces(i);
      for (const TensorView& t : {whole, own}) std::fill_n(t.as<float>(), t.numel(), kNaN);
    }
    *run.optimizer.sums().as<float>() = kNaN;
    run.optimizer.begin_step(run.device);
    CHECK(*run.optimizer.sums().as<float>() == 0.0f);
    double squares = 0;
    for (size_t i = 0; i < run.optimizer.parameters().size(); ++i) {
      if (stage == 2) run.optimizer.open_gradient(run.device, i);  // as each micro-batch does
      const auto& [whole, own] = run.optimizer.gradient_pieces(i);
      run.set_gradient(i, run.gradient_of(i, 1, 1.0f));
      const int64_t begin = stage == 0 ? 0 : own.numel();  // rank 1
      if (stage == 2) run.device.copy(own.data, whole.rows(begin, own.numel()).data, own.bytes());
      const std::vector<float> gradient = run.gradient_of(i, 1, 1.0f);
      for (size_t k = static_cast<size_t>(begin); k < gradient.size(); ++k)
        squares += double{gradient[k]} * gradient[k];
    }
    const StepResult result = queue_step(run.optimizer, run.device, {.step = 1, .lr = 0.0, .seed = 0}).wait();
    CHECK(result.applied);
    CHECK(std::abs(result.grad_norm - std::sqrt(squares)) <= 1e-5 * std::sqrt(squares));
  }
}

TEST_CASE("what the model sums begins at zero and comes back with the step, of which only the loss must be finite",
          "[optim][optimizer]") {
  for (const bool is_released : {false, true}) {
    OptimizerConfig config = config_of(StateFormat::kFp32, MasterForm::kFp32);
    config.release_gradients = is_released;
    TestRun run(config, small_table(), 3);
    run.initialize(1);
    if (is_released) run.optimizer.set_last_norm(run.device, 1);
    auto* const sums = run.optimizer.sums().as<float>();
    const auto step = [&](std::vector<float> values) {
      std::fill_n(sums, 3, NAN);
      run.optimizer.begin_step(run.device);
      CHECK((sums[0] == 0 && sums[1] == 0 && sums[2] == 0));
      std::ranges::copy(values, sums);
      for (size_t i = 0; i < run.weights.size(); ++i) run.set_gradient(i, run.gradient_of(i, 1, 1e-3f));
      if (!is_released) return queue_step(run.optimizer, run.device, {.step = 1, .lr = 1e-3, .seed = 9}).wait();
      run.optimizer.begin_update(run.device);
      queue_unit(run.optimizer, run.device, {.step = 1, .lr = 1e-3, .seed = 9}, 0);
      return run.optimizer.end_step(run.device).wait();
    };
    const StepResult first = step({2, 3, 5}), second = step({7, 11, INFINITY}), bad = step({NAN, 1, 1});
    CAPTURE(is_released);
    CHECK((first.sums == std::vector<float>{2, 3, 5} && second.sums == std::vector<float>{7, 11, INFINITY}));
    CHECK((first.applied && second.applied && !bad.applied));
    CHECK((first.grad_norm > 0 && first.grad_norm == second.grad_norm));
  }
}

TEST_CASE("hazard: a gradient that is not finite reaches weights or states", "[optim][optimizer][hazards]") {
  const auto bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), 1e20f);  // 1e40 is beyond fp32
  for (const OptimizerConfig& config : all_configs()) {
    TestRun run(config);
    run.initialize(2);
    for (int64_t t = 1; t <= 3; ++t) run.step_with_random_gradient(t);
    const auto before = run.bytes();
    for (size_t i = 0; i < 3; ++i) run.set_gradient(i, run.gradient_of(i, 4, 1e-3f));
    std::vector<float> last = run.gradient_of(2, 4, 1e-3f), norm = run.gradient_of(1, 4, 1e-3f);
    last[644] = bad;
    run.set_gradient(2, last);
    auto result = queue_step(run.optimizer, run.device, {.step = 4, .lr = 1e-3, .seed = 99}).wait();
    CHECK_FALSE(result.applied);
    CHECK_FALSE(std::isfinite(result.grad_norm));
    CHECK(result.culprit == "last");
    norm[0] = bad;
    run.set_gradient(1, norm);
    CHECK(queue_step(run.optimizer, run.device, {.step = 4, .lr = 1e-3, .seed = 99}).wait().culprit == "norm");
    CHECK(run.bytes() == before);
    result = run.step_with_random_gradient(4);
    CHECK(result.applied);
    CHECK(result.culprit.empty());
    CHECK(run.bytes() != before);
  }
}

TEST_CASE("a step leaves the largest magnitude of each weight, applied or not", "[optim][optimizer]") {
  for (const OptimizerConfig& config : all_configs()) {
    TestRun run(config);
    run.initialize(5);
    for (int64_t t = 1; t <= 4; ++t) {
      const bool is_skipped = t == 3;
      // Decay alone: each maximum is below that of the step before.
      const StepResult result = run.step_with_random_gradient(t, is_skipped ? NAN : 0.0f, 1.0);
      CHECK(result.applied == !is_skipped);
      for (size_t i = 0; i < run.weights.size(); ++i) {
        float largest = 0;
        for (int64_t n = 0; n < run.weights[i].numel(); ++n) {
          const bool is_fp32 = run.compute == DType::kF32;
          const float w = is_fp32 ? run.weights[i].as<float>()[n] : decode_bf16(run.weights[i].as<BFloat16>()[n]);
          largest = std::max(largest, std::abs(w));
        }
        CAPTURE(name_of(config.states), name_of(config.master), t, i);
        CHECK(run.weight_amax.as<float>()[i] == largest);
      }
    }
  }
}

TEST_CASE("hazard: bias correction in fp32 cancels early and its step counter sticks",
          "[optim][optimizer][hazards]") {
  int wrong = 0;
  for (double beta : {0.9, 0.95, 0.99, 0.999, 0.99999}) {
    long double power = 1;
    for (int64_t step = 1; step <= 2000; ++step) {
      power *= static_cast<long double>(beta);
      const long double want = 1 - power;
      wrong += !(std::abs(bias_correction(beta, step) - want) <= 1e-14L * want);
    }
    wrong += bias_correction(beta, int64_t{1} << 40) != 1.0;
  }
  // Beyond 2^24 steps an fp32 counter would not advance.
  const int64_t step = (int64_t{1} << 24) + 1;
  wrong += !(bias_correction(1 - 1e-8, step) > bias_correction(1 - 1e-8, step - 1));
  wrong += bias_correction(0, 1) != 1.0;
  CHECK(wrong == 0);
}

TEST_CASE("hazard: states that cannot be saved and restored", "[optim][optimizer][hazards]") {
  for (const OptimizerConfig& config : all_configs()) {
    TestRun straight(config), resumed(config);
    straight.initialize(3);
    for (int64_t t = 1; t <= 3; ++t) straight.step_with_random_gradient(t);
    resumed.restore(straight.bytes());
    for (int64_t t = 4; t <= 6; ++t) {
      straight.step_with_random_gradient(t);
      resumed.step_with_random_gradient(t);
    }
    CAPTURE(name_of(config.states), name_of(config.master));
    CHECK(straight.bytes() == resumed.bytes());
  }
}

TEST_CASE("hazard: range expansion that is silently off", "[optim][optimizer][hazards]") {
  TestRun run(config_of(StateFormat::kFp8Expanded, MasterForm::kFp32));
  run.initialize(4);
  for (int64_t t = 1; t <= 5; ++t) run.step_with_random_gradient(t);
  int num_exponents = 0, num_expanded = 0;
  for (const NamedTensor& tensor : run.optimizer.state()) {
    if (tensor.view.dtype != DType::kU8) continue;
    for (int64_t g = 0; g < tensor.view.numel(); ++g) {
      ++num_exponents;
      num_expanded += tensor.view.as<uint8_t>()[g] > 16;
    }
  }
  CHECK(num_exponents == 2 * (2 + 1 + 6));
  CHECK(num_expanded == num_exponents);
}

TEST_CASE("stochastic rounding draws by the place in the flat parameter space", "[optim][optimizer]") {
  // Two parameters alike in everything but their place.
  TestRun run(config_of(StateFormat::kFp32, MasterForm::kBf16Sr),
              {{"a", 1, 512, kLinear, true, 0}, {"b", 1, 512, kLinear, true, 512}});
  for (size_t i = 0; i < 2; ++i) {
    run.optimizer.set_weight(run.device, i, std::vector<float>(512, 1.0f));
    run.set_gradient(i, std::vector<float>(512, 1e-3f));
  }
  queue_step(run.optimizer, run.device, {.step = 1, .lr = 1e-3, .seed = 5});
  const auto a = master_weight(run.device, run.optimizer, 0, run.weights[0]),
             b = master_weight(run.device, run.optimizer, 1, run.weights[1]);
  CHECK(a != b);
  run.optimizer.set_weight(run.device, 0, std::vector<float>(512, 1.0f));
  TestRun other_seed(config_of(StateFormat::kFp32, MasterForm::kBf16Sr), {{"a", 1, 512, kLinear, true, 0}});
  other_seed.optimizer.set_weight(other_seed.device, 0, std::vector<float>(512, 1.0f));
  other_seed.set_gradient(0, std::vector<float>(512, 1e-3f));
  queue_step(other_seed.optimizer, other_seed.device, {.step = 1, .lr = 1e-3, .seed = 6});
  CHECK(master_weight(other_seed.device, other_seed.optimizer, 0, other_seed.weights[0]) != a);
}

TEST_CASE("ranks that divide the states round as one rank does", "[optim][optimizer]") {
  for (const MasterForm form : {MasterForm::kFp24Split, MasterForm::kBf16Sr}) {
    OptimizerConfig config = config_of(StateFormat::kFp8Expanded, form);
    config.clip_norm = 0;  // a rank alone has its own norm
    TestRun whole(config);
    whole.initialize(8);
    for (int64_t t = 1; t <= 20; ++t) whole.step_with_random_gradient(t);
    for (const int num_ranks : {2, 4}) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        TestRun run(config, divided_table(1, rank, num_ranks));
        const size_t num_parameters = run.optimizer.parameters().size();
        for (size_t i = 0; i < num_parameters; ++i) {
          const std::vector<float> all = random_normal(run.optimizer.parameters()[i].numel(), 8 + i, 0.02f);
          const ElementRange own = run.optimizer.parameters()[i].own_elements();
          run.optimizer.set_weight(run.device, i, {all.begin() + own.begin, all.begin() + own.end});
        }
        run.optimizer.begin_step(run.device);
        for (int64_t t = 1; t <= 20; ++t) {
          for (size_t i = 0; i < num_parameters; ++i) run.set_gradient(i, run.gradient_of(i, t, 1e-3f));
          queue_step(run.optimizer, run.device, {.step = t, .lr = 1e-3, .seed = 99});
        }
        for (size_t i = 0; i < num_parameters; ++i) {
          const std::vector<float> all = master_weight(whole.device, whole.optimizer, i, whole.weights[i]);
          const ElementRange own = run.optimizer.parameters()[i].own_elements();
          CAPTURE(name_of(form), num_ranks, rank, i);
          CHECK(master_weight(run.device, run.optimizer, i, run.weights[i]) ==
                std::vector<float>(all.begin() + own.begin, all.begin() + own.end));
        }
      }
    }
  }
}

TEST_CASE("a master form that does not fit the weights is refused in one line", "[optim][optimizer]") {
  const auto refusal = [](MasterForm form, DType compute) -> std::string {
    MemoryPlan plan;
    try {
      Optimizer(config_of(StateFormat::kFp32, form), compute, small_table(), plan);
    } catch (const Error& error) {
      return error.code() == ExitCode::kBadInput ? error.what() : "wrong code";
    }
    return "";
  };
  CHECK(refusal(MasterForm::kNone, DType::kBF16) ==
        "optimizer.master = none does not fit bf16 weights: none is for fp32, the other forms are for bf16");
  CHECK(refusal(MasterForm::kFp32, DType::kF32) ==
        "optimizer.master = fp32 does not fit fp32 weights: none is for fp32, the other forms are for bf16");
  CHECK(refusal(MasterForm::kNone, DType::kF32).empty());
  CHECK(refusal(MasterForm::kBf16Sr, DType::kBF16).empty());
}

TEST_CASE("every state format minimises a noisy quadratic about as well as fp32", "[optim][optimizer]") {
  const auto loss_with = [](StateFormat states, MasterForm master) {
    OptimizerConfig config = config_of(states, master);
    config.eps = 1e-8;
    return minimise_quadratic(config);
  };
  const double fp32 = loss_with(StateFormat::kFp32, MasterForm::kNone);
  const double expanded = loss_with(StateFormat::kFp8Expanded, MasterForm::kFp32);
  const double fp24 = loss_with(StateFormat::kFp32, MasterForm::kFp24Split);
  const double plain = loss_with(StateFormat::kFp8, MasterForm::kFp32);
  const double bf16 = loss_with(StateFormat::kBf16, MasterForm::kFp32);
  CAPTURE(fp32, expanded, fp24, plain, bf16);
  CHECK(fp32 < 0.005);  // from about 110 at w = 0
  CHECK(std::abs(bf16 - fp32) <= 0.01 * fp32);
  CHECK(std::abs(fp24 - fp32) <= 0.01 * fp32);
  CHECK(std::abs(expanded - fp32) <= 0.02 * fp32);
  CHECK(std::abs(plain - fp32) <= 0.06 * fp32);
}
