// Muon: its ops and whole steps against torch.optim.Muon (tests/fixtures/make_muon_fixture.py made the file), what
// it keeps of each element, and that neither the place of its states nor the time of updates changes a bit.
#include "optim/rules/muon.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/files/safetensors.h"
#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/device_with_late_copies.h"
#include "tests/support/refusal.h"
#include "tests/support/tensors.h"
#include "tests/support/updates.h"

using namespace parka;
using namespace parka::test;

namespace {

using Values = std::vector<float>;

// A matrix that torch trained: a value of each list after each step.
struct TorchMatrix {
  int64_t rows = 0, cols = 0;
  Values initial;
  std::vector<Values> grads, momentum, direction, weight;
};

struct TorchRun {
  double lr = 0, weight_decay = 0, momentum = 0;
  std::map<std::string, TorchMatrix> matrices;
};

std::vector<Values> read_steps(const InputFile& file, const SafetensorsEntry& entry) {
  std::vector<std::byte> bytes(static_cast<size_t>(entry.num_bytes));
  file.read(entry.offset, bytes);
  Values all(bytes.size() / static_cast<size_t>(size_of(entry.dtype)));
  if (entry.dtype == DType::kF32) {
    std::memcpy(all.data(), bytes.data(), bytes.size());
  } else {
    std::vector<BFloat16> codes(all.size());
    std::memcpy(codes.data(), bytes.data(), bytes.size());
    std::transform(codes.begin(), codes.end(), all.begin(), decode_bf16);
  }
  const size_t num_steps = entry.shape.size() == 3 ? static_cast<size_t>(entry.shape[0]) : 1;
  const auto numel = static_cast<std::ptrdiff_t>(all.size() / num_steps);
  std::vector<Values> steps;
  for (auto begin = all.begin(); begin != all.end(); begin += numel) steps.emplace_back(begin, begin + numel);
  return steps;
}

TorchRun load_torch_run() {
  const InputFile file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/muon.safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  TorchRun run{.lr = std::stod(header.metadata.at("lr")),
               .weight_decay = std::stod(header.metadata.at("weight_decay")),
               .momentum = std::stod(header.metadata.at("momentum")),
               .matrices = {}};
  for (const SafetensorsEntry& entry : header.tensors) {
    const size_t dot = entry.name.find('.');
    TorchMatrix& matrix = run.matrices[entry.name.substr(0, dot)];
    const std::string key = entry.name.substr(dot + 1);
    std::vector<Values> steps = read_steps(file, entry);
    if (key == "initial") {
      matrix.rows = entry.shape.at(0);
      matrix.cols = entry.shape.at(1);
      matrix.initial = std::move(steps.at(0));
    } else {
      const std::map<std::string, std::vector<Values>*> places = {{"grads", &matrix.grads},
                                                                  {"momentum", &matrix.momentum},
                                                                  {"direction", &matrix.direction},
                                                                  {"weight", &matrix.weight}};
      *places.at(key) = std::move(steps);
    }
  }
  return run;
}

float largest(const Values& values) {
  float result = 0;
  for (const float v : values) result = std::max(result, std::abs(v));
  return result;
}

// Elements that are further than `bound[i]` from what is wanted, or not numbers.
int64_t count_wrong(const Values& got, const Values& want, const Values& bound) {
  REQUIRE(got.size() == want.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) wrong += !(std::abs(double{got[i]} - want[i]) <= bound[i]);
  return wrong;
}

// Of a momentum after steps 0 to t: torch fuses product and sum where it has full vector registers. So each step
// may differ by the rounding of both, which later steps shrink.
Values momentum_bound(const TorchMatrix& matrix, size_t t) {
  Values bound(matrix.initial.size());
  for (size_t s = 0; s <= t; ++s) {
    for (size_t i = 0; i < bound.size(); ++i) {
      bound[i] += 0x1p-23f * (std::abs(matrix.momentum[s][i]) + 0.05f * std::abs(matrix.grads[s][i]));
    }
  }
  return bound;
}

// Of a direction: it takes one number of eight bits that rounds otherwise, and its way through five steps.
constexpr float kDirectionError = 0x1p-6f;

// Of a weight, whose product with the decay and sum with the update are rounded at its size.
constexpr float kWeightError = 0x1p-22f;

// ops of one matrix.
struct OpTensors {
  OpTensors(Device& device, int64_t rows, int64_t cols)
      : numel(rows * cols),
        momentum(device, DType::kF32, {numel}, Values(static_cast<size_t>(numel))),
        direction(device, DType::kBF16, {1, rows, cols}),
        other(device, DType::kBF16, {1, rows, cols}),
        gram(device, DType::kBF16, {1, std::min(rows, cols), std::min(rows, cols)}),
        polynomial(device, DType::kBF16, {1, std::min(rows, cols), std::min(rows, cols)}),
        one(device, DType::kF32, {1}, {1.0f}) {}

