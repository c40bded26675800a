#include "engine/checkpoint/checkpoint_states.h"

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <span>

#include "core/split_float.h"
#include "kernels/ops/optimizer/adamw.h"
#include "tests/engine/run_beside_base.h"
#include "tests/engine/training_run_fixture.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/updates.h"

using namespace parka;
using namespace parka::test;

// Runs that go on with other formats of masters and moments than those that they were saved with.
namespace {

struct StateFormats {
  StateFormat states;
  MasterForm master;
};

Config with_formats(Config config, const StateFormats& formats) {
  config.optimizer.states = formats.states;
  config.optimizer.master = formats.master;
  validate(config);
  return config;
}

LoadedCheckpoint saved_after(TrainingRun& run, const std::string& folder, int steps = 3) {
  run.initialize();
  for (int i = 0; i < steps; ++i) REQUIRE(run.step()->applied);
  return saved(run, folder, [](CheckpointContents&) {});
}

std::vector<float> decoded(const MomentView& moment) {
  std::vector<float> values(static_cast<size_t>(moment.values.numel()));
  moment_decode(*make_cpu_device(),
                {.moment = moment, .values = {values.data(), DType::kF32, {moment.values.numel()}}});
  return values;
}

// Returns the values as a moment of the format of `like` stores them.
std::vector<float> stored_as(const MomentView& like, std::vector<float> values, bool is_second) {
  MomentView target = like;
  std::vector<std::byte> bytes[3];
  int next = 0;
  for (TensorView* t : {&target.values, &target.amax, &target.exponent}) {
    bytes[next].resize(static_cast<size_t>(t->bytes()));
    t->data = bytes[next++].data();
  }
  moment_encode(
      *make_cpu_device(),
      {.values = {values.data(), DType::kF32, {like.values.numel()}}, .moment = target, .is_second = is_second});
  return decoded(target);
}

float held_by(MasterForm form, float x) {
  switch (form) {
    case MasterForm::kFp24Split: return round_to_float24(x, kNearestPhase);
    case MasterForm::kBf16Sr: return decode_bf16(encode_bf16(x));
    default: return x;
  }
}

std::span<const float> part(const std::vector<float>& values, ElementRange range) {
  return std::span(values).subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.size()));
}

bool same(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Masters and moments of a whole run, by parameter.
struct Whole {
  std::vector<std::vector<float>> masters, exp_avg, exp_avg_sq;

  Whole(Device& device, const TrainingRun& run) {
    for (size_t i = 0; i < run.optimizer().parameters().size(); ++i) {
      masters.push_back(master_weight(device, run.optimizer(), i, run.model().weights().own()[i]));
      exp_avg.push_back(decoded(run.optimizer().state(i, 0)));
      exp_avg_sq.push_back(decoded(run.optimizer().state(i, 1)));
    }
  }
};

}  // namespace

TEST_CASE("a run goes on with other formats of masters and moments", "[engine][checkpoint states]") {
  using S = StateFormat;
  using M = MasterForm;
  const std::pair<StateFormats, StateFormats> changes[] = {
      {{S::kFp32, M::kFp32}, {S::kFp8Expanded, M::kFp32}},      {{S::kFp32, M::kFp32}, {S::kBf16, M::kFp24Split}},
      {{S::kFp8Expanded, M::kFp24Split}, {S::kFp32, M::kFp32}}, {{S::kBf16, M::kBf16Sr}, {S::kFp8, M::kFp32}},
      {{S::kFp8, M::kFp32}, {S::kFp8Expanded, M::kBf16Sr}},
  };
  for (const auto& [from, to] : changes) {
    CAPTURE(name_of(from.states), name_of(from.master), name_of(to.states), name_of(to.master));
    const TemporaryFolder folder;
    const Config config = tiny_config(folder.path().string(), "bf16");
    const auto device = make_cpu_device();
    TrainingRun run(with_formats(config, from), *device, alone()), next(with_formats(config, to), *device, alone());
    const LoadedCheckpoint checkpoint = saved_after(run, config.checkpoint.folder);
    CHECK(refusal([&] { next.restore(checkpoint); }).find("--convert-states") != std::string::npos);
    TrainingRun converted(with_formats(config, to), *device, alone());
    const std::vector<std::string> differences = converted.restore(checkpoint, /*converts_states=*/true);
    CHECK_FALSE(differences.empty());
    CHECK(differences.back().ends_with(", converted"));
    CHECK(converted.completed_steps() == 3);

    const Whole before(*device, run), after(*device, converted);
    for (size_t i = 0; i < before.masters.size(); ++i) {
      CAPTURE(run.optimizer().parameters()[i].name);
      std::vector<float> wanted = before.masters[i];
      for (float& x : wanted) x = held_by(to.master, x);
      CHECK(same(after.masters[i], wanted));
      const Optimizer& optimizer = converted.optimizer();
      CHECK(same(after.exp_avg[i], stored_as(optimizer.state(i, 0), before.exp_avg[i], false)));
      CHECK(same(after.exp_avg_sq[i], stored_as(optimizer.state(i, 1), before.exp_avg_sq[i], true)));
    }
    CHECK(converted.step()->loss == Approx(run.step()->loss).epsilon(0.01));

    // What it saves then is in its formats.
    const LoadedCheckpoint own = saved(converted, folder.path().string() + "/own", [](CheckpointContents&) {});
    TrainingRun restored(with_formats(config, to), *device, alone());
    restored.restore(own);
    CHECK(converted.step()->loss == restored.step()->loss);
  }
}

