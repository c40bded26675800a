// Fine-tuning on masked, packed documents against transformers and PyTorch (tests/fixtures/make_finetune_fixture.py
// made the file).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/files/safetensors.h"
#include "engine/training/training_run.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Fixture {
  std::map<std::string, std::string> settings;
  std::map<std::string, std::vector<std::byte>> tensors;

  double number(const std::string& key) const { return std::stod(settings.at(key)); }
  std::string text(const std::string& key, const std::string& otherwise) const {
    return settings.contains(key) ? settings.at(key) : otherwise;
  }
  template <typename T>
  std::vector<T> values(const std::string& name) const {
    const std::vector<std::byte>& bytes = tensors.at(name);
    std::vector<T> all(bytes.size() / sizeof(T));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
  }
};

Fixture load_fixture(const std::string& name = "finetune") {
  const InputFile file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/" + name + ".safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  Fixture fixture;
  fixture.settings.insert(header.metadata.begin(), header.metadata.end());
  for (const SafetensorsEntry& entry : header.tensors) {
    std::vector<std::byte>& bytes = fixture.tensors[entry.name];
    bytes.resize(static_cast<size_t>(entry.num_bytes));
    file.read(entry.offset, bytes);
  }
  return fixture;
}

// Writes the fixture's data into the folder, as uint16 ids and a mask file.
Config config_of(const Fixture& f, const std::string& folder, int64_t steps) {
  const std::vector<int32_t> tokens = f.values<int32_t>("tokens");
  const std::vector<uint16_t> ids(tokens.begin(), tokens.end());
  const auto text_of = [](const auto& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  write_file(folder + "/train.npy", text_of(ids));
  write_file(folder + "/train.npy.mask", text_of(f.tensors.at("marks")));
  const auto integer = [&](const char* key) { return static_cast<int64_t>(std::stod(f.text(key, "0"))); };
  return parse_config(
      {{"model",
        {{"vocab_size", integer("vocab_size")},
         {"d_model", integer("d_model")},
         {"num_layers", integer("num_layers")},
         {"num_heads", integer("num_heads")},
         {"num_kv_heads", integer("num_kv_heads")},
         {"d_ffn", integer("d_ffn")},
         {"rope_theta", f.number("rope_theta")},
         {"head_dim", integer("head_dim")},
         {"qk_norm", f.text("qk_norm", "none")},
         {"sliding_window", integer("sliding_window")},
         {"norm", "rmsnorm"},
         {"norm_placement", f.text("norm_placement", "before")},
         {"norm_eps", f.number("norm_eps")},
         {"tie_embeddings", false}}},
       {"precision", {{"recipe", "fp32"}}},
       {"optimizer",
        {{"lr", f.number("lr")},
         {"beta1", f.number("beta1")},
         {"beta2", f.number("beta2")},
         {"eps", f.number("eps")},
         {"weight_decay", f.number("weight_decay")},
         {"clip_norm", f.number("clip_norm")},
         {"schedule", {{"kind", "constant"}}}}},
       {"data",
        {{"train", {folder + "/train.npy"}},
         {"sequence_length", integer("seq")},
         {"shuffle", false},
         {"loss_mask", true},
         {"documents", "separate"}}},
       {"training", {{"steps", steps}, {"global_batch_size", integer("batch")}, {"micro_batch_size", 2}}},
       {"checkpoint", {{"folder", folder + "/run"}}}},
      "test");
}

// Has the run start at step 0 from the fixture's weights.
void start_from(const Fixture& fixture, TrainingRun& run, const Config& config) {
  run.initialize();
  CheckpointContents contents = run.snapshot();
  size_t replaced = 0;
  for (HostTensor& tensor : contents.tensors) {
    const auto found = fixture.tensors.find("weight/" + tensor.name);
    if (found == fixture.tensors.end()) continue;
    REQUIRE(tensor.dtype == DType::kF32);
    REQUIRE(tensor.bytes.size() == found->second.size());
    tensor.bytes = found->second;
    ++replaced;
  }
  REQUIRE(replaced == run.model().parameters().all.size());
  save_checkpoint(config.checkpoint.folder, contents, {});
  run.restore(load_checkpoint(list_checkpoints(config.checkpoint.folder).front().path));
}

struct Worst {
  double loss = 0, grad_norm = 0;  // differences from PyTorch, the latter relative
  int wrong_targets = 0;
};

Worst run_against(const Fixture& fixture, const Config& config) {
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  start_from(fixture, run, config);
  const auto losses = fixture.values<float>("loss"), norms = fixture.values<float>("grad_norm");
  const auto num_targets = fixture.values<int32_t>("num_targets");
  Worst worst;
  for (size_t i = 0; i < losses.size(); ++i) {
    const StepReport report = *run.step();
    worst.loss = std::max(worst.loss, std::abs(report.loss - losses[i]));
    worst.grad_norm = std::max(worst.grad_norm, std::abs(report.grad_norm / norms[i] - 1));
    worst.wrong_targets += report.num_targets != num_targets[i];
  }
  return worst;
}

}  // namespace

TEST_CASE("fine-tuning on packed documents follows transformers and PyTorch for 50 steps", "[engine][finetune]") {
  const Fixture fixture =
      load_fixture(GENERATE("finetune", "finetune_window", "finetune_qk_norm", "finetune_post_norms"));
  const TemporaryFolder folder;
  Config config = config_of(fixture, folder.path().string(), 50);
  config.training.micro_batch_size = GENERATE(1, 2, 4);
  const Worst worst = run_against(fixture, config);
  CAPTURE(worst.loss, worst.grad_norm);
  CHECK(worst.wrong_targets == 0);
  CHECK(worst.loss <= 1e-4);
  CHECK(worst.grad_norm <= 1e-3);
}

TEST_CASE("without its mask, its documents or its window fine-tuning takes another course", "[engine][finetune]") {
  // What the test above would not see if it passed whatever these keys did.
  const Fixture fixture = load_fixture("finetune_window");
  const TemporaryFolder folder;
  Config config = config_of(fixture, folder.path().string(), 50);
  const int without = GENERATE(0, 1, 2);
  if (without == 0) config.data.loss_mask = false;
  if (without == 1) config.data.documents = DocumentMode::kJoined;
  if (without == 2) config.model.sliding_window = 0;
  CHECK(run_against(fixture, config).loss > 1e-2);
}
