// Masters and moments in host memory, against the same with all on the device.
#include "optim/state_stream.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/device_with_late_copies.h"
#include "tests/support/tensors.h"
#include "tests/support/updates.h"

using namespace parka;
using namespace parka::test;

namespace {

// Matrices of one part and of many, with short last groups, and a vector between them.
std::vector<ParameterInfo> table() {
  constexpr ParameterRole kLinear = ParameterRole::kLinear;
  return {{"small", 3, 50, kLinear, true, 0},
          {"norm", 1, 300, ParameterRole::kNorm, false, 256},
          {"large", 5, 259, kLinear, true, 640},
          {"last", 2, 75, kLinear, true, 2048}};
}

// All devices, and a CPU with late copies.
std::vector<Device*> stream_devices() {
  static DeviceWithLateCopies late;
  std::vector<Device*> all = devices();
  all.push_back(&late);
  return all;
}

using Bytes = std::vector<std::vector<std::byte>>;

// An optimizer in its memory, with the weights that a model would own.
class OptimizerRun {
 public:
  OptimizerRun(Device& device_, const OptimizerConfig& config, int64_t part_elements)
      : device(device_),
        compute(config.master == MasterForm::kNone ? DType::kF32 : DType::kBF16),
        optimizer(config, compute, table(), plan, /*is_alone=*/true, part_elements) {
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : table()) ids.push_back(plan.add("weights", p.name, compute, {p.numel()}));
    const TensorId amax = plan.add("amax", "weight_amax", DType::kF32, {static_cast<int64_t>(ids.size())});
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    for (const TensorId id : ids) tensors.push_back((*arena)[id]);
    optimizer.bind(*arena, tensors, (*arena)[amax]);
    tensors.push_back((*arena)[amax]);
    for (const NamedTensor& tensor : optimizer.state()) tensors.push_back(tensor.view);
    for (size_t i = 0; i < table().size(); ++i) {
      optimizer.set_weight(device, i, random_normal(table()[i].numel(), 1 + i, 0.02f));
    }
  }

  StepResult step(int64_t step, float scale = 1e-3f) {
    for (size_t i = 0; i < table().size(); ++i) {
      const TensorView& gradient = optimizer.gradients()[i];
      const auto values = random_normal(gradient.numel(), 1000 * static_cast<uint64_t>(step) + i, scale);
      device.copy_to_device(gradient.data, values.data(), gradient.bytes());
    }
    return queue_step(optimizer, device, {.step = step, .lr = 1e-3, .seed = 99}).wait();
  }
  // Weights, their maxima and states.
  Bytes bytes() const {
    Bytes copies;
    for (const TensorView& view : tensors) {
      copies.emplace_back(static_cast<size_t>(view.bytes()));
      device.copy_to_host(copies.back().data(), view.data, view.bytes());
    }
    return copies;
  }

  Device& device;
  DType compute;
  MemoryPlan plan;
  Optimizer optimizer;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> tensors;
};

std::vector<OptimizerConfig> all_configs() {
  std::vector<OptimizerConfig> configs;
  for (const auto& [states, name] : EnumNames<StateFormat>::kAll) {
    for (const auto& [master, master_name] : EnumNames<MasterForm>::kAll) {
      OptimizerConfig& config = configs.emplace_back();
      config.states = states;
      config.master = master;
    }
  }
  return configs;
}

OptimizerConfig offloaded(OptimizerConfig config) {
  config.offload = true;
  return config;
}

std::map<std::string, int64_t> bytes_by_category(const std::vector<MemoryPlan::CategoryTotal>& totals) {
  std::map<std::string, int64_t> bytes;
  for (const auto& total : totals) bytes[total.category] = total.bytes;
  return bytes;
}

