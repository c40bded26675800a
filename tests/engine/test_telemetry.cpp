#include "engine/step/telemetry.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "engine/config/config_io.h"
#include "engine/training/training_run.h"
#include "model/precision_recipe.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/offload_plan.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequence = 16, kLayers = 2;

Config tiny_config(const std::string& folder, const std::string& recipe, int64_t interval) {
  write_tokens(folder + "/train.npy", 40 * kSequence);
  Config config = parse_config(
      {{"model", {{"vocab_size", 64}, {"d_model", 32}, {"num_layers", kLayers}, {"num_heads", 2}, {"d_ffn", 64}}},
       {"precision", {{"recipe", recipe}}},
       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", kSequence}}},
       {"training", {{"steps", 10}, {"global_batch_size", 4}, {"micro_batch_size", 2}}},
       {"telemetry", {{"interval", interval}}},
       {"checkpoint", {{"folder", folder + "/run"}}}},
      "test");
  config.model.norm = recipe == "coat" ? NormKind::kRmsNorm : NormKind::kLayerNorm;
  return config;
}

std::vector<StepReport> reports_of(const Config& config, Device& device, int64_t steps) {
  TrainingRun run(config, device, alone());
  run.initialize();
  std::vector<StepReport> reports;
  const auto add = [&](std::optional<StepReport> report) {
    if (report) reports.push_back(std::move(*report));
  };
  for (int64_t i = 0; i < steps; ++i) add(run.step());
  add(run.finish());
  return reports;
}

std::vector<nlohmann::ordered_json> records_of(const Config& config, const StepReport& report) {
  return telemetry_records(report.telemetry.value(), report.step, make_parameter_table(config.model, false));
}

using Names = std::set<std::string>;

// The tensors that a recipe has in FP8.
const std::map<std::string, Names>& quantized_tensors() {
  static const Names linear = {
      "attention_norm.output", "attention",      "ffn_norm.output", "product",      "qkv.weight",
      "attention_out.weight",  "up_gate.weight", "down.weight",     "qkv.gradient", "attention_out.gradient",
      "up_gate.gradient",      "down.gradient"};
  static const auto with = [](Names names, const Names& more) {
    names.insert(more.begin(), more.end());
    return names;
  };
  static const Names kept = {"attention_norm.input", "ffn_norm.input", "up_gate"};
  static const std::map<std::string, Names> all = {{"fp8_linear", linear},
                                                   {"fp8_block", linear},
                                                   {"coat_activation", with(with(linear, kept), {"silu"})},
                                                   {"coat", with(with(linear, kept), {"silu"})},
                                                   {"parka", with(with(linear, kept), {"qkv"})}};
  return all;
}

// The same where norms are behind the layers: without one in front nothing is kept of the stream but what GEMMs
// read.
Names with_norms_at(NormPlacement placement, Names names) {
  const bool keeps_fp8 = names.contains("attention_norm.input");
  if (placement == NormPlacement::kAfter) {
    names.erase("attention_norm.input");
    names.erase("ffn_norm.input");
  }
  if (placement != NormPlacement::kBefore && keeps_fp8) {
    names.insert({"attention_post_norm.input", "ffn_post_norm.input"});
  }
  return names;
}

// Of one tensor. A code of E4M3 is off by 2^-4 at most, by about 2.6 % in the root mean square; of E5M2 by twice
// that. An original that is not the one that was quantized would be off by 1.
void check_tensor(const nlohmann::ordered_json& tensor, bool is_e5m2) {
  for (const char* key : {"error", "saturated", "underflowed", "not_finite", "amax"}) {
    CAPTURE(key);
    CHECK(tensor.at(key).size() == kLayers);
  }
  for (int64_t l = 0; l < kLayers; ++l) {
    const double error = tensor["error"][l];
    CHECK(error > (is_e5m2 ? 0.02 : 0.005));
    CHECK(error < (is_e5m2 ? 0.08 : 0.04));
    CHECK(tensor["saturated"][l] == 0.0);
    CHECK(tensor["not_finite"][l] == 0.0);
    CHECK(tensor["underflowed"][l] < 0.05);
    CHECK(tensor["amax"][l] > 0.0);
  }
}

void check_moments(const nlohmann::ordered_json& moment, size_t num_blocks) {
  const auto& k = moment.at("k");
  for (size_t l = 0; l < num_blocks; ++l) {
    const double low = k["min"][l], lower = k["lower_quartile"][l], median = k["median"][l],
                 upper = k["upper_quartile"][l], high = k["max"][l], mean = k["mean"][l];
    CHECK((1 <= low && low <= lower && lower <= median && median <= upper && upper <= high && high < 16));
    CHECK((low <= mean && mean <= high));
    CHECK(moment["amax"]["min"][l] > 0.0);
    CHECK(moment["amax"]["min"][l] <= moment["amax"]["max"][l]);
  }
  CHECK(k["median"].size() == num_blocks);
}

}  // namespace