  // The direction of a gradient, orthogonalized.
  Values orthogonalized(Device& device, const Values& gradient, double mu, Orthogonalization kind) {
    const TestTensor g(device, DType::kF32, {numel}, gradient);
    muon_momentum(device, {.gradient = g,
                           .momentum = {momentum, {}, {}},
                           .mu = mu,
                           .grad_scale = one,
                           .direction = direction.view().reshaped({numel})});
    orthogonalize(device, {.matrices = direction,
                           .other = other,
                           .gram = gram,
                           .polynomial = polynomial,
                           .steps = newton_schulz_steps(kind),
                           .safety = orthogonalization_safety(kind)});
    device.synchronize();
    return direction.host();
  }

  int64_t numel;
  TestTensor momentum, direction, other, gram, polynomial, one;
};

std::vector<Device*> all_devices() {
  static DeviceWithLateCopies late;
  std::vector<Device*> all = devices();
  all.push_back(&late);
  return all;
}

constexpr ParameterRole kLinear = ParameterRole::kLinear;

// Matrices of one shape and of others, fused ones, and what AdamW updates: a norm, an embedding, a linear weight of
// one row. Parts of 128 elements end within rows, and within each of the fused matrices.
std::vector<ParameterInfo> small_table() {
  std::vector<ParameterInfo> table = {{"norm", 1, 300, ParameterRole::kNorm, false, 0},
                                      {"first", 6, 50, kLinear, true, 384},
                                      {"qkv", 16, 25, kLinear, true, 768},
                                      {"tall", 37, 11, kLinear, false, 1280},
                                      {"embedding", 9, 20, ParameterRole::kEmbedding, true, 1792},
                                      {"alike", 6, 50, kLinear, true, 2048},
                                      {"line", 1, 200, kLinear, true, 2432}};
  table[2].fused_rows = {8, 4, 4};
  return table;
}

OptimizerConfig muon_config(StateFormat states = StateFormat::kFp32, MasterForm master = MasterForm::kNone) {
  OptimizerConfig config;
  config.kind = OptimizerKind::kMuon;
  config.states = states;
  config.master = master;
  config.clip_norm = 0;
  return config;
}

std::vector<OptimizerConfig> all_configs() {
  std::vector<OptimizerConfig> configs;
  for (const auto& [states, states_name] : EnumNames<StateFormat>::kAll) {
    for (const auto& [master, master_name] : EnumNames<MasterForm>::kAll) {
      configs.push_back(muon_config(states, master));
    }
  }
  return configs;
}

using Bytes = std::map<std::string, std::vector<std::byte>>;

// An optimizer in its memory, with the weights that a model would own.
class MuonRun {
 public:
  explicit MuonRun(const OptimizerConfig& config, const std::vector<ParameterInfo>& table = small_table(),
                   Device& device_ = cpu_device(), int64_t part_elements = StateStream::kPartElements)
      : device(device_),
        optimizer(config, config.master == MasterForm::kNone ? DType::kF32 : DType::kBF16, table, plan,
                  /*is_alone=*/true, part_elements) {
    optimizer.matrices().declare_telemetry(plan);
    const DType compute = config.master == MasterForm::kNone ? DType::kF32 : DType::kBF16;
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : table) ids.push_back(plan.add("weights", p.name, compute, {p.numel()}));
    const TensorId amax = plan.add("amax", "weight_amax", DType::kF32, {static_cast<int64_t>(table.size())});
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    for (const TensorId id : ids) weights.push_back((*arena)[id]);
    optimizer.bind(*arena, weights, (*arena)[amax]);
    for (size_t i = 0; i < table.size(); ++i) {
      optimizer.set_weight(device, i, random_normal(table[i].numel(), 1 + i, 0.02f));
    }
  }