// As earlier versions saved it: fp32 masters of their own, beside the weights.
void set_masters_apart(CheckpointContents& contents) {
  std::map<std::string, const HostTensor*> by_name;
  for (const HostTensor& tensor : contents.tensors) by_name.emplace(tensor.name, &tensor);
  for (HostTensor& tensor : contents.tensors) {
    if (!tensor.name.ends_with(".master")) continue;
    REQUIRE(tensor.dtype == DType::kU16);
    const HostTensor& weight = *by_name.at(tensor.name.substr(0, tensor.name.rfind('.')));
    std::vector<float> values(tensor.bytes.size() / sizeof(uint16_t));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = join_float(reinterpret_cast<const BFloat16*>(weight.bytes.data())[i],
                             reinterpret_cast<const uint16_t*>(tensor.bytes.data())[i]);
    }
    tensor.dtype = DType::kF32;
    tensor.bytes.resize(values.size() * sizeof(float));
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  }
  contents.state["config"]["optimizer"]["master"] = "fp32_split";  // either name
}

TEST_CASE("a run with fp32 masters apart from its weights goes on with the same bits",
          "[engine][checkpoint states]") {
  for (const StateFormat states : {StateFormat::kFp32, StateFormat::kFp8Expanded}) {
    const TemporaryFolder folder;
    const Config config = with_formats(tiny_config(folder.path().string(), "bf16"), {states, MasterForm::kFp32});
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone()), next(config, *device, alone());
    saved_after(run, config.checkpoint.folder);
    const LoadedCheckpoint earlier = saved(run, folder.path().string() + "/earlier", set_masters_apart);
    next.restore(earlier);
    CHECK((bytes_of(next) == bytes_of(run)));
    for (int i = 0; i < 3; ++i) CHECK(next.step()->loss == run.step()->loss);
  }
}