TEST_CASE("telemetry reports every tensor that a recipe has in FP8", "[engine][telemetry][slow]") {
  const TemporaryFolder folder;
  const NormPlacement placement = GENERATE(NormPlacement::kBefore, NormPlacement::kAfter, NormPlacement::kBoth);
  for (Device* device : devices()) {
    for (const auto& [recipe, names] : quantized_tensors()) {
      for (const bool reruns : {false, true}) {
        CAPTURE(recipe, reruns, name_of(placement), device->name());
        Config config = tiny_config(folder.path().string(), recipe, 2);
        config.model.norm_placement = placement;
        if (reruns) config.precision.recompute = Recompute::kBlock;
        const std::vector<StepReport> reports = reports_of(config, *device, 4);
        REQUIRE(reports.size() == 4);
        CHECK((!reports[0].telemetry && !reports[2].telemetry));
        for (const size_t step : {1, 3}) {
          const std::vector<nlohmann::ordered_json> records = records_of(config, reports[step]);
          const nlohmann::ordered_json& record = records.at(0);
          CHECK(record["kind"] == "quantization");
          CHECK(record["step"] == step + 1);
          CHECK(record["sampled_tokens"] == 2 * kSequence);
          Names reported;
          for (const auto& [name, tensor] : record["tensors"].items()) {
            CAPTURE(name, tensor.dump());
            reported.insert(name);
            check_tensor(tensor, name.ends_with(".gradient") && recipe != "fp8_block");
            const bool one_scale = recipe != "fp8_block" && name != "qkv" && name != "silu" && name != "up_gate" &&
                                   !name.ends_with(".input");
            CHECK(tensor.contains("scale") == one_scale);
          }
          CHECK(reported == with_norms_at(placement, names));
          const bool has_moments = recipe == "coat" || recipe == "parka";
          CHECK(records.size() == (has_moments ? 3 : 2));
        }
      }
    }
  }
}

TEST_CASE("telemetry compares a mixture's tensors with what was quantized", "[engine][telemetry][moe]") {
  const TemporaryFolder folder;
  const std::string recipe = GENERATE("fp8_linear", "coat", "parka");
  for (Device* device : devices()) {
    CAPTURE(recipe, device->name());
    Config config = tiny_config(folder.path().string(), recipe, 2);
    config.model.norm = NormKind::kRmsNorm;
    config.model.moe.num_experts = 4;
    config.model.moe.experts_per_token = 2;
    const std::vector<StepReport> reports = reports_of(config, *device, 2);
    for (const auto& [name, tensor] : records_of(config, reports.at(1)).at(0).at("tensors").items()) {
      CAPTURE(name, tensor.dump());
      check_tensor(tensor, name.ends_with(".gradient"));
    }
  }
}

TEST_CASE("telemetry of weights and activations has all experts, and the shared one", "[engine][telemetry][moe]") {
  const TemporaryFolder folder;
  const bool is_shared = GENERATE(false, true);
  const std::string recipe = GENERATE("fp8_linear", "coat", "parka");
  for (Device* device : devices()) {
    Config config = tiny_config(folder.path().string(), recipe, 1);
    config.model.norm = NormKind::kRmsNorm;
    config.model.moe = {.num_experts = 4, .experts_per_token = 2, .shared_width = is_shared ? 32 : 0};
    const ParameterTable table = make_parameter_table(config.model, false);
    const auto largest = [&](std::vector<std::string> names) {
      float most = 0;
      for (const std::string& name : names) {
        const auto seed = static_cast<uint64_t>(config.training.seed);
        for (const float x :
             initial_weight(config.model, table, static_cast<size_t>(table.index_of("blocks.1." + name)), seed))
          most = std::max(most, decode_bf16(encode_bf16(std::abs(x))));
      }
      return most;
    };
    const nlohmann::ordered_json tensors =
        records_of(config, reports_of(config, *device, 1).at(0)).at(0).at("tensors");
    CAPTURE(is_shared, recipe, device->name(), tensors.dump());
    for (const std::string kind : {"up_gate", "down"}) {
      std::vector<std::string> names = {"experts." + kind};
      if (is_shared) names.push_back("shared." + kind);
      const double amax = tensors.at(kind + ".weight").at("amax").at(1);
      CHECK(std::abs(amax - largest(names)) < 1e-4 * amax);
    }
    check_tensor(tensors.at("product"), false);
    check_tensor(tensors.at("up_gate.gradient"), true);
  }
}