  void set_gradient(size_t i, const Values& values) {
    const TensorView& gradient = optimizer.gradients()[i];
    REQUIRE(static_cast<int64_t>(values.size()) == gradient.numel());
    device.copy_to_device(gradient.data, values.data(), gradient.bytes());
  }
  void set_random_gradient(size_t i, int64_t step) {
    set_gradient(i, random_normal(optimizer.gradients()[i].numel(), 1000 * static_cast<uint64_t>(step) + i, 1e-3f));
  }
  void set_random_gradients(int64_t step) {
    for (size_t i = 0; i < weights.size(); ++i) set_random_gradient(i, step);
  }
  StepResult update(int64_t step, double lr = 1e-3) {
    return queue_step(optimizer, device, {.step = step, .lr = lr, .seed = 99}).wait();
  }
  StepResult step(int64_t step, double lr = 1e-3) {
    set_random_gradients(step);
    return update(step, lr);
  }

  Values master(size_t i) const { return master_weight(device, optimizer, i, weights[i]); }
  TensorView state(const std::string& name) const {
    for (const NamedTensor& tensor : optimizer.state()) {
      if (tensor.name == name) return tensor.view;
    }
    throw_internal("there is no {}", name);
  }
  Values fp32_state(const std::string& name) const {
    const TensorView view = state(name);
    REQUIRE(view.dtype == DType::kF32);
    Values values(static_cast<size_t>(view.numel()));
    device.synchronize();
    device.copy_to_host(values.data(), view.data, view.bytes());
    return values;
  }
  // Weights and states of those of `parameters`, of all where there are none.
  Bytes bytes(const std::vector<std::string>& parameters = {}) const {
    Bytes copies;
    const auto add = [&](size_t i, const std::string& name, const TensorView& view) {
      const std::string& parameter = optimizer.parameters()[i].name;
      if (!parameters.empty() && std::ranges::find(parameters, parameter) == parameters.end()) return;
      copies[name].resize(static_cast<size_t>(view.bytes()));
      device.copy_to_host(copies[name].data(), view.data, view.bytes());
    };
    device.synchronize();
    for (size_t i = 0; i < weights.size(); ++i) add(i, optimizer.parameters()[i].name, weights[i]);
    for (const NamedTensor& tensor : optimizer.state()) add(tensor.parameter, tensor.name, tensor.view);
    return copies;
  }

  Device& device;
  MemoryPlan plan;
  Optimizer optimizer;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> weights;
};

// Of the root mean square of `after` - `before`.
double rms_change(const Values& before, const Values& after) {
  double squares = 0;
  for (size_t i = 0; i < before.size(); ++i) squares += std::pow(double{after[i]} - before[i], 2);
  return std::sqrt(squares / static_cast<double>(before.size()));
}

int64_t bytes_of(const MemoryPlan& plan, const std::string& category) {
  for (const auto& total : plan.summary()) {
    if (total.category == category) return total.bytes;
  }
  return 0;
}

}  // namespace

TEST_CASE("momentum, orthogonalized direction and weight of each step are torch's", "[optim][muon]") {
  const TorchRun torch = load_torch_run();
  REQUIRE(torch.matrices.size() == 7);
  for (Device* device : devices()) {
    for (const auto& [name, want] : torch.matrices) {
      OpTensors ops(*device, want.rows, want.cols);
      const TestTensor weight(*device, DType::kF32, {ops.numel}, want.initial);
      for (size_t t = 0; t < want.grads.size(); ++t) {
        CAPTURE(int(device->kind()), name, t);
        const Values direction =
            ops.orthogonalized(*device, want.grads[t], torch.momentum, Orthogonalization::kNewtonSchulz);
        CHECK(count_wrong(ops.momentum.host(), want.momentum[t], momentum_bound(want, t)) == 0);
        CHECK(count_wrong(direction, want.direction[t],
                          Values(direction.size(), kDirectionError * largest(want.direction[t]))) == 0);
        // The rest of the step from torch's direction, so that only its own roundings differ.
        const TestTensor torchs(*device, DType::kBF16, {ops.numel}, want.direction[t]);
        const float scale = 0.2f * std::sqrt(static_cast<float>(std::max(want.rows, want.cols)));
        muon_step(*device, {.weight = weight,
                            .master = {},
                            .master_form = MasterForm::kNone,
                            .direction = torchs,
                            .lr = static_cast<float>(torch.lr) * scale,
                            .weight_decay = static_cast<float>(torch.weight_decay) / scale,
                            .grad_scale = ops.one,
                            .seed = 1,
                            .step = t + 1,
                            .first_element = 0});
        Values bound(want.initial.size());
        for (size_t i = 0; i < bound.size(); ++i) {
          bound[i] = kWeightError * static_cast<float>(t + 1) * (1 + std::abs(want.initial[i]));
        }
        CHECK(count_wrong(weight.host(), want.weight[t], bound) == 0);
      }
      CHECK(ops.direction.guard_intact());
      CHECK(weight.guard_intact());
    }
  }
}

