#include <functional>
#include <map>

#include "engine/checkpoint/checkpoint_base.h"
#include "engine/step/declared_run.h"
#include "engine/training/speed.h"
#include "engine/training/training_run.h"
#include "tests/engine/run_beside_base.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

// Runs that train a side network (finetune.method = qst) beside the weights of another run.
namespace {

constexpr int kSteps = 3;

Config with_side(Config config, Downsampling downsample = Downsampling::kAdapter,
                 BaseFormat base = BaseFormat::kCompute) {
  config.checkpoint.init_from = config.checkpoint.folder;
  config.checkpoint.folder += "_side";
  config.optimizer.lr = 1e-2;
  config.finetune.method = FinetuneMethod::kQst;
  config.finetune.base = base;
  config.finetune.reduction = 4;
  if (has_two_factors(downsample)) config.finetune.rank = 4;
  config.finetune.downsample = downsample;
  validate(config);
  return config;
}

Config with_experts(Config config) {
  config.model.moe = {.num_experts = 5, .experts_per_token = 2, .normalize_weights = true};
  return config;
}

bool is_of_side_name(const std::string& name) { return name.starts_with(kSide); }

constexpr Downsampling kDownsamplings[] = {Downsampling::kLinear, Downsampling::kLora, Downsampling::kAdapter,
                                           Downsampling::kMaxPool, Downsampling::kAveragePool};

}  // namespace

TEST_CASE("a side network begins at its base and is trained, whose bits stay", "[engine][side][slow]") {
  for (const auto& [recipe, base] : {std::pair("fp32", BaseFormat::kCompute),
                                     {"bf16", BaseFormat::kNf4},
                                     {"fp8_block", BaseFormat::kCompute},
                                     {"coat", BaseFormat::kFp8},
                                     {"parka", BaseFormat::kNf4}}) {
    const TemporaryFolder folder;
    const Config plain = base_config(folder, recipe);
    const LoadedCheckpoint checkpoint = make_base(plain);
    for (const Downsampling downsample : kDownsamplings) {
      CAPTURE(recipe, name_of(downsample));
      const bool is_default = downsample == Downsampling::kAdapter;
      if (std::string_view(recipe) != "fp32" && !is_default) continue;
      const auto device = make_cpu_device();
      TrainingRun run(with_side(plain, downsample, base), *device, alone());
      run.initialize_from(checkpoint);
      if (base == BaseFormat::kCompute) {
        TrainingRun whole(plain, *device, alone());
        whole.restore(checkpoint);
        CHECK(run.evaluate(run.data()).loss == whole.evaluate(whole.data()).loss);
      }
      const TensorBytes before = bytes_of(run);
      const double first = run.evaluate(run.data()).loss;
      for (int i = 0; i < 8 * kSteps; ++i) CHECK(run.step()->applied);
      for (const auto& [name, bytes] : bytes_of(run)) {
        CAPTURE(name);
        CHECK((before.at(name) != bytes) == is_of_side_name(name));
      }
      CHECK(run.evaluate(run.data()).loss < 0.98 * first);
    }
  }
}

TEST_CASE("side networks are the same at every ZeRO stage, and with released gradients", "[engine][side][zero]") {
  for (const auto& [recipe, base] :
       {std::pair("fp32", BaseFormat::kCompute), {"parka", BaseFormat::kCompute}, {"bf16", BaseFormat::kNf4}}) {
    const TemporaryFolder folder;
    const LoadedCheckpoint checkpoint = make_base(base_config(folder, recipe));
    for (const Downsampling downsample : {Downsampling::kAdapter, Downsampling::kAveragePool}) {
      CAPTURE(recipe, name_of(downsample));
      check_same_at_every_stage(checkpoint, base == BaseFormat::kCompute ? 3 : 2, [&](int64_t stage) {
        return with_side(base_config(folder, recipe, stage, 2), downsample, base);
      });
    }
  }
}

