#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <utility>

#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/evaluation/inference_run.h"
#include "engine/training/training_run.h"
#include "tests/engine/run_beside_base.h"
#include "tests/support/catch.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs that train adapters (finetune.method = lora) from the weights of another run.
namespace {

constexpr int kSteps = 3;

Config with_adapters(Config config) {
  config.checkpoint.init_from = config.checkpoint.folder;
  config.checkpoint.folder += "_lora";
  config.finetune.method = FinetuneMethod::kLora;
  config.finetune.rank = 4;
  config.finetune.alpha = 8;
  return config;
}

}  // namespace

TEST_CASE("adapters are trained, and the bits of all other weights stay", "[engine][lora]") {
  for (const char* recipe : {"fp32", "bf16", "fp8_block", "parka"}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const Config config = base_config(folder, recipe);
    const LoadedCheckpoint base = make_base(config);
    const auto device = make_cpu_device();
    TrainingRun run(with_adapters(config), *device, alone()), plain(config, *device, alone());
    run.initialize_from(base);
    plain.restore(base);
    CHECK(run.evaluate(run.data()).loss == plain.evaluate(plain.data()).loss);
    const TensorBytes before = bytes_of(run);
    for (int i = 0; i < kSteps; ++i) CHECK(run.step()->applied);
    const TensorBytes after = bytes_of(run);
    for (const ParameterInfo& p : run.model().parameters().all) {
      CAPTURE(p.name);
      CHECK((before.at(p.name) != after.at(p.name)) == is_adapter(p));
      CHECK(after.contains(p.name + ".exp_avg") == is_adapter(p));
    }
  }
}

TEST_CASE("adapters are the same at every ZeRO stage, and with released gradients", "[engine][lora][zero]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    const LoadedCheckpoint base = make_base(base_config(folder, recipe));
    CAPTURE(recipe);
    check_same_at_every_stage(base, 3,
                              [&](int64_t stage) { return with_adapters(base_config(folder, recipe, stage, 2)); });
  }
}

namespace {

// Of fp32 weights half-way between two bf16 numbers, as one in eight of fp16 numbers is.
LoadedCheckpoint make_base_of_ties(const Config& config) {
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize();
  CheckpointContents contents = run.snapshot();
  for (HostTensor& tensor : contents.tensors) {
    for (size_t n = 0; n < tensor.bytes.size() / sizeof(uint32_t); ++n) {
      uint32_t bits = 0;
      std::memcpy(&bits, tensor.bytes.data() + n * sizeof(bits), sizeof(bits));
      if (bits != 0) bits = (bits & 0xffff0000u) | 0x8000u;
      std::memcpy(tensor.bytes.data() + n * sizeof(bits), &bits, sizeof(bits));
    }
  }
  save_checkpoint(config.checkpoint.folder, contents, {});
  return load_checkpoint(list_checkpoints(config.checkpoint.folder).back().path);
}

}  // namespace

TEST_CASE("adapters beside an fp32 base are evaluated with the weights that they are trained beside",
          "[engine][lora]") {
  for (const auto& [master, name] : EnumNames<MasterForm>::kAll) {
    if (master == MasterForm::kNone) continue;
    for (const BaseFormat base_format : {BaseFormat::kCompute, BaseFormat::kNf4}) {
      CAPTURE(name, name_of(base_format));
      const TemporaryFolder folder;
      const LoadedCheckpoint base = make_base_of_ties(base_config(folder, "fp32"));
      Config config = with_adapters(base_config(folder, "bf16"));
      config.optimizer.master = master;
      config.finetune.base = base_format;
      const auto device = make_cpu_device();
      TrainingRun run(config, *device, alone());
      run.initialize_from(base);
      const LoadedCheckpoint checkpoint = save(run, config.checkpoint.folder);
      InferenceRun inference(*device, open_checkpoint(checkpoint.path()), config);
      CHECK(evaluate_loss(*device, inference.model(), run.data(), 1, 8, alone(), {}).loss ==
            evaluate_loss(*device, run.model(), run.data(), 1, 8, alone(), {}).loss);
    }
  }
}