TEST_CASE("steps of an optimizer are torch's", "[optim][muon]") {
  const TorchRun torch = load_torch_run();
  OptimizerConfig config = muon_config();
  config.weight_decay = torch.weight_decay;
  std::vector<ParameterInfo> table;
  std::vector<const TorchMatrix*> wanted;
  int64_t first_element = 0;
  for (const auto& [name, matrix] : torch.matrices) {
    if (matrix.rows == 1 || matrix.cols == 1) continue;  // these are AdamW's
    table.push_back({name, matrix.rows, matrix.cols, kLinear, true, first_element});
    first_element += 128 * ceil_div(matrix.rows * matrix.cols, 128);
    wanted.push_back(&matrix);
  }
  REQUIRE(table.size() == 5);
  for (Device* device : devices()) {
    MuonRun run(config, table, *device);
    for (size_t i = 0; i < table.size(); ++i) run.optimizer.set_weight(*device, i, wanted[i]->initial);
    std::vector<double> direction_errors(table.size());
    for (size_t t = 0; t < wanted[0]->grads.size(); ++t) {
      for (size_t i = 0; i < table.size(); ++i) run.set_gradient(i, wanted[i]->grads[t]);
      REQUIRE(run.update(static_cast<int64_t>(t) + 1, torch.lr).applied);
      for (size_t i = 0; i < table.size(); ++i) {
        CAPTURE(int(device->kind()), table[i].name, t);
        const TorchMatrix& want = *wanted[i];
        CHECK(count_wrong(run.fp32_state(table[i].name + ".momentum"), want.momentum[t], momentum_bound(want, t)) ==
              0);
        const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(want.rows, want.cols)));
        direction_errors[i] += torch.lr * scale * kDirectionError * largest(want.direction[t]);
        Values bound(want.initial.size());
        for (size_t k = 0; k < bound.size(); ++k) {
          bound[k] = static_cast<float>(direction_errors[i]) +
                     kWeightError * static_cast<float>(t + 1) * (1 + std::abs(want.initial[k]));
        }
        CHECK(count_wrong(run.master(i), want.weight[t], bound) == 0);
      }
    }
  }
}

TEST_CASE("the first step is that of the orthogonalization which the config names", "[optim][muon]") {
  std::vector<Values> steps;
  for (const auto& [kind, name] : EnumNames<Orthogonalization>::kAll) {
    OptimizerConfig config = muon_config();
    config.orthogonalization = kind;
    MuonRun run(config);
    run.optimizer.set_weight(run.device, 1, Values(300));
    const Values gradient = random_normal(300, 1001, 1e-3f);
    REQUIRE(run.step(1).applied);
    steps.push_back(run.master(1));
    OpTensors ops(run.device, 6, 50);
    Values want = ops.orthogonalized(run.device, gradient, 0.95, kind);
    const float scale = 1e-3f * 0.2f * std::sqrt(50.0f);
    for (float& w : want) w *= -scale;
    // Wherever the optimizer multiplies by the scale, bf16 numbers may round otherwise.
    CAPTURE(name);
    CHECK(count_wrong(steps.back(), want, Values(300, kDirectionError * largest(want))) == 0);
  }
  CHECK(steps[0] != steps[1]);
}

