#include "engine/planning/step_measurement.h"

#include <cmath>
#include <functional>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/planning/step_model.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

using nlohmann::json;

// Four micro-batches of two blocks; 128 x (3 x 128 + 128 + 3 x 256) weights in each.
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
          {"data", {{"train", {"train.npy"}}, {"sequence_length", 64}}},
          {"training", {{"global_batch_size", 8}, {"micro_batch_size", 2}}}};
}
constexpr double kBlockWeights = 128.0 * (3 * 128 + 128 + 3 * 256), kEmbedding = 512 * 128;
constexpr double kCopy = 1e9;

json op(const char* section, const char* name, int64_t runs, double seconds) {
  return {{"section", section}, {"op", name}, {"shape", ""}, {"runs", runs},
          {"seconds", seconds}, {"bytes", 1}, {"flop", 0}};
}

// Everything takes half as long again when it is timed as in the step without.
json measurement() {
  json file = {
      {"device", "NVIDIA H200"}, {"ranks", 1}, {"step_seconds", {0.9, 0.8, 5.0}}, {"copy_bandwidth", kCopy}};
  file["ops"] = {op("embedding", "embedding_forward", 4, 0.04),
                 op("embedding", "embedding_backward", 4, 0.08),
                 op("block forward", "gemm", 16, 0.3),
                 op("block forward", "rope_forward", 8, 0.1),
                 op("block backward", "gemm", 32, 0.48),
                 op("head", "gemm", 12, 0.12),
                 op("head", "add_sum", 4, 0.08),
                 op("optimizer", "sum_of_squares", 1, 0.02),
                 op("optimizer", "adamw_step", 10, 0.09),
                 op("optimizer", "clip_coefficient", 1, 0.01),
                 op("optimizer", "quantize", 8, 0.03)};
  file["config"] = measured_config();
  return file;
}
constexpr double kTimed = 1.35 + 2 * kEmbedding / kCopy, kScale = 0.9 / kTimed;

struct Written {
  explicit Written(const json& file) { write_file(path, file.dump()); }
  StepMeasurement read() const { return read_step_measurement(path); }
  TemporaryFolder folder;
  std::string path = folder / "bench.json";
};

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

double step_seconds(const StepMeasurement& one, const Config& config, int64_t gpus) {
  return predict_step(schedule_step(config, gpus, compute_seconds(one, config, gpus)), {}, gpus).seconds;
}

}  // namespace

TEST_CASE("a measurement is read as bench writes it", "[engine][step model]") {
  const StepMeasurement one = Written(measurement()).read();
  CHECK(one.device == "NVIDIA H200");
  CHECK(one.step_seconds == 0.9);
  CHECK(one.num_micro_batches() == 4);
  CHECK(one.tokens_per_second_per_gpu() == Approx(8 * 64 / 0.9));
  const ComputeSeconds compute = compute_seconds(one, one.config, 1);
  CHECK(compute.embedding_forward == Approx(kScale * 0.01));
  CHECK(compute.embedding_backward == Approx(kScale * 0.02));
  CHECK(compute.block_forward == Approx(kScale * 0.05));
  CHECK(compute.block_backward == Approx(kScale * 0.06));
  CHECK(compute.head == Approx(kScale * 0.05));
  CHECK(compute.gradient_norm == Approx(kScale * 0.02));
  CHECK(compute.update == Approx(kScale * 0.1));
  CHECK(compute.quantize_weights == Approx(kScale * 0.03));
}

TEST_CASE("one GPU is expected to take what it took, micro-batch by micro-batch", "[engine][step model]") {
  const StepMeasurement one = Written(measurement()).read();
  CHECK(step_seconds(one, one.config, 1) == Approx(0.9));
  Config longer = one.config;
  longer.training.global_batch_size = 16;
  CHECK(step_seconds(one, longer, 1) == Approx(0.9 + kScale * 1.2));
  CHECK(compute_seconds(one, longer, 1, 1.5).head == Approx(1.5 * kScale * 0.05));
}

