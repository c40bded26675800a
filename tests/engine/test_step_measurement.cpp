#include "engine/planning/step_model.h"

#include <algorithm>
#include <functional>
#include <map>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/planning/memory_advice.h"
#include "engine/step/recorded_step.h"
#include "kernels/device/recording_device.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

using nlohmann::json;

// Four micro-batches of two blocks.
json measured_config() {
  return {{"model",
           {{"vocab_size", 512},
            {"d_model", 128},
            {"num_layers", 2},
            {"num_heads", 4},
            {"d_ffn", 256},
            {"norm", "layernorm"},
            {"tie_embeddings", false}}},
          {"precision", {{"recipe", "parka"}}},
          {"optimizer", {{"gradient", "bf16"}}},
          {"data", {{"train", {"train.npy"}}, {"sequence_length", 96}}},
          {"training", {{"global_batch_size", 8}, {"micro_batch_size", 2}}}};
}
constexpr double kCopy = 1e9, kLaunch = 5e-6;

using Seconds = std::function<double(const RecordedOp&)>;
double work_of(const RecordedOp& op) { return op.cost.flop > 0 ? op.cost.flop : op.cost.bytes; }
double by_work(const RecordedOp& op) { return 1e-6 * work_of(op); }

// What `parka bench` writes of a step on one GPU in which ops take `seconds`: 0.9 seconds without timing each.
json measurement(const Seconds& seconds = by_work, const json& config = measured_config(),
                 const std::set<std::string>& one_kernel = {}) {
  json file = {{"device", "NVIDIA H200"}, {"ranks", 1},           {"step_seconds", {0.9, 0.8, 5.0}},
               {"copy_bandwidth", kCopy}, {"ops", json::array()}, {"config", config}};
  std::map<std::vector<std::string>, json> ops;
  const RecordedStep step = record_step(parse_config(config, "test"), 1, one_kernel);
  for (const RecordedStep::Part& part : step.parts) {
    for (const RecordedStep::Work& work : part.work) {
      const auto* op = std::get_if<RecordedOp>(&work);
      if (op == nullptr) continue;
      const std::string section(name_of(op->section));
      json& line = ops.try_emplace({section, op->op, op->cost.shape}, json::object()).first->second;
      const int64_t runs = line.value("runs", int64_t{0}), more = part.times;
      const auto mean = [&](const char* key, double value) {
        return (line.value(key, 0.0) * static_cast<double>(runs) + value * static_cast<double>(more)) /
               static_cast<double>(runs + more);
      };
      line = {{"section", section},
              {"op", op->op},
              {"shape", op->cost.shape},
              {"runs", runs + more},
              {"seconds", line.value("seconds", 0.0) + seconds(*op) * static_cast<double>(more)},
              {"bytes", mean("bytes", op->cost.bytes)},
              {"flop", op->cost.flop}};
    }
  }
  for (const auto& [key, line] : ops) file["ops"].push_back(line);
  return file;
}

// Of all ops of a step of one of `gpus`, and of the zeros that it writes and the pieces that it adds up.
double own_seconds(const Config& config, int64_t gpus, const Seconds& seconds) {
  return compute_seconds(record_step(config, gpus), {seconds, kCopy});
}

struct Written {
  explicit Written(const json& file) { write_file(path, file.dump()); }
  StepMeasurement read() const { return read_step_measurement(path); }
  TemporaryFolder folder;
  std::string path = folder / "bench.json";
};

constexpr Links kLinks = {.link_bandwidth = 1, .memory_bandwidth = 1, .host_bandwidth = 1};

double step_seconds(const StepMeasurement& one, const Config& config, int64_t gpus) {
  return predict_step_by(one, config, kLinks, gpus).compute_seconds;
}

}  // namespace

TEST_CASE("a measurement is read as bench writes it", "[engine][step model]") {
  const StepMeasurement one = Written(measurement()).read();
  CHECK(one.device == "NVIDIA H200");
  CHECK(one.step_seconds == 0.9);
  CHECK(one.num_micro_batches() == 4);
  CHECK(one.tokens_per_second_per_gpu() == Approx(8 * 96 / 0.9));
  const auto gemm =
      std::find_if(one.ops.begin(), one.ops.end(), [](const OpSummary& op) { return op.op == "gemm"; });
  REQUIRE(gemm != one.ops.end());
  CHECK(gemm->section != StepSection::kNone);
  CHECK(gemm->count > 0);
  CHECK(gemm->seconds == Approx(1e-6 * gemm->cost.flop * static_cast<double>(gemm->count)));
  CHECK(gemm->cost.shape.find(" x ") != std::string::npos);
}