TEST_CASE("matrices that are fused have the bits that they have apart", "[optim][muon]") {
  // Each has a multiple of 128 elements, so that groups of FP8 momentum are the same. q has another shape than k
  // and v, which lie beside a matrix of their shape.
  const std::vector<int64_t> rows = {16, 8, 8};
  const int64_t cols = 32;
  std::vector<ParameterInfo> fused = {{"qkv", 32, cols, kLinear, true, 1024}, {"w", 8, cols, kLinear, true, 2048}};
  fused[0].fused_rows = rows;
  const std::vector<ParameterInfo> apart = {{"q", 16, cols, kLinear, true, 1024},
                                            {"k", 8, cols, kLinear, true, 1536},
                                            {"v", 8, cols, kLinear, true, 1792},
                                            {"w", 8, cols, kLinear, true, 2048}};
  for (Device* device : devices()) {
    for (const OptimizerConfig& config : all_configs()) {
      CAPTURE(int(device->kind()), name_of(config.states), name_of(config.master));
      MuonRun one(config, fused, *device), several(config, apart, *device);
      const auto spread = [&](const Values& values, const auto& set) {
        size_t begin = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
          const size_t end = begin + static_cast<size_t>(rows[i] * cols);
          set(i, Values(values.begin() + static_cast<std::ptrdiff_t>(begin),
                        values.begin() + static_cast<std::ptrdiff_t>(end)));
          begin = end;
        }
      };
      const auto set_weight = [&](size_t i, const Values& w) { several.optimizer.set_weight(*device, i, w); };
      const Values initial = random_normal(fused[0].numel(), 5, 0.02f), other = random_normal(fused[1].numel(), 6);
      one.optimizer.set_weight(*device, 0, initial);
      spread(initial, set_weight);
      one.optimizer.set_weight(*device, 1, other);
      set_weight(3, other);
      for (int64_t t = 1; t <= 3; ++t) {
        const Values gradient = random_normal(fused[0].numel(), 50 + static_cast<uint64_t>(t), 1e-3f);
        one.set_gradient(0, gradient);
        spread(gradient, [&](size_t i, const Values& g) { several.set_gradient(i, g); });
        one.set_random_gradient(1, t);
        several.set_gradient(3, random_normal(fused[1].numel(), 1000 * static_cast<uint64_t>(t) + 1, 1e-3f));
        REQUIRE(one.update(t).applied);
        REQUIRE(several.update(t).applied);
      }
      const Bytes whole = one.bytes(), parts = several.bytes();
      for (const auto& [name, bytes] : whole) {
        if (!name.starts_with("qkv")) {
          CHECK((parts.at(name) == bytes));
          continue;
        }
        std::vector<std::byte> joined;
        for (const std::string part : {"q", "k", "v"}) {
          const std::vector<std::byte>& more = parts.at(part + name.substr(3));
          joined.insert(joined.end(), more.begin(), more.end());
        }
        CHECK((joined == bytes));
      }
    }
  }
}

TEST_CASE("what is not a matrix of a block is updated as by AdamW, bit for bit", "[optim][muon]") {
  for (OptimizerConfig config : all_configs()) {
    CAPTURE(name_of(config.states), name_of(config.master));
    MuonRun muon(config);
    config.kind = OptimizerKind::kAdamw;
    MuonRun adamw(config);
    for (int64_t t = 1; t <= 3; ++t) {
      const StepResult a = muon.step(t), b = adamw.step(t);
      CHECK((a.applied && b.applied && a.grad_norm == b.grad_norm));
    }
    const std::vector<std::string> rest = {"norm", "embedding", "line"};
    CHECK((muon.bytes(rest) == adamw.bytes(rest)));
    CHECK((muon.bytes({"first"}) != adamw.bytes({"first"})));
  }
}

TEST_CASE("gradients of zero decay weights and do nothing else", "[optim][muon]") {
  for (Device* device : devices()) {
    for (const StateFormat states : {StateFormat::kFp32, StateFormat::kFp8, StateFormat::kFp8Expanded}) {
      MuonRun run(muon_config(states), small_table(), *device);
      const std::vector<Values> before = {run.master(1), run.master(2), run.master(3)};
      for (size_t i = 0; i < run.weights.size(); ++i) {
        run.set_gradient(i, Values(static_cast<size_t>(run.weights[i].numel())));
      }
      REQUIRE(run.update(1, 0.5).applied);
      for (size_t i = 1; i <= 3; ++i) {  // the last is not decayed
        CAPTURE(int(device->kind()), name_of(states), i);
        Values want = before[i - 1];
        const double factor = i == 3 ? 1 : 1 - 0.5 * run.optimizer.config().weight_decay;
        for (float& w : want) w = static_cast<float>(w * factor);
        Values bound = want;
        for (float& b : bound) b = 0x1p-22f * std::abs(b);
        CHECK(count_wrong(run.master(i), want, bound) == 0);
        const TensorView momentum = run.state(run.optimizer.parameters()[i].name + ".momentum");
        std::vector<std::byte> stored(static_cast<size_t>(momentum.bytes()));
        device->copy_to_host(stored.data(), momentum.data, momentum.bytes());
        CHECK((stored == std::vector<std::byte>(stored.size())));
      }
      // After other gradients they still give a direction of full size, however small its momentum is.
      const Values start = run.master(3);
      run.set_random_gradient(3, 2);
      REQUIRE(run.update(2).applied);
      const double first = rms_change(start, run.master(3));
      run.set_gradient(3, Values(static_cast<size_t>(run.weights[3].numel())));
      const Values then = run.master(3);
      REQUIRE(run.update(3).applied);
      const double second = rms_change(then, run.master(3));
      // 0.2 lr, as far as singular values are between 0.65 and 1.2.
      for (const double rms : {first, second}) CHECK((rms > 0.65 * 0.2e-3 && rms < 1.2 * 0.2e-3));
    }
  }
}

