#include <functional>
#include <map>

#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/step/declared_run.h"
#include "engine/training/training_run.h"
#include "model/coded_weights.h"
#include "tests/engine/run_beside_base.h"
#include "tests/support/catch.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs that train adapters beside weights that are stored as codes (finetune.base).
namespace {

constexpr int kSteps = 3;

Config with_adapters(Config config, BaseFormat base) {
  config.checkpoint.init_from = config.checkpoint.folder;
  config.checkpoint.folder += "_lora";
  config.finetune.method = FinetuneMethod::kLora;
  config.finetune.base = base;
  config.finetune.rank = 4;
  config.finetune.alpha = 8;
  if (config.model.moe.exists() && config.precision.gemm == GemmPrecision::kCompute) {
    config.finetune.targets.insert(config.finetune.targets.end(), {"experts.up_proj", "experts.down_proj"});
  }
  validate(config);
  return config;
}

const std::pair<const char*, BaseFormat> kRuns[] = {{"fp32", BaseFormat::kNf4},     {"bf16", BaseFormat::kNf4},
                                                    {"bf16", BaseFormat::kFp4},     {"parka", BaseFormat::kNf4},
                                                    {"parka", BaseFormat::kFp8},    {"coat", BaseFormat::kFp8},
                                                    {"fp8_block", BaseFormat::kFp8}};

}  // namespace

TEST_CASE("adapters are trained beside codes, whose bits stay", "[engine][coded]") {
  for (const auto& [recipe, base] : kRuns) {
    CAPTURE(recipe, static_cast<int>(base));
    const TemporaryFolder folder;
    const Config plain = base_config(folder, recipe), config = with_adapters(plain, base);
    const LoadedCheckpoint checkpoint = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone());
    run.initialize_from(checkpoint);
    const TensorBytes before = bytes_of(run);
    for (int i = 0; i < kSteps; ++i) CHECK(run.step()->applied);
    for (const auto& [name, bytes] : bytes_of(run)) {
      CAPTURE(name);
      CHECK((before.at(name) != bytes) == (name.find("lora_") != std::string::npos));
    }
  }
}

TEST_CASE("a run beside FP8 codes is one beside its base's weights", "[engine][coded]") {
  for (const char* recipe : {"parka", "coat", "fp8_block"}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const Config plain = base_config(folder, recipe);
    const LoadedCheckpoint checkpoint = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun coded(with_adapters(plain, BaseFormat::kFp8), *device, alone()),
        whole(with_adapters(plain, BaseFormat::kCompute), *device, alone());
    coded.initialize_from(checkpoint);
    whole.initialize_from(checkpoint);
    for (int i = 0; i < kSteps; ++i) CHECK(coded.step()->loss == whole.step()->loss);
    CHECK(coded.evaluate(coded.data()).loss == whole.evaluate(whole.data()).loss);
  }
}

TEST_CASE("ranks beside codes train as one, at the ZeRO stages that keep weights whole", "[engine][coded][zero]") {
  for (const auto& [recipe, base] : {std::pair("fp32", BaseFormat::kNf4), {"parka", BaseFormat::kFp8}}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const LoadedCheckpoint checkpoint = make_base(base_config(folder, recipe));
    const auto losses = [&](int64_t ranks, int64_t stage, bool releases) {
      Config config = with_adapters(base_config(folder, recipe, stage, 2), base);
      config.optimizer.clip_norm = 0;
      config.optimizer.release_gradients = releases;
      config.reliability = {.replay_interval = 1, .state_interval = 1};
      std::vector<double> all;
      ThreadRanks(static_cast<int>(ranks)).run([&](Communicator& communicator) {
        const auto device = make_cpu_device();
        TrainingRun run(config, *device, communicator);
        run.initialize_from(checkpoint);
        for (int i = 0; i < kSteps; ++i) {
          const std::optional<StepReport> report = run.step();
          PARKA_REQUIRE(report && report->applied);
          if (communicator.rank() == 0) all.push_back(report->loss);
        }
      });
      return all;
    };
    const std::vector<double> undivided = losses(2, 0, false);
    for (int64_t stage = 0; stage <= 2; ++stage) {
      CAPTURE(stage);
      CHECK(losses(2, stage, false) == undivided);
      CHECK(losses(2, stage, true) == undivided);
    }
    const std::vector<double> alone = losses(1, 0, false);
    for (int i = 0; i < kSteps; ++i) CHECK(std::abs(alone[i] - undivided[i]) < 1e-3 * undivided[i]);
    const Config config = with_adapters(base_config(folder, recipe, 3, 2), base);
    CHECK(refusal([&] { zero_of(config, 0, 2); }).find("distributed.zero_stage = 3") != std::string::npos);
    CHECK(refusal([&] { zero_of(config, 0, 1); }).empty());
  }
}

TEST_CASE("a checkpoint of a run beside codes holds adapters alone, and goes on to the bit", "[engine][coded]") {
  for (const auto& [recipe, base] : kRuns) {
    CAPTURE(recipe, static_cast<int>(base));
    const TemporaryFolder folder;
    const Config plain = base_config(folder, recipe), config = with_adapters(plain, base);
    const LoadedCheckpoint source = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone());
    run.initialize_from(source);
    run.step();
    const LoadedCheckpoint checkpoint = save(run, config.checkpoint.folder);
    for (const SafetensorsEntry& tensor : checkpoint.tensors()) {
      CHECK(tensor.name.find("lora_") != std::string::npos);
    }
    check_goes_on(run, checkpoint, config);
    Config other = config;
    other.finetune.base = BaseFormat::kCompute;
    TrainingRun uncoded(other, *device, alone());
    CHECK(refusal([&] { uncoded.restore(checkpoint); }).find("finetune.base") != std::string::npos);
  }
}

