#include <cmath>
#include <set>
#include <tuple>

#include "engine/training/speed.h"
#include "engine/training/training_run.h"
#include "model/buffer_scope.h"
#include "tests/engine/run_bytes.h"
#include "tests/engine/step_config.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs in which some parameters are frozen (optimizer.frozen), against runs in which all are trained.
namespace {

constexpr int kSteps = 3;

using Patterns = std::vector<std::string>;

// One micro-batch of one sequence a step on each rank, of four blocks.
Config config_for(const TemporaryFolder& folder, const std::string& recipe, const Patterns& frozen,
                  bool is_llama = true, int64_t stage = 0, int64_t ranks = 1) {
  Config config = step_config(folder.path().string(), recipe, stage, is_llama, 1, ranks);
  write_tokens(config.data.train[0], 100 * kStepSequence);
  config.optimizer.lr = 3e-3;
  config.optimizer.clip_norm = 0;
  config.optimizer.schedule.kind = ScheduleKind::kConstant;
  config.optimizer.frozen = frozen;
  config.checkpoint.folder = folder.path().string() + "/run";
  return config;
}

// Everything below block 2; some of every block; all blocks; all but the head; all but the final norm.
const std::vector<Patterns> kFrozen = {{"embedding", "blocks.[01].*"},
                                       {"embedding", "*.qkv", "*.down", "*ffn_norm"},
                                       {"*.up_gate", "*.attention_out", "*attention_norm"},
                                       {"blocks.*"},
                                       {"embedding", "blocks.*", "final_norm"},
                                       {"embedding", "blocks.*", "head"}};

using Outcome = RankOutcome;

Outcome train(const Config& config, int ranks) { return train_ranks(config, ranks, kSteps); }

void check_same(const Outcome& one, const Outcome& other) {
  CHECK(one.losses == other.losses);
  CHECK(one.held_out == other.held_out);
  CHECK((one.tensors == other.tensors));
}

// Whether exactly the weights of trained parameters have changed, and only they have masters and moments.
void check_frozen(const Config& config, const Outcome& outcome) {
  const ParameterTable table = make_parameter_table(config.model, false, config.parameter_rules());
  for (size_t rank = 0; rank < outcome.tensors.size(); ++rank) {
    for (const ParameterInfo& p : table.all) {
      CAPTURE(p.name);
      const auto& before = outcome.initial[rank].at(p.name);
      if (before.empty()) continue;  // all of it is another rank's
      // Rows of tokens that do not occur keep their values: the first rank has others.
      if (rank == 0 || p.name != "embedding" || !p.trainable) {
        CHECK((outcome.tensors[rank].at(p.name) != before) == p.trainable);
      }
      CHECK(outcome.tensors[rank].contains(p.name + ".exp_avg") == p.trainable);
      if (!p.trainable) CHECK_FALSE(outcome.tensors[rank].contains(p.name + ".master"));
    }
  }
}

int64_t bytes_of_category(const MemoryPlan& plan, const std::string& category) {
  for (const auto& total : plan.summary()) {
    if (total.category == category) return total.bytes;
  }
  return 0;
}

}  // namespace

TEST_CASE("gradients of trained parameters are those of a run without frozen ones", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "bf16", "fp8_block", "coat", "parka"}) {
    for (const Patterns& frozen : kFrozen) {
      CAPTURE(recipe, frozen);
      const TemporaryFolder folder;
      const auto device = make_cpu_device();
      const Config config = config_for(folder, recipe, frozen);
      Config unfrozen = config;
      unfrozen.optimizer.frozen.clear();
      TrainingRun run(config, *device, alone()), whole(unfrozen, *device, alone());
      run.initialize();
      whole.initialize();
      CHECK(run.step()->loss == whole.step()->loss);
      for (const ParameterInfo& p : run.model().parameters().all) {
        const auto i = static_cast<size_t>(run.model().parameters().index_of(p.name));
        CAPTURE(p.name);
        CHECK(run.optimizer().gradients()[i].empty() != p.trainable);
        if (p.trainable) {
          CHECK((bytes_of(run.optimizer().gradients()[i]) == bytes_of(whole.optimizer().gradients()[i])));
        }
      }
    }
  }
}