TEST_CASE("a gradient that is not finite changes nothing", "[optim][muon][hazards]") {
  const float bad =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e20f);
  for (Device* device : all_devices()) {
    for (OptimizerConfig config : all_configs()) {
      for (const bool offload : {false, true}) {
        config.offload = offload;
        CAPTURE(int(device->kind()), name_of(config.states), name_of(config.master), bad, offload);
        MuonRun run(config, small_table(), *device, 256);
        REQUIRE(run.step(1).applied);
        const Bytes before = run.bytes();
        run.set_random_gradients(2);
        Values gradient = random_normal(run.weights[2].numel(), 3);
        gradient[7] = bad;
        run.set_gradient(2, gradient);
        const StepResult result = run.update(2);
        CHECK_FALSE(result.applied);
        CHECK_FALSE(std::isfinite(result.grad_norm));
        CHECK(result.culprit == "qkv");
        CHECK((run.bytes() == before));
        CHECK(run.step(3).applied);
        CHECK((run.bytes() != before));
      }
    }
  }
}

TEST_CASE("a matrix has one state, and masters as with AdamW", "[optim][muon]") {
  constexpr int64_t kRows = 256, kCols = 1024;  // sizes that need no padding to 256 bytes
  constexpr double kNumel = kRows * kCols;
  const std::map<StateFormat, double> wanted = {{StateFormat::kFp32, 4},
                                                {StateFormat::kBf16, 2},
                                                {StateFormat::kFp8, 1 + 4.0 / 128},
                                                {StateFormat::kFp8Expanded, 1 + 5.0 / 128}};
  for (const OptimizerConfig& config : all_configs()) {
    CAPTURE(name_of(config.states), name_of(config.master));
    OptimizerConfig adamw_config = config;
    adamw_config.kind = OptimizerKind::kAdamw;
    const std::vector<ParameterInfo> table = {{"w", kRows, kCols, kLinear, true, 0}};
    const MuonRun muon(config, table), adamw(adamw_config, table);
    const auto states = [](const MuonRun& run) {
      return static_cast<double>(bytes_of(run.plan, kStateCategory)) / kNumel;
    };
    CHECK(states(muon) == wanted.at(config.states));
    CHECK(states(adamw) == 2 * wanted.at(config.states));
    CHECK(bytes_of(muon.plan, kMasterCategory) == bytes_of(adamw.plan, kMasterCategory));
    CHECK(bytes_of(muon.plan, kGradientCategory) == bytes_of(adamw.plan, kGradientCategory));
  }
}

TEST_CASE("states are named momentum where Muon updates, and as AdamW's elsewhere", "[optim][muon]") {
  const auto described = [](StateFormat states, MasterForm master) {
    const MuonRun run(muon_config(states, master),
                      {{"w", 6, 50, kLinear, true, 0}, {"norm", 1, 7, ParameterRole::kNorm, false, 384}});
    std::vector<std::string> names;
    for (const NamedTensor& tensor : run.optimizer.state())
      names.push_back(tensor.name + " " + describe(tensor.view));
    return names;
  };
  CHECK(described(StateFormat::kFp8Expanded, MasterForm::kFp32) ==
        std::vector<std::string>{"w.master uint16 [300]", "w.momentum e4m3 [300]", "w.momentum.amax fp32 [3]",
                                 "w.momentum.exponent uint8 [3]", "norm.master uint16 [7]", "norm.exp_avg e4m3 [7]",
                                 "norm.exp_avg.amax fp32 [1]", "norm.exp_avg.exponent uint8 [1]",
                                 "norm.exp_avg_sq e4m3 [7]", "norm.exp_avg_sq.amax fp32 [1]",
                                 "norm.exp_avg_sq.exponent uint8 [1]"});
  CHECK(described(StateFormat::kFp8, MasterForm::kBf16Sr) ==
        std::vector<std::string>{"w.momentum e4m3 [300]", "w.momentum.amax fp32 [3]", "norm.exp_avg e4m3 [7]",
                                 "norm.exp_avg.amax fp32 [1]", "norm.exp_avg_sq e4m3 [7]",
                                 "norm.exp_avg_sq.amax fp32 [1]"});
  CHECK(described(StateFormat::kFp32, MasterForm::kNone) ==
        std::vector<std::string>{"w.momentum fp32 [300]", "norm.exp_avg fp32 [7]", "norm.exp_avg_sq fp32 [7]"});
}