TEST_CASE("weights are read as codes have them, with their adapters added", "[engine][coded]") {
  for (const auto& [recipe, base, experts] : {std::tuple("fp32", BaseFormat::kNf4, 0),
                                              {"bf16", BaseFormat::kFp4, 0},
                                              {"parka", BaseFormat::kFp8, 0},
                                              {"bf16", BaseFormat::kNf4, 5},
                                              {"parka", BaseFormat::kFp8, 5}}) {
    CAPTURE(recipe, experts);
    const TemporaryFolder folder;
    Config plain = base_config(folder, recipe);
    if (experts > 0) plain.model.moe = {.num_experts = experts, .experts_per_token = 2, .shared_width = 48};
    const Config config = with_adapters(plain, base);
    const LoadedCheckpoint source = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone());
    run.initialize_from(source);
    save(run, config.checkpoint.folder);  // B is zero: nothing is added
    const LoadedCheckpoint checkpoint = open_checkpoint(config.checkpoint.folder);
    const ParameterTable table = make_parameter_table(config.model, false);
    const CheckpointWeights merged(checkpoint, table.all, lora_adapters(config)), stored(source, table.all);
    for (const char* name :
         {"blocks.1.qkv", "blocks.3.up_gate", "blocks.0.down", "head", "blocks.2.ffn_norm", "blocks.1.router",
          "blocks.1.experts.up_gate", "blocks.3.experts.down", "blocks.3.shared.down"}) {
      CAPTURE(name);
      if (table.index_of(name) < 0) continue;
      const ParameterInfo& p = table.all[static_cast<size_t>(table.index_of(name))];
      const ElementRange all = {0, p.numel()}, part = {p.numel() / 3, p.numel() / 2};
      const std::vector<float> values = stored.read(p, all, WeightForm::kCompute);
      const bool is_linear = p.is_of_block();
      const std::vector<float> want = is_linear ? coded_values(p, base, config.precision, values) : values;
      CHECK((want != values) == is_linear);
      CHECK(merged.read(p, all, WeightForm::kCompute) == want);
      CHECK(merged.read(p, part, WeightForm::kCompute) ==
            std::vector<float>(want.begin() + part.begin, want.begin() + part.end));
    }
    if (std::string(recipe) != "fp32") continue;
    // A run of all weights starts from the sum.
    for (int i = 0; i < kSteps; ++i) run.step();
    save(run, config.checkpoint.folder);
    TrainingRun full(plain, *device, alone());
    full.initialize_from(open_checkpoint(config.checkpoint.folder));
    const double loss = run.evaluate(run.data()).loss;
    CHECK(std::abs(full.evaluate(full.data()).loss - loss) < 1e-5 * loss);
  }
}

TEST_CASE("a base in codes is refused by name where it has no meaning", "[engine][coded]") {
  const TemporaryFolder folder;
  const auto refused = [&](const char* recipe, BaseFormat base, const std::function<void(Config&)>& change) {
    Config config = base_config(folder, recipe);
    config.finetune.method = FinetuneMethod::kLora;
    config.finetune.base = base;
    change(config);
    return refusal([&] { validate(config); });
  };
  const auto none = [](Config&) {};
  CHECK(refused("bf16", BaseFormat::kNf4, none).empty());
  CHECK(refused("parka", BaseFormat::kNf4, [](Config& c) { c.telemetry.interval = 1; }).empty());
  CHECK(refused("bf16", BaseFormat::kNf4, [](Config& c) {
          c.model.moe = {.num_experts = 4, .experts_per_token = 2};
          c.model.d_ffn = 81;
          c.finetune.targets = {"q_proj"};
        }).starts_with("finetune.base = nf4"));
  CHECK(refused("parka", BaseFormat::kFp8, none).empty());
  CHECK(refused("bf16", BaseFormat::kNf4, [](Config& c) {
          c.finetune.method = FinetuneMethod::kFull;
        }).starts_with("finetune.base = nf4 is for weights that stay as they are"));
  CHECK(refused("bf16", BaseFormat::kFp8, none).find("precision.gemm = compute has none") != std::string::npos);
  CHECK(refused("parka", BaseFormat::kFp8, [](Config& c) {
          c.precision.weight_copies = WeightCopies::kNone;
        }).find("precision.weight_copies = none") != std::string::npos);
  CHECK(refused("fp8_block", BaseFormat::kFp8, [](Config& c) {
          c.precision.weight_copies = WeightCopies::kRows;
        }).find("precision.weight_copies") != std::string::npos);
  CHECK(refused("parka", BaseFormat::kFp8, [](Config& c) {
          c.telemetry.interval = 1;
        }).starts_with("telemetry.interval = 1"));
  CHECK(refused("bf16", BaseFormat::kNf4, [](Config& c) {
          c.precision.offload_weights = true;
          c.optimizer.offload = true;
        }).find("precision.offload_weights = false") != std::string::npos);
  const auto device = make_cpu_device();
  Config config = base_config(folder, "bf16");
  make_base(config);
  config = with_adapters(config, BaseFormat::kNf4);
  config.checkpoint.init_from = "";
  TrainingRun run(config, *device, alone());
  CHECK(refusal([&] { run.initialize(); }).find("give checkpoint.init_from") != std::string::npos);
  run.initialize_alike();  // what is measured is not saved
  CHECK(run.step()->applied);
}