TEST_CASE("adapters beside weights that began at random are no start for others", "[engine][lora]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config config = with_adapters(base_config(folder, "fp32"));
  TrainingRun run(config, *device, alone());
  run.initialize();
  const LoadedCheckpoint whole = save(run, config.checkpoint.folder);
  TrainingRun next(config, *device, alone());
  CHECK(refusal([&] { next.initialize_from(whole); }).find("had no checkpoint.init_from itself: `parka export`") !=
        std::string::npos);
}

namespace {

namespace fs = std::filesystem;

// A run of adapters beside a base, after a step that is saved, and a run that has gone on from there.
struct SavedAdapters {
  explicit SavedAdapters(const std::string& recipe)
      : plain(base_config(folder, recipe)),
        config(with_adapters(plain)),
        base(make_base(plain)),
        run(config, *device, alone()),
        checkpoint(after_a_step()),
        again(config, *device, alone()) {
    again.restore(checkpoint);
  }
  LoadedCheckpoint after_a_step() {
    run.initialize_from(base);
    run.step();
    return save(run, config.checkpoint.folder);
  }
  double loss_of(Model& model) { return evaluate_loss(*device, model, again.data(), 1, 8, alone(), {}).loss; }
  std::string path_in(const fs::path& copy, const std::string& path) const {
    return (copy / fs::relative(path, folder.path())).string();
  }

  TemporaryFolder folder;
  Config plain, config;
  LoadedCheckpoint base;
  std::unique_ptr<Device> device = make_cpu_device();
  TrainingRun run;
  LoadedCheckpoint checkpoint;
  TrainingRun again;
};

}  // namespace

TEST_CASE("a checkpoint of adapters holds them alone, and goes on beside its base", "[engine][lora]") {
  for (const char* recipe : {"fp32", "parka"}) {
    CAPTURE(recipe);
    SavedAdapters saved(recipe);
    for (const SafetensorsEntry& tensor : saved.checkpoint.tensors())
      CHECK(tensor.name.find("lora_") != std::string::npos);
    check_goes_on(saved.run, saved.checkpoint, saved.config);

    Config other = saved.config;
    other.finetune.rank = 8;
    TrainingRun wider(other, *saved.device, alone());
    CHECK(refusal([&] { wider.restore(saved.checkpoint); }).find("finetune.rank") != std::string::npos);
    const LoadedCheckpoint whole = open_checkpoint(saved.checkpoint.path());
    CHECK(refusal([&] { wider.initialize_from(whole); }).find("has adapters of its own") != std::string::npos);
    // Another run goes on with the adapters, from its own first step, and its checkpoints name the same base.
    TrainingRun next(saved.config, *saved.device, alone());
    next.initialize_from(whole);
    CHECK(next.completed_steps() == 0);
    CHECK(next.evaluate(next.data()).loss == saved.again.evaluate(saved.again.data()).loss);
    CHECK(next.snapshot().state.at(kBaseKey) == saved.again.snapshot().state.at(kBaseKey));
    CHECK(next.step()->applied);
  }
}

TEST_CASE("adapters find a base that has moved with them, or to where the config says", "[engine][lora]") {
  for (const char* recipe : {"fp32", "parka"}) {
    CAPTURE(recipe);
    SavedAdapters saved(recipe);
    // Both runs somewhere else.
    const TemporaryFolder elsewhere;
    const fs::path moved = elsewhere.path() / "moved";
    fs::copy(saved.folder.path(), moved, fs::copy_options::recursive);
    fs::rename(saved.base.path(), saved.base.path() + ".away");
    const std::string there = saved.path_in(moved, saved.checkpoint.path());
    CHECK(open_checkpoint(there).path() == there);
    InferenceRun moved_run(*saved.device, open_checkpoint(there), saved.config);
    CHECK(saved.loss_of(moved_run.model()) == saved.loss_of(saved.again.model()));
    // The base alone: a checkpoint, or the folder with it.
    const std::string away = saved.base.path() + ".away", other_folder = saved.folder / "other";
    const std::string within = other_folder + "/" + fs::path(saved.base.path()).filename().string();
    fs::create_directory(other_folder);
    for (const auto& [given, place] : {std::pair(away, away), std::pair(other_folder, within)}) {
      if (place != away) fs::rename(away, place);
      Config renamed = saved.config;
      renamed.checkpoint.init_from = given;
      TrainingRun there_too(renamed, *saved.device, alone());
      there_too.restore(saved.checkpoint);
      CHECK((bytes_of(there_too) == bytes_of(saved.again)));
      CHECK(there_too.snapshot().state.at(kBaseKey).at("checkpoint") == place);
      CHECK(there_too.config().checkpoint.init_from == given);
    }
  }
}