TEST_CASE("one GPU is expected to take what it took, whatever ops took", "[engine][step model]") {
  const Seconds all_kinds[] = {by_work, [](const RecordedOp&) { return 1e-3; },
                               [](const RecordedOp& op) { return op.section == StepSection::kHead ? 1.0 : 0.0; }};
  for (const Seconds& seconds : all_kinds) {
    const StepMeasurement one = Written(measurement(seconds)).read();
    CHECK(step_seconds(one, one.config, 1) == Approx(0.9));
    Config longer = one.config;
    longer.training.global_batch_size = 16;
    const double more = own_seconds(longer, 1, seconds) / own_seconds(one.config, 1, seconds);
    CHECK(more > 1.5);
    CHECK(step_seconds(one, longer, 1) == Approx(0.9 * more));
  }
}

TEST_CASE("a step measured with one kernel for SwiGLU and its product has it when it is changed",
          "[engine][step model]") {
  CHECK(Written(measurement()).read().one_kernel().empty());
  const auto only_fused = [](const RecordedOp& op) { return op.op == "swiglu_projection" ? 1.0 : 0.0; };
  const StepMeasurement one = Written(measurement(only_fused, measured_config(), {"swiglu_projection"})).read();
  CHECK(one.one_kernel() == std::set<std::string>{"swiglu_projection"});
  CHECK(step_seconds(one, one.config, 1) == Approx(0.9));
  Config longer = one.config;
  longer.training.global_batch_size = 16;
  CHECK(step_seconds(one, longer, 1) == Approx(2 * 0.9));
}

TEST_CASE("waits for what is in host memory are not work of the measured GPU", "[engine][step model]") {
  json config = measured_config();
  config["optimizer"]["offload"] = true;
  json file = measurement(by_work, config);
  const auto wait = [](const char* what, double seconds) {
    return json{{"section", "optimizer"}, {"for", what}, {"count", 3}, {"seconds", seconds}};
  };
  file["waits"] = {wait("states from the host", 0.2), wait("gathered weights", 0.1),
                   wait("states to the host", 0.05), wait("weights from the host", 0.04),
                   wait("weights to the host", 0.01)};
  const StepMeasurement one = Written(file).read();
  CHECK(step_seconds(one, one.config, 1) == Approx(0.6));
  Config on_device = one.config;
  on_device.optimizer.offload = false;
  CHECK(step_seconds(one, on_device, 1) == Approx(0.6));
  file["waits"][0]["seconds"] = 0.9;
  CHECK(refusal([&] { Written(file).read(); }).find("waits longer than it takes") != std::string::npos);
}

TEST_CASE("what ZeRO divides takes less, but for its launches", "[engine][step model]") {
  const auto is_divided = [](const RecordedOp& op) { return op.op == "adamw_step" || op.op == "sum_of_squares"; };
  const Seconds seconds = [&](const RecordedOp& op) {
    return is_divided(op) ? kLaunch + 1e-9 * op.cost.bytes : 0.0;
  };
  const StepMeasurement one = Written(measurement(seconds)).read();
  Config config = one.config;
  const double scale = 0.9 / own_seconds(config, 1, seconds);
  const RecordedStep step = record_step(config, 4);
  double bytes = 0;
  for (const RecordedStep::Work& work : step.parts.back().work) {
    const auto* op = std::get_if<RecordedOp>(&work);
    bytes += op != nullptr && is_divided(*op) ? op->cost.bytes : 0;
  }
  config.distributed.zero_stage = 1;
  CHECK(bytes > 0);
  CHECK(step_seconds(one, one.config, 4) - step_seconds(one, config, 4) == Approx(scale * 0.75 * 1e-9 * bytes));
}