TEST_CASE("states of any number of ranks are converted to the same values", "[engine][checkpoint states][zero]") {
  const StateFormats from = {StateFormat::kFp32, MasterForm::kFp32},
                     to = {StateFormat::kFp8Expanded, MasterForm::kFp24Split};
  for (const int64_t stage : {0, 1, 3}) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = tiny_config(folder.path().string(), "bf16");
    config.model.norm = NormKind::kRmsNorm;  // a rank has nothing of its weights, less than a group
    config.distributed.zero_stage = stage;
    const auto device = make_cpu_device();
    // Saved by two ranks, in pieces.
    ThreadRanks(2).run([&](Communicator& communicator) {
      const auto of_rank = make_cpu_device();
      TrainingRun run(with_formats(config, from), *of_rank, communicator);
      run.initialize();
      for (int i = 0; i < 2; ++i) PARKA_REQUIRE(run.step()->applied);
      save_checkpoint(config.checkpoint.folder, run.snapshot(),
                      {.group = {.rank = communicator.rank(), .size = communicator.size(), .id = "together"}});
    });
    const LoadedCheckpoint checkpoint = load_checkpoint(list_checkpoints(config.checkpoint.folder).front().path);
    TrainingRun one(with_formats(config, from), *device, alone()),
        converted(with_formats(config, to), *device, alone());
    one.restore(checkpoint);
    converted.restore(checkpoint, /*converts_states=*/true);
    const Whole before(*device, one), after(*device, converted);
    CHECK((before.masters != after.masters));  // 24 bits
    for (size_t i = 0; i < before.masters.size(); ++i) {
      CHECK(same(after.exp_avg_sq[i], stored_as(converted.optimizer().state(i, 1), before.exp_avg_sq[i], true)));
    }
    ThreadRanks(2).run([&](Communicator& communicator) {
      const auto of_rank = make_cpu_device();
      TrainingRun run(with_formats(config, to), *of_rank, communicator);
      run.restore(checkpoint, /*converts_states=*/true);
      const Whole own(*of_rank, run);
      for (size_t i = 0; i < own.masters.size(); ++i) {
        const ElementRange range = run.optimizer().parameters()[i].own_elements();
        PARKA_REQUIRE(same(own.masters[i], part(after.masters[i], range)));
        PARKA_REQUIRE(same(own.exp_avg[i], part(after.exp_avg[i], range)));
        PARKA_REQUIRE(same(own.exp_avg_sq[i], part(after.exp_avg_sq[i], range)));
      }
      PARKA_REQUIRE(run.step()->applied);
    });
  }
}

TEST_CASE("states of adapters are converted beside a base that stays", "[engine][checkpoint states][lora]") {
  const TemporaryFolder folder;
  const Config plain = base_config(folder, "bf16");
  const LoadedCheckpoint base = make_base(plain);
  Config config = plain;
  config.checkpoint.init_from = plain.checkpoint.folder;
  config.checkpoint.folder += "_lora";
  config.finetune.method = FinetuneMethod::kLora;
  config.finetune.rank = 4;
  config.finetune.alpha = 8;
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize_from(base);
  REQUIRE(run.step()->applied);
  const LoadedCheckpoint checkpoint = save(run, config.checkpoint.folder);
  const Config other = with_formats(config, {StateFormat::kFp8Expanded, MasterForm::kFp32});
  TrainingRun converted(other, *device, alone());
  converted.restore(checkpoint, /*converts_states=*/true);
  CHECK(converted.evaluate(converted.data()).loss == run.evaluate(run.data()).loss);
  CHECK(converted.step()->loss == run.step()->loss);  // forward reads no moments
}

TEST_CASE("states that are no moments are not converted", "[engine][checkpoint states]") {
  using Damage = void (*)(HostTensor&);
  struct Case {
    const char* tensor;
    Damage damage;
    const char* message;
  };
  const Case cases[] = {
      {"blocks.0.ffn_norm.weight.exp_avg", nullptr, "lacks the tensor"},
      {".exp_avg_sq", [](HostTensor& t) { std::memset(t.bytes.data(), 0xff, 4); }, "NaN or infinite"},
      {"qkv", [](HostTensor& t) { std::memset(t.bytes.data(), 0xff, 4); }, "NaN or infinite"},
      {".exp_avg",
       [](HostTensor& t) {
         t.shape = {t.shape[0] / 2, 2};
       },
       "no moment of this model"},
      {".exp_avg", [](HostTensor& t) { t.dtype = DType::kI32; }, "no moment of this model"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.tensor, c.message);
    const TemporaryFolder folder;
    const Config config = tiny_config(folder.path().string(), "bf16");
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone());
    saved_after(run, config.checkpoint.folder);
    const LoadedCheckpoint damaged =
        saved(run, folder.path().string() + "/damaged", [&](CheckpointContents& contents) {
          const auto found = std::ranges::find_if(contents.tensors, [&](const HostTensor& t) {
            return t.name.ends_with(c.damage == nullptr ? ".exp_avg" : c.tensor) && t.shape[0] > 1;
          });
          REQUIRE(found != contents.tensors.end());
          if (c.damage == nullptr)
            contents.tensors.erase(found);
          else
            c.damage(*found);
        });
    TrainingRun next(with_formats(config, {StateFormat::kFp8, MasterForm::kFp24Split}), *device, alone());
    CHECK(refusal([&] { next.restore(damaged, /*converts_states=*/true); }).find(c.message) != std::string::npos);
  }
}