TEST_CASE("adapters without their base, or beside another, are refused", "[engine][lora]") {
  SavedAdapters saved("parka");
  const TemporaryFolder elsewhere;
  const fs::path moved = elsewhere.path() / "moved";
  fs::copy(saved.folder.path(), moved, fs::copy_options::recursive);
  fs::rename(saved.base.path(), saved.base.path() + ".away");
  CHECK(refusal([&] { open_checkpoint(saved.checkpoint.path()); }).find("is gone") != std::string::npos);
  Config misnamed = saved.config;
  misnamed.checkpoint.init_from = saved.folder / "other";
  fs::create_directory(misnamed.checkpoint.init_from);
  CHECK(refusal([&] { TrainingRun(misnamed, *saved.device, alone()).restore(saved.checkpoint); })
            .find("is gone, and checkpoint.init_from = " + misnamed.checkpoint.init_from +
                  " neither is it nor has it") != std::string::npos);
  Config longer = saved.plain;
  longer.optimizer.lr *= 2;
  make_base(longer);
  CHECK(refusal([&] { open_checkpoint(saved.checkpoint.path()); }).find("was trained beside other weights") !=
        std::string::npos);
  const std::string there = saved.path_in(moved, saved.checkpoint.path());
  CHECK(open_checkpoint(there).path() == there);  // whose base is the one that has moved with it
  // As earlier versions described it: by the whole manifest, and without a place seen from the run.
  Manifest manifest = read_manifest(there);
  const std::string base_there = saved.path_in(moved, saved.base.path());
  const std::string base_manifest = base_there + "/" + std::string(kManifestName);
  manifest.state[kBaseKey] = {{"checkpoint", saved.base.path()},
                              {"checksum", checksum_of(ReadOnlyFile(base_manifest))}};
  std::ofstream(there + "/" + std::string(kManifestName)) << encode_manifest(manifest);
  CHECK(open_checkpoint(there).base()->path() == base_there);
}

TEST_CASE("dropout leaves out the same on any number of ranks and after a resumption", "[engine][lora]") {
  const TemporaryFolder folder;
  const LoadedCheckpoint base = make_base(base_config(folder, "fp32"));
  const auto config_with = [&](double dropout, int64_t ranks) {
    Config config = with_adapters(base_config(folder, "fp32", 1, ranks));
    config.training.global_batch_size = 4;
    config.finetune.dropout = dropout;
    config.reliability.replay_interval = 1;
    return config;
  };
  const auto losses = [&](double dropout, int64_t ranks) {
    const Config config = config_with(dropout, ranks);
    std::vector<double> all;
    ThreadRanks(static_cast<int>(ranks)).run([&](Communicator& communicator) {
      const auto device = make_cpu_device();
      TrainingRun run(config, *device, communicator);
      run.initialize_from(base);
      for (int i = 0; i < 2 * kSteps; ++i) {
        const std::optional<StepReport> report = run.step();
        PARKA_REQUIRE(report && report->applied);
        if (communicator.rank() == 0) all.push_back(report->loss);
      }
    });
    return all;
  };
  const std::vector<double> one = losses(0.5, 1), two = losses(0.5, 2), four = losses(0.5, 4), none = losses(0, 1);
  CHECK(one.front() == none.front());  // B is zeros
  for (size_t i = 0; i < one.size(); ++i) {
    CAPTURE(i, one[i], none[i]);
    CHECK(std::abs(two[i] - one[i]) < 1e-5 * one[i]);
    CHECK(std::abs(four[i] - one[i]) < 1e-5 * one[i]);
  }
  CHECK(std::abs(none.back() - one.back()) > 1e-4 * one.back());

  const Config config = config_with(0.5, 1);
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize_from(base);
  for (int i = 0; i < kSteps; ++i) run.step();
  TrainingRun restored(config, *device, alone());
  restored.restore(save(run, config.checkpoint.folder));
  for (int i = kSteps; i < 2 * kSteps; ++i) CHECK(restored.step()->loss == one[static_cast<size_t>(i)]);
}