TEST_CASE("ops that ZeRO and kept copies add take what their like took", "[engine][step model]") {
  for (const char* recipe : {"parka", "fp8_block"}) {
    json config_json = measured_config();
    config_json["precision"]["recipe"] = recipe;
    const StepMeasurement one = Written(measurement(by_work, config_json)).read();
    const double scale = 0.9 / own_seconds(one.config, 1, by_work);
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (const auto copies : {WeightCopies::kBoth, WeightCopies::kRows, WeightCopies::kNone}) {
        CAPTURE(recipe, stage, name_of(copies));
        Config config = one.config;
        config.distributed.zero_stage = stage;
        config.precision.weight_copies = copies;
        CHECK(step_seconds(one, config, 4) == Approx(scale * own_seconds(config, 4, by_work)).epsilon(1e-4));
      }
    }
  }
}

TEST_CASE("ops without their like in the measurement make codes of weights, at a part of copy bandwidth",
          "[engine][step model]") {
  json config_json = measured_config();
  config_json["precision"]["recipe"] = "fp8_linear";
  json file = measurement(by_work, config_json);
  json others = json::array();
  for (const json& op : file["ops"]) {
    if (op["op"] != "quantize") others.push_back(op);
  }
  file["ops"] = others;
  const StepMeasurement one = Written(file).read();
  const Seconds expected = [](const RecordedOp& op) {
    return op.op == "quantize" ? op.cost.bytes / (0.8 * kCopy) : by_work(op);
  };
  const double scale = 0.9 / own_seconds(one.config, 1, expected);
  Config config = one.config;
  config.precision.weight_copies = WeightCopies::kNone;
  CHECK(step_seconds(one, config, 1) == Approx(scale * own_seconds(config, 1, expected)).epsilon(1e-4));
}

TEST_CASE("a file that is no measurement is refused", "[engine][step model]") {
  const auto refused = [](const std::function<void(json&)>& change) {
    json file = measurement();
    change(file);
    const Written written(file);
    const std::string message = refusal([&] { written.read(); });
    CHECK(message.find(written.path) != std::string::npos);
    return message;
  };
  const auto says = [](const std::string& message, const char* part) {
    CAPTURE(message, part);
    CHECK(message.find(part) != std::string::npos);
  };
  says(refused([](json& file) { file.erase("ops"); }), "parka bench --json");
  says(refused([](json& file) { file["device"] = 3; }), "parka bench --json");
  says(refused([](json& file) { file["step_seconds"] = json::array(); }), "no step");
  says(refused([](json& file) { file["step_seconds"][1] = 0; }), "step_seconds");
  says(refused([](json& file) { file["ops"][3]["seconds"] = -1; }), "seconds");
  says(refused([](json& file) { file["ops"][3]["seconds"] = 1e308; }), "seconds");
  says(refused([](json& file) { file["ops"][3]["bytes"] = -1; }), "bytes");
  says(refused([](json& file) { file["ops"][3]["section"] = "attic"; }), "attic");
  says(refused([](json& file) { file["copy_bandwidth"] = 0; }), "copy_bandwidth");
  says(refused([](json& file) { file["ranks"] = 3; }), "ranks");
  says(refused([](json& file) { file["ranks"] = 0; }), "ranks");
  says(refused([](json& file) { file["ranks"] = int64_t{1} << 62; }), "ranks");  // too large for a product
  says(refused([](json& file) { file["ranks"] = 1e300; }), "ranks");
  says(refused([](json& file) { file["ranks"] = 1.5; }), "ranks");
  says(refused([](json& file) { file["ops"][3]["runs"] = 1e300; }), "runs");
  says(refused([](json& file) { file["config"]["training"]["steps"] = -1; }), "training.steps");
}