TEST_CASE("Muon's states in host memory give the same bits in every format, whatever part passes at a time",
          "[optim][muon][offload]") {
  for (Device* device : all_devices()) {
    for (const OptimizerConfig& config : all_configs()) {
      MuonRun plain(config, small_table(), *device);
      for (int64_t step = 1; step <= 3; ++step) REQUIRE(plain.step(step).applied);
      const Bytes want = plain.bytes();
      for (const int64_t part : {int64_t{128}, int64_t{384}, StateStream::kPartElements}) {
        CAPTURE(int(device->kind()), name_of(config.states), name_of(config.master), part);
        OptimizerConfig offloaded = config;
        offloaded.offload = true;
        MuonRun moved(offloaded, small_table(), *device, part);
        for (int64_t step = 1; step <= 3; ++step) REQUIRE(moved.step(step).applied);
        CHECK((moved.bytes() == want));
        CHECK(moved.arena->is_in_host_memory(moved.state("qkv.momentum")));
        CHECK_FALSE(moved.arena->is_in_host_memory(moved.state("norm.exp_avg")));
      }
    }
  }
}

TEST_CASE("Muon's updates of released gradients have the bits of those of kept ones", "[optim][muon]") {
  std::vector<ParameterInfo> table = small_table();
  for (size_t i = 0; i < table.size(); ++i) table[i].unit = static_cast<int>(i) / 3;  // alike are of two units
  for (OptimizerConfig config : all_configs()) {
    for (const bool offload : {false, true}) {
      CAPTURE(name_of(config.states), name_of(config.master), offload);
      config.release_gradients = false;
      MuonRun kept(config, table);
      config.release_gradients = true;
      config.offload = offload;
      MuonRun released(config, table, cpu_device(), 256);
      config.offload = false;
      released.optimizer.set_last_norm(released.device, 0);
      for (int64_t t = 1; t <= 3; ++t) {
        REQUIRE(kept.step(t).applied);
        released.optimizer.begin_step(released.device);
        released.optimizer.begin_update(released.device);
        for (int unit = 2; unit >= 0; --unit) {
          for (size_t i = 0; i < table.size(); ++i) {
            if (table[i].unit == unit) released.set_random_gradient(i, t);
          }
          queue_unit(released.optimizer, released.device, {.step = t, .lr = 1e-3, .seed = 99}, unit);
        }
        CHECK(released.optimizer.end_step(released.device).wait().applied);
        CHECK((released.bytes() == kept.bytes()));
      }
    }
  }
}