TEST_CASE("telemetry reports moments with range expansion", "[engine][telemetry]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const std::string recipe : {"coat", "coat_optimizer"}) {  // coat has norm weights here
      CAPTURE(recipe, device->name());
      const Config config = tiny_config(folder.path().string(), recipe, 3);
      const std::vector<StepReport> reports = reports_of(config, *device, 3);
      const nlohmann::ordered_json record = records_of(config, reports.at(2)).back();
      CHECK(record["kind"] == "moments");
      CHECK(record["step"] == 3);
      Names names;
      for (const auto& [name, parameter] : record["parameters"].items()) {
        CAPTURE(name, parameter.dump());
        names.insert(name);
        const bool in_blocks = name != "embedding" && name != "final_norm";
        for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
          check_moments(parameter.at(moment), in_blocks ? kLayers : 1);
        }
        // Gradients are small, and their squares are smaller still, if not than the square of their mean.
        for (size_t l = 0; l < (in_blocks ? kLayers : 1); ++l) {
          const double first = parameter["exp_avg"]["amax"]["max"][l],
                       second = parameter["exp_avg_sq"]["amax"]["max"][l];
          CHECK((first * first < second && second < first / 2));
        }
      }
      Names wanted = {"embedding", "qkv", "attention_out", "up_gate", "down"};
      if (recipe == "coat") wanted.insert({"attention_norm", "ffn_norm", "final_norm"});
      CHECK(names == wanted);
    }
  }
}

TEST_CASE("telemetry reports the updates that Muon makes", "[engine][telemetry][muon]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const bool releases : {false, true}) {
      CAPTURE(device->name(), releases);
      Config config = tiny_config(folder.path().string(), "parka", 2);
      config.optimizer.kind = OptimizerKind::kMuon;
      config.optimizer.frozen = {"blocks.0.qkv"};
      config.optimizer.release_gradients = releases;
      if (releases) config.training.micro_batch_size = config.training.global_batch_size;
      const std::vector<StepReport> reports = reports_of(config, *device, 4);
      CHECK((!reports.at(0).telemetry && !reports.at(2).telemetry));
      const nlohmann::ordered_json record = records_of(config, reports.at(3)).back();
      CHECK((record["kind"] == "updates" && record["step"] == 4));
      const std::map<std::string, size_t> wanted = {{"qkv", 3}, {"attention_out", 1}, {"up_gate", 2}, {"down", 1}};
      CHECK(record["parameters"].size() == wanted.size());
      for (const auto& [kind, count] : wanted) {
        const nlohmann::ordered_json& numbers = record["parameters"].at(kind);
        CAPTURE(kind, numbers.dump());
        for (size_t l = 0; l < kLayers; ++l) {
          const bool is_frozen = kind == "qkv" && l == 0;
          REQUIRE((numbers["rms"].size() == kLayers && numbers["singular_value"].size() == kLayers));
          REQUIRE(numbers["rms"][l].size() == (is_frozen ? 0 : count));
          REQUIRE(numbers["singular_value"][l].size() == (is_frozen ? 0 : count));
          // Gradients of few tokens have small singular values, too.
          for (const double rms : numbers["rms"][l]) CHECK((rms > 0.05 && rms < 0.25));
          for (const double largest : numbers["singular_value"][l]) CHECK((largest > 0.6 && largest < 1.25));
        }
      }
      config.telemetry.interval = 0;
      const std::vector<StepReport> plain = reports_of(config, *device, 4);
      CHECK((plain.back().loss == reports.back().loss && plain.back().grad_norm == reports.back().grad_norm));
    }
  }
}

TEST_CASE("attention is reported in every recipe, and is balanced", "[engine][telemetry]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const std::string recipe : {"fp32", "bf16", "coat_optimizer", "coat", "parka"}) {
      CAPTURE(recipe, device->name());
      const Config config = tiny_config(folder.path().string(), recipe, 1);
      const std::vector<StepReport> reports = reports_of(config, *device, 2);
      const std::vector<nlohmann::ordered_json> records = records_of(config, reports.at(1));
      const auto record =
          std::find_if(records.begin(), records.end(), [](const auto& r) { return r["kind"] == "attention"; });
      REQUIRE(record != records.end());
      CHECK(((*record)["step"] == 2 && (*record)["sampled_tokens"] == 2 * kSequence));
      const nlohmann::ordered_json& blocks = (*record)["blocks"];
      for (size_t l = 0; l < kLayers; ++l) {
        CAPTURE(blocks.dump());
        const double imbalance = blocks["imbalance"].at(l);
        CHECK(imbalance > 0.0);
        CHECK(imbalance < (recipe == "fp32" ? 1e-5 : 0.004));
        CHECK(blocks["gradient_share"].at(l) > 0.0);
        CHECK(blocks["score_rms"].at(l) > 0.0);
        CHECK(blocks["largest_score"].at(l) > blocks["score_rms"].at(l));
        CHECK(blocks["not_finite"].at(l) == 0.0);
      }
    }
  }
}