TEST_CASE("a measurement of another config or of several GPUs is refused", "[engine][step model]") {
  json file = measurement();
  const StepMeasurement one = Written(file).read();
  file["ranks"] = 4;
  const StepMeasurement four = Written(file).read();
  CHECK(refusal([&] { predict_step_by(four, four.config, kLinks, 4); }).find("4 GPUs") != std::string::npos);

  struct Change {
    void (*apply)(Config&);
    const char* key;  // empty: allowed
    bool of_run;      // of the whole run it is not
  };
  const Change changes[] = {
      {[](Config& c) { c.model.d_ffn = 512; }, "model.d_ffn: 256 measured, 512 here", true},
      {[](Config& c) { c.precision.group_size = 32; }, "precision.group_size", true},
      {[](Config& c) { c.optimizer.master = MasterForm::kFp24Split; }, "optimizer.master", true},
      {[](Config& c) { c.data.sequence_length = 32; }, "data.sequence_length", true},
      {[](Config& c) { c.data.documents = DocumentMode::kSeparate; }, "data.documents", true},
      {[](Config& c) { c.training.micro_batch_size = 1; }, "training.micro_batch_size", true},
      {[](Config& c) { c.training.global_batch_size = 16; }, "", true},
      {[](Config& c) { c.model.num_layers = 3; }, "", true},
      {[](Config& c) { c.distributed.zero_stage = 2; }, "", true},
      {[](Config& c) { c.precision.weight_copies = WeightCopies::kRows; }, "", true},
      {[](Config& c) { c.precision.weight_copies = WeightCopies::kBoth; }, "", false},  // what `auto` stands for
      {[](Config& c) { c.distributed.shard_size = 1; }, "", true},
      {[](Config& c) { c.optimizer.lr = 1; }, "", false},
      {[](Config& c) { c.data.loss_mask = true; }, "", false},
      {[](Config& c) { c.model.num_kv_heads = 4; }, "", false},  // as many as without
      {[](Config& c) { c.training.steps = 5; }, "", false},
      {[](Config& c) { c.precision.recipe = Recipe::kBf16; }, "", false},  // a name for the other keys
  };
  for (const Change& change : changes) {
    CAPTURE(change.key);
    Config config = one.config;
    change.apply(config);
    const std::string message = refusal([&] { predict_step_by(one, config, kLinks, 2); });
    CHECK(message.empty() == (*change.key == '\0'));
    CHECK(message.find(change.key) != std::string::npos);
    CHECK(refusal([&] { require_measurement_of(four, config, 4); }).empty() == !change.of_run);
  }
  CHECK(refusal([&] { require_measurement_of(four, one.config, 2); }).find("--gpus 4") != std::string::npos);
}

TEST_CASE("a prediction divides the ranks as the run does", "[engine][step model][moe]") {
  json config = measured_config();
  config["model"].update({{"d_ffn", 64}, {"moe", {{"num_experts", 8}, {"experts_per_token", 2}}}});
  const StepMeasurement one = Written(measurement(by_work, config)).read();
  // Each rank has all states but those of others' experts: four ranks have copies, wherever the shards' ends are.
  Config divided = one.config;
  divided.training.global_batch_size = 16;
  divided.distributed.expert_parallel = 2;
  const double seconds = predict_step_by(one, divided, kLinks, 8).communication_seconds;
  divided.distributed.shard_size = 4;
  CHECK(predict_step_by(one, divided, kLinks, 8).communication_seconds == seconds);
  divided.distributed.zero_stage = 1;
  CHECK(predict_step_by(one, divided, kLinks, 8).communication_seconds != seconds);
}

TEST_CASE("a measurement of fewer blocks predicts more of them", "[engine][step model]") {
  const StepMeasurement one = Written(measurement()).read();
  Config deeper = one.config;
  deeper.model.num_layers = 7;
  const double scale = 0.9 / own_seconds(one.config, 1, by_work);
  CHECK(step_seconds(one, deeper, 1) == Approx(scale * own_seconds(deeper, 1, by_work)).epsilon(1e-4));
}

// Each of P ranks takes the tokens of all, of which every P-th choice falls to it, whatever room there is.
TEST_CASE("products of divided experts are expected to have the rows of evenly chosen ones",
          "[engine][step model][moe]") {
  json config = measured_config();
  config["model"].update({{"d_ffn", 64}, {"moe", {{"num_experts", 8}, {"experts_per_token", 3}}}});
  config["data"]["sequence_length"] = 4096;  // so that padding is at most 4 % of the rows
  const Seconds only_experts = [](const RecordedOp& op) { return op.op.starts_with("grouped_") ? by_work(op) : 0; };
  const StepMeasurement one = Written(measurement(only_experts, config)).read();
  Config whole = one.config;
  whole.training.global_batch_size = 32;  // two micro-batches for each of 8 ranks
  for (const int64_t ranks : {2, 4, 8}) {
    CAPTURE(ranks);
    Config divided = whole;
    divided.distributed.expert_parallel = ranks;
    CHECK(step_seconds(one, divided, 8) == Approx(step_seconds(one, whole, 8)).epsilon(0.05));
  }
}