TEST_CASE("frozen weights keep every bit, and the others are trained", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "parka"}) {
    for (const Patterns& frozen : kFrozen) {
      CAPTURE(recipe, frozen);
      const TemporaryFolder folder;
      const Config config = config_for(folder, recipe, frozen);
      check_frozen(config, train(config, 1));
    }
  }
}

TEST_CASE("weights that are made alike to measure speed may be frozen in part", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    TrainingRun run(config_for(folder, recipe, kFrozen[0]), *device, alone());
    run.initialize_alike();
    CHECK(run.step()->applied);
    const ModelWeights& weights = run.model().weights();
    const auto index_of = [&](const char* name) { return run.model().parameters().index_of(name); };
    CHECK(
        (bytes_of(weights.plain(index_of("blocks.0.down"))) == bytes_of(weights.plain(index_of("blocks.1.down")))));
  }
}

TEST_CASE("a tied embedding that is frozen serves embedding and head", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    const Config config = config_for(folder, recipe, {"embedding", "blocks.0.*"}, /*is_llama=*/false);
    check_frozen(config, train(config, 1));
  }
}

TEST_CASE("ranks, stages, and where memory is, change no bit with frozen parameters", "[engine][frozen][zero]") {
  for (const char* recipe : {"fp32", "parka"}) {
    for (const Patterns& frozen : {kFrozen[0], kFrozen[1], kFrozen[3]}) {
      for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {2, 2}, {2, 3}, {4, 3}}) {
        CAPTURE(recipe, frozen, ranks, stage);
        const TemporaryFolder folder;
        Config config = config_for(folder, recipe, frozen, true, stage, ranks);
        const Outcome plain = train(config, ranks);
        check_frozen(config, plain);
        if (ranks > 1) {
          Config whole = config;
          whole.distributed.zero_stage = 0;
          const Outcome undivided = train(whole, ranks);
          CHECK(plain.losses == undivided.losses);
          CHECK(plain.held_out == undivided.held_out);
        }
        config.optimizer.release_gradients = true;
        check_same(train(config, ranks), plain);
        config.optimizer.offload = true;
        config.precision.offload_weights = true;
        check_same(train(config, ranks), plain);
        config.precision.recompute = Recompute::kBlock;
        config.precision.offload_blocks = 2;
        check_same(train(config, ranks), plain);
      }
    }
  }
}

// Three of five blocks share one buffer, and the first of them need not be the one that keeps most.
TEST_CASE("blocks in host memory that keep more than others change no bit", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "parka"}) {
    for (const Patterns& frozen : {Patterns{"blocks.0.qkv"},
                                   {"blocks.0.down", "blocks.0.up_gate"},
                                   {"blocks.2.*"},
                                   {"embedding", "blocks.0.*", "blocks.1.qkv", "blocks.3.down"}}) {
      CAPTURE(recipe, frozen);
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, frozen);
      config.model.num_layers = 5;
      const Outcome plain = train(config, 1);
      config.precision.offload_blocks = 3;
      check_same(train(config, 1), plain);
    }
  }
}

TEST_CASE("micro-batches add up with frozen parameters", "[engine][frozen][zero]") {
  for (const int64_t stage : {0, 2, 3}) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = config_for(folder, "fp32", kFrozen[0], true, stage, 2);
    config.training.global_batch_size = 8;
    const Outcome divided = train(config, 2);
    check_frozen(config, divided);
    config.distributed.zero_stage = 1;
    CHECK(train(config, 2).losses == divided.losses);
  }
}