TEST_CASE("side networks beside experts begin at their base, and are the same at every ZeRO stage",
          "[engine][side][moe]") {
  for (const auto& [recipe, base] :
       {std::pair("fp32", BaseFormat::kCompute), {"parka", BaseFormat::kFp8}, {"bf16", BaseFormat::kNf4}}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const Config plain = with_experts(base_config(folder, recipe));
    const LoadedCheckpoint checkpoint = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun run(with_side(plain, Downsampling::kAdapter, base), *device, alone());
    run.initialize_from(checkpoint);
    if (base == BaseFormat::kCompute) {
      TrainingRun whole(plain, *device, alone());
      whole.restore(checkpoint);
      CHECK(run.evaluate(run.data()).loss == whole.evaluate(whole.data()).loss);
    }
    const TensorBytes before = bytes_of(run);
    const double first = run.evaluate(run.data()).loss;
    for (int i = 0; i < 8 * kSteps; ++i) CHECK(run.step()->applied);
    for (const auto& [name, bytes] : bytes_of(run)) CHECK((before.at(name) != bytes) == is_of_side_name(name));
    CHECK(run.evaluate(run.data()).loss < 0.99 * first);
    check_same_at_every_stage(checkpoint, base == BaseFormat::kCompute ? 3 : 2, [&](int64_t stage) {
      return with_side(with_experts(base_config(folder, recipe, stage, 2)), Downsampling::kAdapter, base);
    });
  }
}

TEST_CASE("a checkpoint of a side network holds it alone, and goes on beside its base", "[engine][side]") {
  for (const auto& [recipe, base_format] :
       {std::pair("fp32", BaseFormat::kCompute), {"coat_optimizer", BaseFormat::kNf4}}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const Config plain = base_config(folder, recipe);
    Config config = with_side(plain, Downsampling::kAdapter, base_format);
    config.finetune.kept = Storage::kFp8;
    const LoadedCheckpoint base = make_base(plain);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, alone());
    run.initialize_from(base);
    run.step();
    const LoadedCheckpoint checkpoint = save(run, config.checkpoint.folder);
    for (const SafetensorsEntry& tensor : checkpoint.tensors()) CHECK(is_of_side_name(tensor.name));
    check_goes_on(run, checkpoint, config);

    TrainingRun again(config, *device, alone());
    again.restore(checkpoint);

    Config other = config;
    other.finetune.reduction = 2;
    TrainingRun wider(other, *device, alone());
    CHECK(refusal([&] { wider.restore(checkpoint); }).find("finetune.reduction") != std::string::npos);
    const LoadedCheckpoint whole = open_checkpoint(checkpoint.path());
    CHECK(refusal([&] { wider.initialize_from(whole); }).find("has a side network of its own") !=
          std::string::npos);
    // Another run goes on with the side network, from its own first step, and its checkpoints name the same base.
    TrainingRun next(config, *device, alone());
    next.initialize_from(whole);
    CHECK(next.completed_steps() == 0);
    CHECK(next.evaluate(next.data()).loss == again.evaluate(again.data()).loss);
    CHECK(next.snapshot().state.at(kBaseKey) == again.snapshot().state.at(kBaseKey));
    // No other method goes on with it, nor it with adapters.
    TrainingRun full(plain, *device, alone());
    CHECK(refusal([&] { full.initialize_from(whole); }).find("has a side network, which finetune.method = full") !=
          std::string::npos);
    Config lora = config;
    lora.finetune = {.method = FinetuneMethod::kLora};
    lora.checkpoint.folder += "_lora";
    TrainingRun adapters(lora, *device, alone());
    CHECK(refusal([&] { adapters.initialize_from(whole); }).find("finetune.method = lora") != std::string::npos);
    adapters.initialize_from(base);
    save(adapters, lora.checkpoint.folder);
    const LoadedCheckpoint adapted = open_checkpoint(lora.checkpoint.folder);
    CHECK(refusal([&] { next.initialize_from(adapted); }).find("has adapters: for a side network") !=
          std::string::npos);
  }
}