// Two parameters of which weights are in host memory and masters on the device, and one on the device alone.
struct StreamRun {
  explicit StreamRun(Device& device_, int64_t numel_ = 1000, int64_t part = 256,
                     size_t num_slots = StateStream::kLeastSlots)
      : device(device_), numel(numel_) {
    for (size_t i = 0; i < 3; ++i) {
      const MemoryPlace place = i < 2 ? MemoryPlace::kHost : MemoryPlace::kDevice;
      weights[i] = plan.add("w", "w", DType::kF32, {numel}, kAllPhases, place);
      masters[i] = plan.add("m", "m", DType::kF32, {numel});
    }
    std::vector<TensorId> ids;
    for (size_t i = 0; i < num_slots; ++i) {
      ids.push_back(plan.add("s", "slot", DType::kU8, {StateStream::slot_bytes({part * 4})}));
    }
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    std::vector<TensorView> slots;
    for (const TensorId id : ids) slots.push_back((*arena)[id]);
    std::vector<ParameterState> states;
    for (size_t i = 0; i < 3; ++i) {
      const auto values = random_normal(numel, i);
      device.copy_to_device((*arena)[weights[i]].data, values.data(), 4 * numel);
      states.push_back({(*arena)[weights[i]], (*arena)[masters[i]]});
    }
    stream = std::make_unique<StateStream>(*arena, std::move(slots), std::move(states), part);
  }

  // "Updates" parameter i: its weights go to its masters, and become zeros.
  void update(size_t i) {
    int64_t next = 0;
    stream->update(i, [&](int64_t first, const ParameterState& part) {
      CHECK(first == next);
      CHECK_FALSE(arena->is_in_host_memory(part.weight));
      device.copy(part.master.data, part.weight.data, part.weight.bytes());
      device.fill_zero(part.weight.data, part.weight.bytes());
      next += part.weight.numel();
    });
    CHECK(next == numel);
  }
  std::vector<float> host(TensorId id) const {
    std::vector<float> values(static_cast<size_t>(numel));
    device.copy_to_host(values.data(), (*arena)[id].data, 4 * numel);
    return values;
  }
  bool is_updated(size_t i) const {
    return host(masters[i]) == random_normal(numel, i) &&
           host(weights[i]) == std::vector<float>(static_cast<size_t>(numel));
  }
  bool is_untouched(size_t i) const { return host(weights[i]) == random_normal(numel, i); }

  Device& device;
  int64_t numel;
  MemoryPlan plan;
  TensorId weights[3], masters[3];
  std::unique_ptr<Arena> arena;
  std::unique_ptr<StateStream> stream;
};

}  // namespace

TEST_CASE("states in host memory give the same bits in every format, whatever part passes at a time",
          "[optim][offload]") {
  for (Device* device : stream_devices()) {
    for (const OptimizerConfig& config : all_configs()) {
      for (const int64_t part : {int64_t{128}, int64_t{384}, StateStream::kPartElements}) {
        CAPTURE(int(device->kind()), name_of(config.states), name_of(config.master), part);
        OptimizerRun plain(*device, config, part), moved(*device, offloaded(config), part);
        CHECK((moved.bytes() == plain.bytes()));
        for (int64_t step = 1; step <= 3; ++step) {
          const StepResult a = plain.step(step), b = moved.step(step);
          CHECK((a.applied && b.applied && a.grad_norm == b.grad_norm));
        }
        CHECK((moved.bytes() == plain.bytes()));
        const Bytes before = moved.bytes();
        const StepResult skipped = moved.step(4, INFINITY);
        CHECK_FALSE(skipped.applied);
        CHECK((moved.bytes() == before));
      }
    }
  }
}