TEST_CASE("memory falls by what is frozen, and by what lower blocks keep", "[engine][frozen]") {
  const TemporaryFolder folder;
  const auto plan_of = [&](const Patterns& frozen) {
    return DeclaredRun(config_for(folder, "bf16", frozen), DeviceKind::kCpu).plan;
  };
  const MemoryPlan whole = plan_of({});
  for (const Patterns& frozen : kFrozen) {
    CAPTURE(frozen);
    const MemoryPlan plan = plan_of(frozen);
    std::set<std::string> expected;
    const Config config = config_for(folder, "bf16", frozen);
    for (const ParameterInfo& p : make_parameter_table(config.model, false, config.parameter_rules()).all) {
      if (!p.trainable) continue;
      for (const char* suffix : {".gradient", ".master", ".exp_avg", ".exp_avg_sq"})
        expected.insert(p.name + suffix);
    }
    std::set<std::string> declared;
    for (const MemoryPlan::Entry& entry : plan.entries()) {
      const auto& c = entry.category;
      if (c == kGradientCategory || c == kMasterCategory || c == kStateCategory) declared.insert(entry.name);
    }
    CHECK(declared == expected);
  }
  const auto kept = [](const MemoryPlan& plan) { return bytes_of_category(plan, kSavedActivationsCategory); };
  CHECK(2 * kept(plan_of(kFrozen[0])) == kept(whole));  // of four blocks the upper two
  CHECK(kept(plan_of(kFrozen[1])) < kept(whole));       // inputs of frozen linear layers
  CHECK(kept(plan_of(kFrozen[4])) == 0);
  CHECK(kept(plan_of(kFrozen[5])) == 0);
}

TEST_CASE("a run with frozen parameters resumes to the bit, with the same ones only", "[engine][frozen]") {
  for (const char* recipe : {"fp32", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    const Config config = config_for(folder, recipe, kFrozen[0]);
    TrainingRun run(config, *device, alone());
    run.initialize();
    for (int i = 0; i < 2; ++i) run.step();
    save_checkpoint(config.checkpoint.folder, run.snapshot(), {});
    const LoadedCheckpoint checkpoint = load_checkpoint(list_checkpoints(config.checkpoint.folder).back().path);
    TrainingRun restored(config, *device, alone());
    restored.restore(checkpoint);
    for (int i = 0; i < 2; ++i) CHECK(run.step()->loss == restored.step()->loss);
    CHECK((tensors_of(restored) == tensors_of(run)));
    Config otherwise = config;
    otherwise.optimizer.frozen = kFrozen[1];
    TrainingRun other(otherwise, *device, alone());
    CHECK(refusal([&] { other.restore(checkpoint); }).find("optimizer.frozen") != std::string::npos);
  }
}

// NaN becomes null where a record is written.
bool is_null(const nlohmann::ordered_json& value) {
  return value.is_number_float() && std::isnan(value.get<double>());
}

TEST_CASE("telemetry and checks for corruption change no bit with frozen parameters", "[engine][frozen]") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "parka", kFrozen[0]);
  config.reliability = {.replay_interval = 0, .state_interval = 0};
  const Outcome plain = train(config, 1);
  config.telemetry.interval = 1;
  config.reliability = {.replay_interval = 1, .state_interval = 1};
  check_same(train(config, 1), plain);
  config.telemetry.interval = 0;
  config.optimizer.release_gradients = true;
  check_same(train(config, 1), plain);
  config.telemetry.interval = 1;

  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize();
  std::optional<StepReport> report = run.step();
  if (!report) report = run.finish();
  for (const nlohmann::ordered_json& record :
       telemetry_records(report->telemetry.value(), 1, run.model().parameters())) {
    if (record["kind"] == "moments") {
      for (const auto& [moment, statistic] :
           {std::pair("k", "median"), {"k", "mean"}, {"amax", "min"}, {"amax", "max"}}) {
        const auto& values = record.at("parameters").at("qkv").at("exp_avg").at(moment).at(statistic);
        REQUIRE(values.size() == 4);
        CHECK((is_null(values[0]) && is_null(values[1]) && values[2] > 0 && values[3] > 0));
      }
      CHECK_FALSE(record["parameters"].contains("embedding"));
    }
    if (record["kind"] == "attention") {  // the gradients of the lower blocks are not computed
      for (const char* key : {"imbalance", "largest_score", "not_finite"}) {
        const auto& values = record.at("blocks").at(key);
        CHECK((is_null(values[0]) && is_null(values[1]) && values[2].is_number() && values[3].is_number()));
      }
    }
    if (record["kind"] == "quantization") {
      const auto& errors = record.at("tensors").at("down.gradient")["error"];  // of the upper blocks alone
      REQUIRE(errors.size() == 4);
      CHECK((errors[0].is_null() && errors[1].is_null() && errors[2].is_number() && errors[3].is_number()));
    }
  }
}