TEST_CASE("side networks learn on packed documents, masks and windows as the model sees them", "[engine][side]") {
  const TemporaryFolder folder;
  Config plain = base_config(folder, "fp32");
  plain.model.sliding_window = 5;
  plain.model.full_attention_every = 2;
  plain.model.local_rope_theta = 500;
  plain.data.documents = DocumentMode::kSeparate;
  plain.data.document_end = 3;
  const LoadedCheckpoint base = make_base(plain);
  const auto device = make_cpu_device();
  TrainingRun run(with_side(plain), *device, alone()), whole(plain, *device, alone());
  run.initialize_from(base);
  whole.restore(base);
  const double first = run.evaluate(run.data()).loss;
  CHECK(first == whole.evaluate(whole.data()).loss);
  for (int i = 0; i < 4 * kSteps; ++i) CHECK(run.step()->applied);
  CHECK(run.evaluate(run.data()).loss < first);
}

TEST_CASE("the plan has gradients, masters and states of the side network alone", "[engine][side]") {
  const TemporaryFolder folder;
  for (const auto& [base, experts] :
       {std::pair(BaseFormat::kCompute, false), {BaseFormat::kNf4, false}, {BaseFormat::kNf4, true}}) {
    const Config plain = base_config(folder, "bf16");
    const DeclaredRun run(with_side(experts ? with_experts(plain) : plain, Downsampling::kAdapter, base),
                          DeviceKind::kCpu, {});
    int64_t num_of_side = 0, num_gradients = 0;
    for (const ParameterInfo& p : run.model.parameters().all) num_of_side += p.trainable;
    for (const MemoryPlan::Entry& entry : run.plan.entries()) {
      CAPTURE(entry.category, entry.name);
      num_gradients += entry.category == "gradients";
      const bool is_of_training =
          entry.category == "gradients" || entry.category == kMasterCategory || entry.category == kStateCategory;
      if (is_of_training) CHECK(is_of_side_name(entry.name));
      if (entry.category == "saved activations") CHECK(is_of_side_name(entry.name));
    }
    CHECK((num_of_side > 0 && num_gradients == num_of_side));
  }
}

TEST_CASE("the work of a step beside a side network is one forward of the base, and three of itself",
          "[engine][side]") {
  const TemporaryFolder folder;
  const Config plain = base_config(folder, "fp32"), config = with_side(plain, Downsampling::kAveragePool);
  const ParameterTable whole = make_parameter_table(plain.model, false),
                       beside = make_parameter_table(config.model, false, config.parameter_rules());
  const double all = flop_per_token(plain.model, whole, kStepSequence),
               side = flop_per_token(config.model, beside, kStepSequence);
  int64_t of_side = 0;
  for (const ParameterInfo& p : beside.all) of_side += p.trainable ? p.numel() : 0;
  // A third of the model's, the input gradients of the head and its norm, and the side network's with its
  // attention.
  const double head = 2.0 * (272 + 1) * 48, attention = 6.0 * 4 * kStepSequence * 16;
  CHECK(side == all / 3 + head + 6.0 * static_cast<double>(of_side) + attention);
}

TEST_CASE("settings of side networks without meaning are refused by name", "[engine][side]") {
  const TemporaryFolder folder;
  const Config config = with_side(base_config(folder, "parka"));
  const auto refused = [&](const std::function<void(Config&)>& change) {
    Config changed = config;
    change(changed);
    return refusal([&] { validate(changed); });
  };
  CHECK(refused([](Config&) {}).empty());
  CHECK(refused([](Config& c) { c.optimizer.frozen = {"head"}; }).starts_with("optimizer.frozen"));
  CHECK(refused([](Config& c) {
          c.finetune.kept = Storage::kFp8;
          c.finetune.downsample = Downsampling::kMaxPool;
          c.finetune.rank = FinetuneConfig().rank;
        }).starts_with("finetune.kept = fp8"));
  CHECK(refused([](Config& c) {
          c.finetune.downsample = Downsampling::kLinear;
        }).starts_with("finetune.rank has no meaning with finetune.downsample = linear"));
  CHECK(refused([](Config& c) { c.precision.offload_weights = true; }).starts_with("precision.offload_weights"));
  CHECK(refused([](Config& c) { c.precision.offload_blocks = 1; }).starts_with("precision.offload_blocks"));
  CHECK(refused([](Config& c) { c.telemetry.interval = 1; }).starts_with("telemetry.interval = 1"));
}