TEST_CASE("masters and moments of matrices are in host memory, those of vectors and all else on the device",
          "[optim][offload]") {
  OptimizerConfig config;
  config.states = StateFormat::kFp8Expanded;
  const OptimizerRun plain(cpu_device(), config, 256), moved(cpu_device(), offloaded(config), 256);
  CHECK(plain.plan.total_host_bytes() == 0);
  std::map<std::string, int64_t> before = bytes_by_category(plain.plan.summary()),
                                 host = bytes_by_category(moved.plan.host_summary());
  CHECK(host.size() == 2);
  for (const auto& [category, bytes] : bytes_by_category(moved.plan.summary())) {
    CAPTURE(category);
    if (category == kStreamCategory) {
      CHECK(bytes == 3 * (512 + 2 * (256 + 256 + 256)));  // a master, and twice codes, maxima and exponents
    } else {
      CHECK(bytes == before[category] - host[category]);
    }
  }
  CHECK(moved.plan.total_bytes() == plain.plan.total_bytes() - moved.plan.total_host_bytes() + 3 * 2048);
  for (const NamedTensor& tensor : moved.optimizer.state()) {
    CAPTURE(tensor.name);
    CHECK(moved.arena->is_in_host_memory(tensor.view) == !tensor.name.starts_with("norm."));
  }
}

TEST_CASE("where gradients are released there are buffers for all parts of the largest block", "[optim][offload]") {
  // Of 150, 1295 and 600 elements; embedding and head do not count.
  const auto num_buffers = [](std::vector<int> units, bool releases) {
    std::vector<ParameterInfo> parameters = table();
    for (size_t i = 0; i < units.size(); ++i) parameters[i].unit = units[i];
    OptimizerConfig config = offloaded({});
    config.release_gradients = releases;
    MemoryPlan plan;
    const Optimizer optimizer(config, DType::kBF16, parameters, plan, /*is_alone=*/true, 256);
    int64_t count = 0;
    for (const MemoryPlan::Entry& entry : plan.entries()) count += entry.category == kStreamCategory;
    return count;
  };
  CHECK(num_buffers({0, 1, 1, 2}, false) == 3);
  CHECK(num_buffers({0, 1, 1, 2}, true) == 3 + 6);
  CHECK(num_buffers({0, 1, 2, 2}, true) == 3);
}

TEST_CASE("weights are set, copied and read wherever masters are", "[optim][offload]") {
  for (Device* device : stream_devices()) {
    OptimizerRun run(*device, offloaded({}), 256);
    const std::vector<float> values = random_normal(150, 77);
    run.optimizer.set_weight(*device, 0, values);
    CHECK(master_weight(*device, run.optimizer, 0, run.tensors[0]) == values);
    run.step(1);
    CHECK(master_weight(*device, run.optimizer, 0, run.tensors[0]) != values);
    run.optimizer.set_weight(*device, 0, values);
    run.optimizer.copy_weight(*device, 0, 3);
    CHECK(master_weight(*device, run.optimizer, 3, run.tensors[3]) == values);
  }
}

TEST_CASE("any tensor of a parameter passes through the buffers, part after part", "[optim][offload]") {
  for (Device* device : stream_devices()) {
    for (const auto& [numel, part] : {std::pair<int64_t, int64_t>{1000, 256}, {1 << 20, 1 << 15}}) {
      for (const size_t num_slots : {StateStream::kLeastSlots, size_t{7}}) {
        CAPTURE(int(device->kind()), numel, part, num_slots);
        StreamRun run(*device, numel, part, num_slots);
        run.stream->begin({0, 1, 2});
        for (const size_t i : {0, 1, 2}) run.update(i);
        run.stream->end();
        for (const size_t i : {0, 1, 2}) CHECK(run.is_updated(i));
      }
    }
  }
}

TEST_CASE("parameters are updated in any order, whatever order was announced", "[optim][offload]") {
  const std::vector<size_t> orders[] = {{0, 1, 2}, {2, 1, 0}, {1, 0}, {1}, {}};
  for (Device* device : stream_devices()) {
    for (const std::vector<size_t>& announced : orders) {
      for (const std::vector<size_t>& updated : orders) {
        CAPTURE(int(device->kind()), announced, updated);
        StreamRun run(*device);
        run.stream->begin(announced);
        for (const size_t i : updated) run.update(i);
        run.stream->end();
        for (const size_t i : {0, 1, 2}) {
          const bool is_one = std::find(updated.begin(), updated.end(), i) != updated.end();
          CHECK((is_one ? run.is_updated(i) : run.is_untouched(i)));
        }
      }
    }
  }
}