TEST_CASE("what ZeRO divides takes less, but for its launches", "[engine][step model]") {
  const StepMeasurement one = Written(measurement()).read();
  constexpr double kLaunch = 5e-6;
  const auto divided = [](double seconds, double launches) {
    return kScale * (launches * kLaunch + (seconds - launches * kLaunch) / 4);
  };
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    Config config = one.config;
    config.precision.weight_copies = WeightCopies::kBoth;
    config.distributed.zero_stage = stage;
    const ComputeSeconds compute = compute_seconds(one, config, 4);
    CHECK(compute.update == Approx(stage >= 1 ? divided(0.1, 11) : kScale * 0.1));
    CHECK(compute.gradient_norm == Approx(stage >= 1 ? divided(0.02, 1) : kScale * 0.02));
    CHECK(compute.clear_gradients == Approx(kScale * 2 * kEmbedding / kCopy));
    // Stage 3 keeps no codes of whole weights.
    CHECK(compute.quantize_weights == Approx(stage == 3 ? 0.0 : kScale * 0.03));
    CHECK(compute.block_backward == Approx(kScale * 0.06));
    CHECK(compute.block_forward == Approx(kScale * 0.05));
    if (stage < 3) continue;
    // Where transposed ones are not gathered, weights are transposed where they are used, at 0.8 of copy bandwidth.
    const double transposing = 2 * kBlockWeights / (0.8 * kCopy);
    Config rows = config;
    rows.precision.weight_copies = WeightCopies::kRows;
    CHECK(compute_seconds(one, rows, 4).block_backward == Approx(kScale * 0.06 + transposing));
    rows.precision.weight_copies = WeightCopies::kAuto;
    CHECK(compute_seconds(one, rows, 4).block_backward == Approx(kScale * 0.06 + transposing));
  }
}

TEST_CASE("a measurement that transposed weights where they are used serves a run that keeps them",
          "[engine][step model]") {
  json file = measurement();
  file["config"]["precision"]["weight_copies"] = "rows";
  const StepMeasurement one = Written(file).read();
  Config config = one.config;
  CHECK(compute_seconds(one, config, 4).block_backward == Approx(kScale * 0.06));
  config.precision.weight_copies = WeightCopies::kBoth;
  CHECK(compute_seconds(one, config, 4).block_backward ==
        Approx(kScale * 0.06 - 2 * kBlockWeights / (0.8 * kCopy)));
  config.precision.weight_copies = WeightCopies::kNone;  // 2 bytes read and 1 written, each time
  CHECK(compute_seconds(one, config, 4).block_backward == Approx(kScale * 0.06 + kBlockWeights / (0.8 * kCopy)));
  CHECK(compute_seconds(one, config, 4).block_forward == Approx(kScale * 0.05 + 3 * kBlockWeights / (0.8 * kCopy)));
  CHECK(compute_seconds(one, config, 4).quantize_weights == 0);
  config.distributed.zero_stage = 3;  // which moves codes
  CHECK(compute_seconds(one, config, 4).block_backward == Approx(kScale * 0.06));
}

TEST_CASE("codes in blocks are made of gathered weights and in no update", "[engine][step model]") {
  json file = measurement();
  file["config"]["precision"]["recipe"] = "fp8_block";
  const StepMeasurement one = Written(file).read();
  Config config = one.config;
  config.distributed.zero_stage = 2;
  CHECK(compute_seconds(one, config, 4).quantize_weights == Approx(kScale * 0.03));
  config.distributed.zero_stage = 3;
  const ComputeSeconds compute = compute_seconds(one, config, 4);
  CHECK(compute.quantize_weights == 0);
  // For input gradients they are made once more, transposed: 2 bytes read, 1 written.
  CHECK(compute.block_backward == Approx(kScale * 0.06 + 3 * kBlockWeights / (0.8 * kCopy)));
  int gathered = 0;  // before each use of each block, but the last two in backward, which are there from forward
  const auto is_quantizing = [&](const StepAction& action) {
    return action.seconds > 0 && std::abs(action.seconds - 3 * kBlockWeights / (0.8 * kCopy)) < 1e-12;
  };
  for (const StepAction& action : schedule_step(config, 4, compute)) gathered += is_quantizing(action) ? 1 : 0;
  CHECK(gathered == 2);
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
  CHECK(refusal([&] { compute_seconds(four, four.config, 4); }).find("4 GPUs") != std::string::npos);

  struct Change {
    void (*apply)(Config&);
    const char* key;  // empty: allowed
    bool of_run;      // of the whole run it is not
  };
  const Change changes[] = {
      {[](Config& c) { c.model.d_ffn = 512; }, "model.d_ffn: 256 measured, 512 here", true},
      {[](Config& c) { c.precision.group_size = 32; }, "precision.group_size", true},
      {[](Config& c) { c.optimizer.master = MasterForm::kFp32; }, "optimizer.master", true},
      {[](Config& c) { c.data.sequence_length = 32; }, "data.sequence_length", true},
      {[](Config& c) { c.data.documents = DocumentMode::kSeparate; }, "data.documents", true},
      {[](Config& c) { c.training.micro_batch_size = 1; }, "training.micro_batch_size", true},
      {[](Config& c) { c.training.global_batch_size = 16; }, "", true},
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
    const std::string message = refusal([&] { compute_seconds(one, config, 2); });
    CHECK(message.empty() == (*change.key == '\0'));
    CHECK(message.find(change.key) != std::string::npos);
    CHECK(refusal([&] { require_measurement_of(four, config, 4); }).empty() == !change.of_run);
  }
  CHECK(refusal([&] { require_measurement_of(four, one.config, 2); }).find("--gpus 4") != std::string::npos);
}