TEST_CASE("telemetry has the size and largest singular value of each matrix's update", "[optim][muon]") {
  std::vector<ParameterInfo> table = {{"norm", 1, 8, ParameterRole::kNorm, false, 0},
                                      {"fused", 48, 32, kLinear, true, 128},
                                      {"rank_one", 24, 40, kLinear, true, 1664},
                                      {"zeros", 8, 8, kLinear, true, 2688},
                                      {"random", 60, 20, kLinear, true, 2816}};
  table[1].fused_rows = {32, 16};
  // Orthogonal rows: Hadamard's matrix, and half of one.
  Values hadamard, rank_one;
  for (int64_t i = 0; i < table[1].numel(); ++i) {
    const int64_t row = i / 32 % 32, col = i % 32;
    hadamard.push_back(std::popcount(static_cast<uint64_t>(row & col)) % 2 == 0 ? 1.0f : -1.0f);
  }
  for (int64_t i = 0; i < table[2].numel(); ++i) {
    rank_one.push_back(std::ldexp(1.0f, static_cast<int>(i / 40 % 3)) * (i % 40 % 2 == 0 ? -1.0f : 1.0f));
  }
  // The largest singular value is a sum of squares, and each step of the power method rounds each number once.
  constexpr double kError = 0x1p-7;
  for (Device* device : devices()) {
    MuonRun run(muon_config(), table, *device), plain(muon_config(), table, *device);
    for (MuonRun* one : {&run, &plain}) {
      one->set_random_gradients(1);
      one->set_gradient(1, hadamard);
      one->set_gradient(2, rank_one);
      one->set_gradient(3, Values(64));
    }
    MatrixUpdates& matrices = run.optimizer.matrices();
    matrices.begin_telemetry(*device, true);
    REQUIRE(run.update(1).applied);
    REQUIRE(plain.update(1).applied);
    CHECK((run.bytes() == plain.bytes()));
    CHECK(plain.optimizer.matrices().sums().empty());
    Values sums(static_cast<size_t>(matrices.sums().numel()));
    device->copy_to_host(sums.data(), matrices.sums().data, matrices.sums().bytes());
    std::vector<double> rms, largest;
    std::vector<size_t> parameters;
    for (const MatrixUpdates::Matrix& matrix : matrices.measured()) {
      const float* const of_matrix = sums.data() + MatrixUpdates::kSums * rms.size();
      parameters.push_back(matrix.parameter);
      rms.push_back(matrix.rms(of_matrix));
      largest.push_back(matrix.singular_value(of_matrix));
    }
    CAPTURE(int(device->kind()), rms, largest);
    REQUIRE(parameters == std::vector<size_t>{1, 1, 2, 3, 4});
    // All r singular values s are equal there, so O has s^2 r squares of max(m, n) r numbers, and the scale is 0.2
    // of the root of that.
    const auto near = [](double got, double want) { return std::abs(got - want) <= kError * want; };
    for (const size_t i : {0, 1}) {
      CHECK(near(rms[i], 0.2 * largest[i]));
      CHECK((largest[i] > 0.6 && largest[i] < 1.25));
    }
    CHECK(near(rms[2], 0.2 * largest[2] / std::sqrt(24.0)));
    CHECK((largest[2] > 0.6 && largest[2] < 1.25));
    CHECK((rms[3] == 0 && std::isnan(largest[3])));
    // A lower bound of what is at most 1.2, and of no less than the root mean square of all.
    CHECK((rms[4] > 0.2 * 0.6 && rms[4] < 0.2 * 1.25));
    CHECK((largest[4] > 0.95 * rms[4] / 0.2 && largest[4] < 1.25));
    matrices.begin_telemetry(*device, false);
    CHECK(matrices.sums().empty());
  }
}

TEST_CASE("a frozen matrix stays, and those of its shape move as beside a trained one", "[optim][muon]") {
  std::vector<ParameterInfo> table = small_table();
  table[1].trainable = false;
  MuonRun frozen(muon_config(StateFormat::kFp8, MasterForm::kFp32), table);
  MuonRun all(muon_config(StateFormat::kFp8, MasterForm::kFp32));
  const Bytes before = frozen.bytes({"first"});
  for (int64_t t = 1; t <= 3; ++t) {
    for (size_t i = 0; i < table.size(); ++i) {
      if (table[i].trainable) frozen.set_random_gradient(i, t);
    }
    REQUIRE(frozen.update(t).applied);
    REQUIRE(all.step(t).applied);
  }
  CHECK(before.size() == 1);  // a weight without master and states
  CHECK((frozen.bytes({"first"}) == before));
  const std::vector<std::string> rest = {"norm", "qkv", "tall", "embedding", "alike", "line"};
  CHECK((frozen.bytes(rest) == all.bytes(rest)));
}

TEST_CASE("a matrix with a learning rate of its own takes it for update and decay", "[optim][muon]") {
  std::vector<ParameterInfo> table = small_table();
  table[1].lr_factor = 0.25;
  MuonRun slow(muon_config(), table), plain(muon_config());
  for (int64_t t = 1; t <= 3; ++t) {
    REQUIRE(slow.step(t, 4e-3).applied);
    REQUIRE(plain.step(t, 1e-3).applied);
  }
  CHECK((slow.bytes({"first"}) == plain.bytes({"first"})));
  CHECK((slow.bytes({"alike"}) != plain.bytes({"alike"})));
}

TEST_CASE("Muon is refused where it has nothing to update", "[optim][muon]") {
  std::vector<ParameterInfo> table = small_table();
  for (ParameterInfo& p : table) p.trainable = p.name == "norm" || p.name == "line";
  const std::string message = refusal([&] { const MuonRun run(muon_config(), table); });
  CHECK(message.find("optimizer.kind") != std::string::npos);
}