TEST_CASE("telemetry does not change a bit of the training", "[engine][telemetry]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const char* recipe : {"fp8_linear", "fp8_block", "coat", "parka"}) {
      CAPTURE(recipe, device->name());
      const Config off = tiny_config(folder.path().string(), recipe, 0);
      const std::vector<StepReport> plain = reports_of(off, *device, 8);
      for (const int64_t interval : {1, 3}) {
        Config on = tiny_config(folder.path().string(), recipe, interval);
        const std::vector<StepReport> reported = reports_of(on, *device, 8);
        bool same = reported.size() == plain.size();
        for (size_t i = 0; same && i < plain.size(); ++i) {
          same = reported[i].loss == plain[i].loss && reported[i].grad_norm == plain[i].grad_norm;
        }
        CHECK(same);
      }
    }
  }
}

TEST_CASE("telemetry and losses are the same where blocks wait in host memory",
          "[engine][telemetry][offload][slow]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const char* recipe : {"fp8_linear", "fp8_block", "coat", "parka"}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        CAPTURE(recipe, name_of(recompute), device->name());
        Config plain = tiny_config(folder.path().string(), recipe, 2);
        plain.model.num_layers = 5;
        plain.precision.recompute = recompute;
        Config offloaded = plain;
        offloaded.precision.offload_blocks = 3;
        check_offloaded(DeclaredRun(offloaded, device->kind()).plan, DeclaredRun(plain, device->kind()).plan, 3);
        const std::vector<StepReport> wanted = reports_of(plain, *device, 4),
                                      reports = reports_of(offloaded, *device, 4);
        REQUIRE((wanted.size() == 4 && reports.size() == 4));
        for (size_t i = 0; i < 4; ++i) {
          CHECK(reports[i].loss == wanted[i].loss);
          CHECK(reports[i].grad_norm == wanted[i].grad_norm);
          if (i % 2 == 1) CHECK(records_of(offloaded, reports[i]) == records_of(plain, wanted[i]));
        }
      }
    }
  }
}

TEST_CASE("telemetry and losses are the same where linear weights are in host memory",
          "[engine][telemetry][offload][slow]") {
  const TemporaryFolder folder;
  for (Device* device : devices()) {
    for (const char* recipe : {"bf16", "fp8_linear", "fp8_block", "parka"}) {
      for (const WeightCopies copies : {WeightCopies::kBoth, WeightCopies::kRows}) {
        CAPTURE(recipe, name_of(copies), device->name());
        Config plain = tiny_config(folder.path().string(), recipe, 2);
        plain.precision.weight_copies = copies;
        Config offloaded = plain;
        offloaded.optimizer.offload = offloaded.precision.offload_weights = true;
        const std::vector<StepReport> wanted = reports_of(plain, *device, 4),
                                      reports = reports_of(offloaded, *device, 4);
        REQUIRE((wanted.size() == 4 && reports.size() == 4));
        for (size_t i = 0; i < 4; ++i) {
          CHECK(reports[i].loss == wanted[i].loss);
          CHECK(reports[i].grad_norm == wanted[i].grad_norm);
          if (i % 2 == 1) CHECK(records_of(offloaded, reports[i]) == records_of(plain, wanted[i]));
        }
      }
    }
  }
}

TEST_CASE("telemetry is not part of a checkpoint, and a run may go on with or without", "[engine][telemetry]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config with = tiny_config(folder.path().string(), "coat", 1),
               without = tiny_config(folder.path().string(), "coat", 0);
  CHECK(config_hash(with) == config_hash(without));
  CHECK(resume_differences(with, without).refused.empty());
  TrainingRun a(with, *device, alone()), b(without, *device, alone());
  for (TrainingRun* run : {&a, &b}) {
    run->initialize();
    for (int i = 0; i < 3; ++i) run->step();
  }
  const CheckpointContents of_a = a.snapshot(), of_b = b.snapshot();
  REQUIRE(of_a.tensors.size() == of_b.tensors.size());
  bool same = true;
  for (size_t i = 0; i < of_a.tensors.size(); ++i) {
    same = same && of_a.tensors[i].name == of_b.tensors[i].name && of_a.tensors[i].bytes == of_b.tensors[i].bytes;
  }
  CHECK(same);
}