TEST_CASE("a learning rate of its own multiplies that of the run", "[engine][frozen]") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "bf16", {});
  const Outcome plain = train(config, 1);
  config.optimizer.lr *= 2;
  config.optimizer.lr_patterns = {"embedding", "*"};  // the last counts
  config.optimizer.lr_factors = {8, 0.5};
  check_same(train(config, 1), plain);
  config.optimizer.lr_factors = {0.5, 0};
  const Outcome still = train(config, 1);
  for (const ParameterInfo& p : make_parameter_table(config.model, false).all) {
    CHECK((still.tensors[0].at(p.name) == still.initial[0].at(p.name)));
  }
}

TEST_CASE("FLOPs per token count what frozen parameters leave to do", "[engine][frozen]") {
  const TemporaryFolder folder;
  const auto flop = [&](const Patterns& frozen) {
    const Config config = config_for(folder, "bf16", frozen);
    const ParameterTable table = make_parameter_table(config.model, false, config.parameter_rules());
    return flop_per_token(config.model, table, kStepSequence);
  };
  const Config config = config_for(folder, "bf16", {});
  const ParameterTable table = make_parameter_table(config.model, false);
  const auto numel = [&](const char* name) {
    return static_cast<double>(table.all[static_cast<size_t>(table.index_of(name))].numel());
  };
  const double whole = flop({}), attention = whole - 6.0 * static_cast<double>(table.num_compute_parameters());
  CHECK(flop({"blocks.2.down"}) == whole - 2 * numel("blocks.2.down"));
  CHECK(flop({"embedding"}) == whole);
  // Of each product with the weights of a block a third is left, and of attention.
  const double block = (whole - 6 * (numel("head") + numel("final_norm")) - attention) / 4;
  CHECK(flop({"embedding", "blocks.0.*"}) == Approx(whole - (block + attention / 4) * 2 / 3));
  CHECK(flop({"embedding", "blocks.*"}) == Approx(whole - (4 * block + attention) * 2 / 3));
}

TEST_CASE("patterns that no parameter matches are refused by name", "[engine][frozen]") {
  const TemporaryFolder folder;
  const auto refused = [&](const Patterns& frozen, const Patterns& lr = {},
                           const std::vector<double>& factors = {}) {
    Config config = config_for(folder, "bf16", frozen);
    config.optimizer.lr_patterns = lr;
    config.optimizer.lr_factors = factors;
    return refusal([&] { validate(config); });
  };
  CHECK(refused({"embedding"}).empty());
  CHECK(
      refused({"embedding", "blocks.4.*"}) ==
      "optimizer.frozen: no parameter has a name like \"blocks.4.*\"; names are embedding, blocks.0.attention_norm "
      "and so on: correct or remove it");
  CHECK(refused({}, {"vision.*"}, {0.1})
            .starts_with("optimizer.lr_patterns: no parameter has a name like \"vision.*\""));
  const std::string none = "optimizer.frozen leaves no parameter to train; remove a pattern";
  CHECK((refused({"*"}) == none && refused({"*"}, {"head"}, {0.1}) == none));
  CHECK(refused({}, {"*"}) ==
        "optimizer.lr_factors has 0 numbers, but lr_patterns has 1 entries; give one for each");
}

TEST_CASE("a learning rate for frozen parameters alone is refused by name", "[engine][frozen]") {
  const TemporaryFolder folder;
  Config config = config_for(folder, "bf16", {"blocks.0.*", "head"});
  const auto refused = [&](const Patterns& lr) {
    config.optimizer.lr_patterns = lr;
    config.optimizer.lr_factors.assign(lr.size(), 0.1);
    return refusal([&] { validate(config); });
  };
  CHECK(refused({"blocks.*", "*", "embedding"}).empty());  // some of what matches is trained
  CHECK(
      refused({"embedding", "blocks.0.*"}) ==
      "optimizer.lr_patterns: all parameters with a name like \"blocks.0.*\" are frozen, blocks.0.attention_norm for "
      "one, and have no learning rate: correct or remove it");
  CHECK(
      refused({"head"}).starts_with("optimizer.lr_patterns: all parameters with a name like \"head\" are frozen"));

  config.optimizer.frozen = {};
  config.finetune.method = FinetuneMethod::kLora;
  CHECK(refused({"*.lora_B"}).empty());
  CHECK(refused({"blocks.0.down"}).starts_with("optimizer.lr_patterns: all parameters with a name like"));
}