TEST_CASE("weights are read with their adapters added", "[engine][lora]") {
  const TemporaryFolder folder;
  const Config plain = base_config(folder, "fp32"), config = with_adapters(plain);
  const LoadedCheckpoint base = make_base(plain);
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize_from(base);
  for (int i = 0; i < kSteps; ++i) run.step();
  save(run, config.checkpoint.folder);
  const LoadedCheckpoint checkpoint = open_checkpoint(config.checkpoint.folder);
  const ParameterTable table = make_parameter_table(config.model, false);
  const CheckpointWeights merged(checkpoint, table.all, lora_adapters(config)), unmerged(base, table.all);
  const ParameterTable& adapted = run.model().parameters();
  for (const char* layer : {"blocks.1.qkv", "blocks.3.up_gate", "blocks.0.down", "head"}) {
    CAPTURE(layer);
    const ParameterInfo& p = table.all[static_cast<size_t>(table.index_of(layer))];
    std::vector<float> want = unmerged.read(p, {0, p.numel()}, WeightForm::kMaster);
    for (const LoraAdapter& adapter : adapted.adapters) {
      if (adapter.layer != layer) continue;
      const float* const a = run.model().weights().plain(adapter.in).as<float>();
      const float* const b = run.model().weights().plain(adapter.out).as<float>();
      for (int64_t row = 0; row < adapter.rows; ++row) {
        for (int64_t col = 0; col < p.cols; ++col) {
          double sum = 0;
          for (int64_t r = 0; r < 4; ++r) sum += double{b[row * 4 + r]} * a[r * p.cols + col];
          float& value = want[static_cast<size_t>((adapter.first_row + row) * p.cols + col)];
          value = static_cast<float>(value + 2.0 * sum);
        }
      }
    }
    CHECK(merged.read(p, {0, p.numel()}, WeightForm::kMaster) == want);
    const ElementRange part = {p.numel() / 3, p.numel() / 2};
    CHECK(merged.read(p, part, WeightForm::kMaster) ==
          std::vector<float>(want.begin() + part.begin, want.begin() + part.end));
  }
  // A run of all weights starts from the sum.
  TrainingRun full(plain, *device, alone());
  full.initialize_from(checkpoint);
  const double loss = run.evaluate(run.data()).loss;
  CHECK(std::abs(full.evaluate(full.data()).loss - loss) < 1e-5 * loss);
}

TEST_CASE("settings of adapters without meaning are refused by name", "[engine][lora]") {
  const TemporaryFolder folder;
  const Config config = with_adapters(base_config(folder, "bf16"));
  const auto refused = [&](const std::function<void(Config&)>& change) {
    Config changed = config;
    change(changed);
    return refusal([&] { validate(changed); });
  };
  CHECK(refused([](Config&) {}).empty());
  CHECK(refused([](Config& c) {
          c.finetune.targets = {"q_proj", "query"};
        }).starts_with("finetune.targets holds \"query\""));
  CHECK(refused([](Config& c) { c.finetune.targets = {"experts.up_proj"}; }).starts_with("finetune.targets"));
  CHECK(refused([](Config& c) { c.finetune.targets.clear(); }).starts_with("finetune.targets"));
  CHECK(refused([](Config& c) { c.optimizer.frozen = {"head"}; }).starts_with("optimizer.frozen"));
  CHECK(config.finetune.lora_rules().scale == 2);
  Config rslora = config;
  rslora.finetune.rslora = true;
  CHECK(rslora.finetune.lora_rules().scale == 4);
}