TEST_CASE("the plan has telemetry's memory when it is on, and nothing of it when it is off",
          "[engine][telemetry]") {
  const TemporaryFolder folder;
  const auto entries_of = [](const DeclaredRun& run) {
    std::map<std::string, int64_t> bytes;
    for (const auto& entry : run.plan.entries()) {
      if (entry.category == "telemetry") bytes[entry.name] = entry.bytes;
    }
    return bytes;
  };
  const auto padded = [](int64_t bytes) {
    return ceil_div(bytes, MemoryPlan::kAlignment) * MemoryPlan::kAlignment;
  };
  for (const std::string recipe : {"bf16", "fp8_linear", "fp8_block", "coat_optimizer", "coat", "parka"}) {
    CAPTURE(recipe);
    const Config on = tiny_config(folder.path().string(), recipe, 5),
                 off = tiny_config(folder.path().string(), recipe, 0);
    const DeclaredRun with(on, DeviceKind::kCpu), without(off, DeviceKind::kCpu);
    CHECK(entries_of(without).empty());

    std::map<std::string, int64_t> wanted = {{"attention_statistics", padded(kLayers * 7 * 4)}};
    const PrecisionConfig& precision = on.precision;
    const int64_t rows = 2 * kSequence, width = 2 * 64;  // up and gate are the widest
    if (precision.has_fp8()) {
      wanted["quantization_statistics"] = padded(kLayers * 17 * 8 * 4);
      wanted["sample"] = padded(rows * width * 4);
    }
    if (precision.save_silu) wanted["ones"] = padded(rows * 64 * 2);
    if (on.optimizer.states == StateFormat::kFp8Expanded) {
      const auto parameters = static_cast<int64_t>(with.model.parameters().all.size());
      wanted["moment_exponents"] = padded(2 * parameters * 256 * 4);
      wanted["moment_amax"] = padded(2 * parameters * 2 * 4);
    }
    CHECK(entries_of(with) == wanted);
    int64_t sum = 0;
    for (const auto& [name, bytes] : wanted) sum += bytes;
    CHECK(with.plan.total_bytes() <= without.plan.total_bytes() + sum);
    CHECK(with.plan.total_bytes() >= without.plan.total_bytes());
  }
}

TEST_CASE("quartiles of k are those of the groups", "[engine][telemetry]") {
  ModelConfig model;
  model.num_layers = 1;
  const ParameterTable table = make_parameter_table(model, false);
  TelemetryReport report;
  for (const char* name : {"exp_avg", "exp_avg_sq"}) {
    for (size_t i = 0; i < table.all.size(); ++i) {
      report.moments.push_back({.parameter = i, .name = name, .smallest_amax = INFINITY});
    }
  }
  // The embedding's first moment: 1, 2, 2, 3, 10. Its second: no group that is not zeros.
  TelemetryReport::Moment& first = report.moments[0];
  first.counts[16] = 1;
  first.counts[32] = 2;
  first.counts[48] = 1;
  first.counts[160] = 1;
  first.smallest_amax = 0.5f;
  first.largest_amax = 2.0f;
  const nlohmann::ordered_json record = telemetry_records(report, 7, table).at(0);
  const auto& embedding = record["parameters"]["embedding"];
  const nlohmann::ordered_json wanted = {{"min", {1.0}},    {"lower_quartile", {2.0}},
                                         {"median", {2.0}}, {"upper_quartile", {3.0}},
                                         {"max", {10.0}},   {"mean", {3.6}}};
  CHECK(embedding["exp_avg"]["k"].dump() == wanted.dump());
  CHECK(embedding["exp_avg"]["amax"].dump() == R"({"min":[0.5],"max":[2.0]})");
  CHECK(embedding["exp_avg_sq"]["k"]["median"].dump() == "[null]");
  CHECK(embedding["exp_avg_sq"]["amax"].dump() == R"({"min":[0.0],"max":[0.0]})");

  // Of first moments alone, where second ones are bf16.
  report.moments.resize(table.all.size());
  const nlohmann::ordered_json of_first = telemetry_records(report, 7, table).at(0);
  CHECK(of_first["parameters"].size() == record["parameters"].size());
  CHECK(of_first["parameters"]["embedding"]["exp_avg"] == embedding["exp_avg"]);
  for (const auto& parameter : of_first["parameters"]) CHECK(!parameter.contains("exp_avg_sq"));
}
