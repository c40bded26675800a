#include "engine/training/training_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/philox.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/evaluation.h"
#include "engine/training/progress.h"
#include "engine/training/speed.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "tests/engine/checkpoint_fixture.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/offload_plan.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kSequence = 16;

void write_tokens(const std::string& path, int64_t count) {
  std::ofstream file(path, std::ios::binary);
  for (int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<uint16_t>(philox4x32(1, 2, static_cast<uint64_t>(i))[0] % 64);
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
}

Config tiny_config(const std::string& folder, const std::string& recipe) {
  write_tokens(folder + "/train.npy", 40 * kSequence);
  return parse_config(
      {{"model", {{"vocab_size", 64}, {"d_model", 32}, {"num_layers", 2}, {"num_heads", 2}, {"d_ffn", 64}}},
       {"precision", {{"recipe", recipe}}},
       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", kSequence}}},
       {"training", {{"steps", 10}, {"global_batch_size", 4}, {"micro_batch_size", 2}}},
       {"checkpoint", {{"folder", folder + "/run"}}}},
      "test");
}

// Saves a run's state after `damage` has changed it, and loads the checkpoint.
LoadedCheckpoint saved(TrainingRun& run, const std::string& folder,
                       const std::function<void(CheckpointContents&)>& damage) {
  CheckpointContents contents = run.snapshot();
  damage(contents);
  save_checkpoint(folder, contents, {});
  return load_checkpoint(list_checkpoints(folder).front().path);
}

HostTensor& tensor_named(CheckpointContents& contents, const std::string& name) {
  for (HostTensor& tensor : contents.tensors) {
    if (tensor.name == name) return tensor;
  }
  throw_internal("no tensor {}", name);
}

std::vector<float> floats(CheckpointContents& contents, const std::string& name) {
  const HostTensor& tensor = tensor_named(contents, name);
  std::vector<float> values(tensor.bytes.size() / sizeof(float));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

// The CPU, as if it had not done yet what is queued: a step is reported by the next one, as on a GPU.
class DeviceThatQueues final : public ForwardingDevice {
 public:
  std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) override {
    return std::make_unique<LateRead>(ForwardingDevice::copy_to_host_later(source, bytes));
  }

 private:
  class LateRead final : public HostRead {
   public:
    explicit LateRead(std::unique_ptr<HostRead> read) : read_(std::move(read)) {}
    bool ready() const override { return false; }
    const void* wait() override { return read_->wait(); }

   private:
    std::unique_ptr<HostRead> read_;
  };
};

std::string refusal(TrainingRun& run, const LoadedCheckpoint& checkpoint) {
  try {
    run.restore(checkpoint);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a checkpoint with NaN or infinite values is refused by name", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config config = tiny_config(folder.path().string(), "coat");
  TrainingRun run(config, *device, alone());
  run.initialize();
  run.step();
  const struct {
    const char* name;
    std::vector<uint8_t> value;                                 // of element 0, little-endian
  } cases[] = {{"embedding.master", {0x00, 0x00, 0xc0, 0x7f}},  // NaN
               {"embedding", {0x80, 0x7f}},                     // infinity
               {"blocks.1.down.exp_avg", {0x7f}},               // NaN code
               {"blocks.0.qkv.exp_avg_sq.amax", {0x00, 0x00, 0x80, 0x7f}}};
  int index = 0;
  for (const auto& c : cases) {
    CAPTURE(c.name);
    const LoadedCheckpoint checkpoint =
        saved(run, folder.path().string() + "/bad" + std::to_string(index++), [&](auto& contents) {
          std::memcpy(tensor_named(contents, c.name).bytes.data(), c.value.data(), c.value.size());
        });
    TrainingRun other(config, *device, alone());
    const std::string message = refusal(other, checkpoint);
    CHECK(message.find(c.name) != std::string::npos);
    CHECK(message.find("NaN") != std::string::npos);
  }
}

TEST_CASE("a checkpoint whose tensors do not fit is refused by name", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config config = tiny_config(folder.path().string(), "bf16");
  TrainingRun run(config, *device, alone());
  run.initialize();
  const auto refused = [&](const std::string& name, const std::function<void(CheckpointContents&)>& damage) {
    TrainingRun other(config, *device, alone());
    return refusal(other, saved(run, folder.path().string() + "/" + name, damage)).find("embedding.exp_avg") !=
           std::string::npos;
  };
  CHECK(refused("renamed", [](auto& c) { tensor_named(c, "embedding.exp_avg").name = "embedding.exp_avg_"; }));
  CHECK(refused("missing", [](auto& c) {
    std::erase_if(c.tensors, [](const auto& t) { return t.name == "embedding.exp_avg"; });
  }));
  CHECK(refused("other_type", [](auto& c) { tensor_named(c, "embedding.exp_avg").dtype = DType::kI32; }));
  CHECK(refused("other_shape", [](auto& c) {
    HostTensor& t = tensor_named(c, "embedding.exp_avg");
    t.shape = {2, static_cast<int64_t>(t.bytes.size() / 8)};
  }));
}

TEST_CASE("a run refuses to go on with other data and names the file", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  const std::string path = config.data.train[0];
  config.data.checksum = GENERATE(true, false);
  // Long enough for a middle that fingerprints do not look at.
  write_tokens(path, 1000 * kSequence);
  int num_progress = 0;
  TrainingRun run(config, *device, alone(), [&] { ++num_progress; });
  CHECK((num_progress > 0) == config.data.checksum);
  run.initialize();
  run.step();
  const LoadedCheckpoint checkpoint = saved(run, config.checkpoint.folder, [](auto&) {});
  const auto change_byte = [&](int64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const auto byte = static_cast<char>(file.get() ^ 1);
    file.seekp(offset);
    file.put(byte);
  };
  const auto message = [&] {
    TrainingRun other(config, *device, alone());
    return refusal(other, checkpoint);
  };
  CHECK(message().empty());
  change_byte(16000);
  const std::string middle = message();
  CHECK((middle.find("\"train.npy\" holds different bytes") != std::string::npos) == config.data.checksum);
  CHECK(middle.empty() == !config.data.checksum);
  change_byte(16000);
  CHECK(message().empty());
  change_byte(0);
  CHECK(message().find("\"train.npy\" holds different bytes") != std::string::npos);
  CHECK(message().find("--accept-mended-data") != std::string::npos);
  {
    TrainingRun other(config, *device, alone());
    CHECK(other.restore(checkpoint, SameFiles::kSizes) ==
          std::vector<std::string>{"data.train: \"train.npy\" holds different bytes"});
    // It goes on with the files that it has.
    other.step();
    const LoadedCheckpoint mended = saved(other, config.checkpoint.folder, [](auto&) {});
    TrainingRun next(config, *device, alone());
    CHECK(refusal(next, mended).empty());
  }
  change_byte(0);
  std::filesystem::resize_file(path, 32 * 999);
  CHECK(message().find("\"train.npy\" has 31968 bytes, had 32000") != std::string::npos);
  CHECK(message().find("--accept-mended-data") == std::string::npos);
  TrainingRun shorter(config, *device, alone());
  CHECK_THROWS_AS(shorter.restore(checkpoint, SameFiles::kSizes), Error);
}

TEST_CASE("a step is scaled by its own number of targets", "[engine][training_run]") {
  // Two runs that differ in their accumulation only: with masks of every density a share per micro-batch would
  // show.
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  std::ofstream mask(config.data.train[0] + ".mask", std::ios::binary);
  for (uint64_t i = 0; i < 40 * kSequence; ++i) {
    const uint32_t draw = philox4x32(3, 2, i)[0];
    mask.put(static_cast<char>((draw % 64 < i / 16 ? 1 : 0) + (draw / 64 % 7 == 0 ? 2 : 0)));
  }
  mask.close();
  config.data.loss_mask = true;
  config.data.documents = GENERATE(DocumentMode::kJoined, DocumentMode::kSeparate);
  config.training.micro_batch_size = 4;
  TrainingRun whole(config, *device, alone());
  config.training.micro_batch_size = 1;
  TrainingRun accumulated(config, *device, alone());
  whole.initialize();
  accumulated.initialize();
  std::set<int64_t> numbers;
  for (int i = 0; i < 8; ++i) {
    const StepReport a = *whole.step(), b = *accumulated.step();
    CHECK(a.num_targets == b.num_targets);
    CHECK(std::abs(a.loss - b.loss) <= 1e-5);
    CHECK(std::abs(a.grad_norm - b.grad_norm) <= 1e-4 * a.grad_norm);
    numbers.insert(a.num_targets);
  }
  CHECK(numbers.size() >= 6);
}

TEST_CASE("a step reports the sequences that it read, also where an epoch begins", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  write_tokens(config.data.train[0], 11 * kSequence);  // 2 steps of 4 sequences, then the next epoch
  TrainingRun run(config, *device, alone());
  run.initialize();
  for (const auto& [epoch, consumed] : {std::pair(0, 0), {0, 4}, {1, 0}, {1, 4}, {2, 0}}) {
    const StepReport report = *run.step();
    CHECK(report.data == DataPosition{epoch, consumed});
  }
}

TEST_CASE("a step reports what was waited for its data before it began, too", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config config = tiny_config(folder.path().string(), "bf16");
  write_tokens(config.data.train[0], 200000 * kSequence);  // whose order takes some milliseconds to make
  TrainingRun run(config, *device, alone());
  const auto begin = std::chrono::steady_clock::now();
  CHECK(run.data_failure() == nullptr);
  const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  run.initialize();
  const StepReport first = *run.step();
  CHECK(first.data_wait_seconds > 0.5 * waited);
  CHECK(run.step()->data_wait_seconds < 0.5 * first.data_wait_seconds);  // each wait is told once
}

TEST_CASE("a step without any target is one with a gradient of zero", "[engine][training_run]") {
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "coat", "parka"}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config config = tiny_config(folder.path().string(), recipe);
    std::ofstream(config.data.train[0] + ".mask", std::ios::binary)
        << std::string(39 * kSequence, '\0') << std::string(kSequence, '\1');
    config.data.shuffle = false;
    config.data.loss_mask = true;
    TrainingRun run(config, *device, alone());
    run.initialize();
    const StepReport report = *run.step();
    CHECK((report.applied && report.loss == 0 && report.grad_norm == 0 && report.num_targets == 0));
  }
}

TEST_CASE("an untied embedding of one column is a table, too", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  config.model.d_model = 1;
  config.model.given_head_dim = 2;
  config.model.tie_embeddings = false;
  TrainingRun run(config, *device, alone());
  run.initialize();
  CHECK(run.step()->applied);  // with a gradient of 0: a norm of one number is a constant
}

TEST_CASE("data without any target is refused, also as one source of several", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  const std::string first = config.data.train[0], second = folder / "second.npy";
  write_tokens(second, 40 * kSequence);
  // A sequence's first token is nobody's target.
  std::ofstream(second + ".mask", std::ios::binary) << '\1' << std::string(40 * kSequence - 1, '\0');
  std::ofstream(first + ".mask", std::ios::binary) << std::string(40 * kSequence, '\1');
  config.data.loss_mask = true;
  for (const auto& files : {std::vector{second}, std::vector{first, second}}) {
    config.data.train = files;
    const Error error = error_of([&] { TrainingRun(config, *device, alone()); });
    CHECK((error.code() == ExitCode::kBadInput && mentions(error.what(), "none of 40 sequences of " + second)));
  }
  config.data.loss_mask = false;
  TrainingRun(config, *device, alone());
}

TEST_CASE("a step without any target moves weights by decay and what moments are left", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  config.data.shuffle = false;
  config.data.loss_mask = true;
  const std::string ordinary(3 * 4 * kSequence, 1), empty(28 * kSequence, 0);
  std::ofstream(config.data.train[0] + ".mask", std::ios::binary) << ordinary << empty;
  TrainingRun run(config, *device, alone());
  run.initialize();
  for (int i = 0; i < 3; ++i) run.step();
  CheckpointContents before = run.snapshot();
  const StepReport report = *run.step();
  CHECK((report.applied && report.loss == 0 && report.num_targets == 0));
  CheckpointContents after = run.snapshot();
  const OptimizerConfig& o = config.optimizer;
  const std::string name = "blocks.0.down";
  const std::vector<float> w = floats(before, name), m = floats(before, name + ".exp_avg"),
                           v = floats(before, name + ".exp_avg_sq"), w_after = floats(after, name),
                           m_after = floats(after, name + ".exp_avg"),
                           v_after = floats(after, name + ".exp_avg_sq");
  double moved = 0, error = 0;
  for (size_t i = 0; i < w.size(); ++i) {
    // torch.optim.AdamW's step 4, with a gradient of 0.
    const double exp_avg = o.beta1 * m[i], exp_avg_sq = o.beta2 * v[i];
    const double update =
        exp_avg / (1 - std::pow(o.beta1, 4)) / (std::sqrt(exp_avg_sq / (1 - std::pow(o.beta2, 4))) + o.eps);
    const double want = w[i] * (1 - o.lr * o.weight_decay) - o.lr * update;
    moved = std::max(moved, std::abs(o.lr * update));
    error = std::max(
        {error, std::abs(w_after[i] - want), std::abs(m_after[i] - exp_avg), std::abs(v_after[i] - exp_avg_sq)});
  }
  CHECK(moved > 0.3 * o.lr);
  CHECK(error < 1e-3 * moved);
}

TEST_CASE("a restored run takes the same steps as the one that was saved", "[engine][training_run]") {
  for (const char* recipe : {"fp32", "coat", "parka"}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    const Config config = tiny_config(folder.path().string(), recipe);
    TrainingRun run(config, *device, alone());
    run.initialize();
    for (int i = 0; i < 3; ++i) run.step();
    const LoadedCheckpoint checkpoint = saved(run, folder.path().string() + "/run", [](auto&) {});
    TrainingRun restored(config, *device, alone());
    restored.restore(checkpoint);
    CHECK(restored.completed_steps() == 3);
    bool same = true;
    for (int i = 0; i < 12; ++i) {  // over an epoch border: 40 sequences are 10 steps
      const StepReport a = *run.step(), b = *restored.step();
      same = same && a.step == b.step && a.loss == b.loss && a.grad_norm == b.grad_norm && a.applied &&
             a.data == b.data;
    }
    CHECK(same);
  }
}

TEST_CASE("a run that takes back a bad step is as it was before it", "[engine][training_run]") {
  for (const bool queues : {false, true}) {
    for (const int64_t batch : {4, 40}) {  // of 40 sequences: a batch within an epoch, and one that begins it
      for (const char* recipe : {"fp32", "parka"}) {
        CAPTURE(queues, batch, recipe);
        const TemporaryFolder folder;
        const std::unique_ptr<Device> device = queues ? std::make_unique<DeviceThatQueues>() : make_cpu_device();
        Config config = tiny_config(folder.path().string(), recipe);
        config.training.global_batch_size = batch;
        config.model.norm = NormKind::kRmsNorm;
        config.model.tie_embeddings = false;
        config.optimizer.lr = 1e30;  // the first update makes weights whose loss overflows
        config.training.spike_window = 2;
        config.reliability.state_interval = 1;
        TrainingRun plain(config, *device, alone()), run(config, *device, alone());
        plain.initialize();
        plain.step();
        plain.finish();
        run.initialize();
        std::optional<StepReport> report;
        while (!report || report->applied) report = run.step();
        CHECK(report->step == 2);
        run.take_back(*report);
        CHECK(run.completed_steps() == 1);
        run.check_before_save(TrainingRun::SnapshotForm::kDirect);
        CheckpointContents taken_back = run.snapshot(), expected = plain.snapshot();
        // The end of an epoch may be called the beginning of the next.
        for (CheckpointContents* contents : {&taken_back, &expected}) contents->state.at("data") = {};
        CHECK(same(taken_back, expected));
        TrainingRun restored(config, *device, alone());
        restored.restore(saved(run, folder.path().string() + "/run", [](auto&) {}));
        std::optional<StepReport> again = restored.step();
        if (!again) again = restored.finish();
        CHECK((again->step == 2 && again->data == report->data && !again->applied));
      }
    }
  }
}

TEST_CASE("a resumed run keeps what it began with, unless that has moved", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "fp32");
  const std::pair<const char*, std::vector<std::string>> others[] = {
      {"models/llama", {"", "runs/other", "models/llama/step_00000010", "llama/models"}},
      {"runs/a/step_00000010", {"runs/b/step_00000010", "runs/a/step_00000020", "runs/a"}},
      {"", {"models/llama"}}};
  const std::pair<const char*, std::vector<std::string>> moved[] = {
      {"models/llama", {"models/llama", "/moved/llama", "models/llama/"}},
      {"runs/a/step_00000010", {"/moved/a/step_00000010"}}};
  int num_saved = 0;
  const auto check = [&](const std::string& began_with, const std::string& given, const std::string& kept) {
    CAPTURE(began_with, given);
    config.checkpoint.init_from = began_with;
    TrainingRun run(config, *device, alone());
    run.initialize();
    const LoadedCheckpoint checkpoint = saved(run, folder / fmt::format("run{}", num_saved++), [](auto&) {});
    config.checkpoint.init_from = given;
    TrainingRun restored(config, *device, alone());
    restored.restore(checkpoint);
    CHECK(restored.config().checkpoint.init_from == kept);
    const nlohmann::json state = restored.snapshot().state;
    CHECK(state.at("config").at("checkpoint").at("init_from") == kept);
  };
  for (const auto& [began_with, all] : others) {
    for (const std::string& given : all) check(began_with, given, began_with);
  }
  for (const auto& [began_with, all] : moved) {
    for (const std::string& given : all) check(began_with, given, given);
  }
}

TEST_CASE("a step that is a spike changes nothing, in a resumed run too", "[engine][training_run]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = tiny_config(folder.path().string(), "parka");
  config.training.spike_window = 4;
  config.training.spike_sigma = 0.25;  // a spike every few steps
  TrainingRun run(config, *device, alone()), restored(config, *device, alone());
  run.initialize();
  int skipped = 0;
  bool same = true, same_weights = true, is_restored = false;
  for (int i = 0; i < 24; ++i) {
    const std::vector<HostTensor> before = run.snapshot().tensors;
    const StepReport report = *run.step();
    if (is_restored) {
      const StepReport again = *restored.step();
      same = same && again.applied == report.applied && again.loss == report.loss &&
             again.grad_norm == report.grad_norm && again.limits.loss == report.limits.loss;
    }
    const bool is_spike = report.loss > report.limits.loss || report.grad_norm > report.limits.grad_norm;
    CHECK(report.applied == !is_spike);
    CHECK(report.is_finite());
    if (!is_spike) continue;
    ++skipped;
    const std::vector<HostTensor> after = run.snapshot().tensors;
    same_weights = same_weights && std::equal(before.begin(), before.end(), after.begin(), after.end(),
                                              [](const auto& a, const auto& b) { return a.bytes == b.bytes; });
    if (is_restored) continue;
    restored.restore(saved(run, folder.path().string() + "/run", [](auto&) {}));
    is_restored = true;
  }
  CHECK((skipped >= 2 && skipped <= 20));
  CHECK(same);
  CHECK(same_weights);
}

TEST_CASE("a step without targets is no measure of what a spike is", "[engine][training_run]") {
  const TemporaryFolder folder;
  const std::string path = folder.path().string();
  Config config = tiny_config(path, "bf16");
  config.data.loss_mask = true;
  config.data.shuffle = false;
  config.training.spike_window = 4;
  // The second step's four sequences have no targets.
  const int64_t step_tokens = config.training.global_batch_size * kSequence;
  std::string marks(static_cast<size_t>(40 * kSequence), '\1');
  std::fill_n(marks.begin() + step_tokens, step_tokens + 1, '\0');
  std::ofstream(path + "/train.npy.mask", std::ios::binary) << marks;
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize();
  std::vector<size_t> recent;
  std::vector<int64_t> targets;
  for (int i = 0; i < 3; ++i) {
    targets.push_back(run.step()->num_targets);
    recent.push_back(run.snapshot().state.at("recent_steps").size());
  }
  CHECK((targets[0] > 0 && targets[1] == 0 && targets[2] > 0));
  CHECK(recent == std::vector<size_t>{1, 1, 2});
}

namespace {

// A run of `before` goes on to the bit as one of `after` that is restored from its checkpoint.
void check_same_after_restore(const Config& before, const Config& after, Device& device,
                              const TemporaryFolder& folder) {
  static int num_saved = 0;
  TrainingRun run(before, device, alone()), restored(after, device, alone());
  run.initialize();
  for (int i = 0; i < 3; ++i) run.step();
  restored.restore(saved(run, folder / fmt::format("run{}", num_saved++), [](auto&) {}));
  for (int i = 0; i < 4; ++i) {
    const StepReport a = *run.step(), b = *restored.step();
    CHECK((a.step == b.step && a.loss == b.loss && a.grad_norm == b.grad_norm && b.applied));
  }
  const CheckpointContents a = run.snapshot(), b = restored.snapshot();
  CHECK(
      std::equal(a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
                 [](const HostTensor& x, const HostTensor& y) { return x.name == y.name && x.bytes == y.bytes; }));
}

}  // namespace

TEST_CASE("a restored run takes the same steps wherever kept activations wait", "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "coat", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.model.num_layers = 5;
    Config offloaded = plain;
    offloaded.precision.offload_blocks = 3;
    for (const auto& [before, after] : {std::pair(plain, offloaded), std::pair(offloaded, plain)}) {
      CAPTURE(recipe, before.precision.offload_blocks);
      check_same_after_restore(before, after, *device, folder);
    }
  }
}

TEST_CASE("a restored run takes the same steps wherever weights lie", "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "bf16", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.model.num_layers = 4;
    Config offloaded = plain;
    offloaded.optimizer.offload = offloaded.precision.offload_weights = true;
    Config gathered = offloaded;
    gathered.distributed.gathered_blocks = 3;
    for (const auto& [before, after] : {std::pair(plain, offloaded), std::pair(offloaded, plain),
                                        std::pair(offloaded, offloaded), std::pair(offloaded, gathered)}) {
      CAPTURE(recipe, before.precision.offload_weights, after.precision.offload_weights,
              after.distributed.gathered_blocks);
      check_same_after_restore(before, after, *device, folder);
    }
  }
}

TEST_CASE("a restored run takes the same steps wherever masters and moments are",
          "[engine][training_run][offload]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "parka"}) {
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config plain = tiny_config(folder.path().string(), recipe);
    plain.telemetry.interval = 2;
    Config offloaded = plain;
    offloaded.optimizer.offload = true;
    for (const auto& [before, after] : {std::pair(plain, offloaded), std::pair(offloaded, plain)}) {
      CAPTURE(recipe, before.optimizer.offload);
      TrainingRun run(before, *device, alone()), restored(after, *device, alone());
      run.initialize();
      for (int i = 0; i < 3; ++i) run.step();
      const LoadedCheckpoint checkpoint =
          saved(run, folder / fmt::format("run{}", before.optimizer.offload), [](auto&) {});
      CHECK(restored.restore(checkpoint).size() == 1);  // the key itself
      for (int i = 0; i < 4; ++i) {
        const StepReport a = *run.step(), b = *restored.step();
        CHECK((a.step == b.step && a.loss == b.loss && a.grad_norm == b.grad_norm && b.applied));
        REQUIRE(a.telemetry.has_value() == b.telemetry.has_value());
        if (a.telemetry) {
          CHECK(telemetry_records(*a.telemetry, a.step, run.model().parameters()) ==
                telemetry_records(*b.telemetry, b.step, run.model().parameters()));
        }
      }
      const CheckpointContents a = run.snapshot(), b = restored.snapshot();
      CHECK(std::equal(
          a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
          [](const HostTensor& x, const HostTensor& y) { return x.name == y.name && x.bytes == y.bytes; }));
    }
  }
}

TEST_CASE("the plan of a run has less of what offloaded blocks keep, and of nothing more",
          "[engine][training_run][offload]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "fp8_block", "coat", "parka"}) {
    for (const DeviceKind kind : {DeviceKind::kCpu, DeviceKind::kCuda}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        for (const EvalNumerics eval : {EvalNumerics::kSame, EvalNumerics::kBf16}) {
          CAPTURE(recipe, kind == DeviceKind::kCuda, name_of(recompute), name_of(eval));
          Config config = tiny_config(folder.path().string(), recipe);
          config.model.num_layers = 8;
          config.precision.recompute = recompute;
          if (config.precision.compute == DType::kBF16) config.precision.eval = eval;
          const DeclaredRun plain(config, kind);
          for (const int64_t blocks : {1, 6}) {
            CAPTURE(blocks);
            config.precision.offload_blocks = blocks;
            const DeclaredRun offloaded(config, kind);
            check_offloaded(offloaded.plan, plain.plan, blocks);
            CHECK(offloaded.plan.total_bytes() < plain.plan.total_bytes());
          }
        }
      }
    }
  }
}

TEST_CASE("training lowers the loss on data that it sees again", "[engine][training_run][slow]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "fp8_block", "coat", "parka"}) {
    CAPTURE(recipe);
    TrainingRun run(tiny_config(folder.path().string(), recipe), *device, alone());
    run.initialize();
    double first = run.step()->loss, last = 0;
    for (int i = 0; i < 60; ++i) last = run.step()->loss;
    CHECK(first > 4.0);  // ln 64 = 4.16
    CHECK(last < 3.5);
  }
}

TEST_CASE("targets are the next tokens and end with the sequence", "[engine]") {
  CHECK(next_token_targets({1, 2, 3, 4, 5, 6}, 3) ==
        std::vector<int32_t>{2, 3, kIgnoreTarget, 5, 6, kIgnoreTarget});
  CHECK(next_token_targets({7}, 1) == std::vector<int32_t>{kIgnoreTarget});
}

TEST_CASE("FLOP per token follow the documented formula", "[engine]") {
  ModelConfig olmo_1b;  // the defaults
  const ParameterTable table = make_parameter_table(olmo_1b, false);
  CHECK(flop_per_token(olmo_1b, table, 2048) == 6.0 * 1'176'764'416 + 6.0 * 16 * 2048 * 2048);
}

TEST_CASE("FLOP of images are counted by what of them is trained", "[engine][vision]") {
  const Config llava = load_config(PARKA_SOURCE_DIR "/configs/llava-1.5-7b-bench.json", {});
  Config text = llava;
  text.model.vision = {};
  const ParameterTable of_text = make_parameter_table(text.model, false);
  const auto of_image = [&](const std::vector<std::string>& frozen) {
    const ParameterTable table = make_parameter_table(llava.model, false, {.frozen = frozen});
    CHECK(flop_per_token(llava.model, table, 1088) == flop_per_token(text.model, of_text, 1088));
    return 1088 * (flop_per_token(llava.model, table, 1088, 1) - flop_per_token(llava.model, table, 1088));
  };
  // Rows times elements of weights; the patch embedding has 592 columns, and 23 of 24 blocks run.
  const double patch = 576.0 * 1024 * 592, blocks = 577.0 * 23 * 12 * 1024 * 1024;
  const double fc1 = 576.0 * 1024 * 4096, fc2 = 576.0 * 4096 * 4096, attention = 2.0 * 577 * 577 * 1024 * 23;
  const double frozen_tower = 2 * (patch + blocks + attention + 2 * fc1 + 3 * fc2);
  CHECK(std::abs(of_image({"vision.*"}) / frozen_tower - 1) < 1e-9);
  const double all = 2 * (2 * patch + 3 * (blocks + attention + fc1 + fc2));
  CHECK(std::abs(of_image({}) / all - 1) < 1e-9);
}

TEST_CASE("numbers in progress lines are readable", "[engine][progress]") {
  CHECK(format_count(999) == "999");
  CHECK(format_count(1234) == "1.23k");
  CHECK(format_count(999'600) == "1M");
  CHECK(format_count(4.2e9) == "4.2B");
  CHECK(format_duration(59.4) == "59s");
  CHECK(format_duration(61) == "1m01s");
  CHECK(format_duration(3600 * 47 + 60) == "47h01m");
  CHECK(format_duration(86400 * 3) == "3d00h");
}

TEST_CASE("progress lines count the steps since the previous line, and the time left by the clock on the wall",
          "[engine][progress]") {
  double now = 1000;
  Progress progress(100, 1000, {.flop_per_token = 1e9, .peak_flops = 2e12}, 2, [&] { return now; });
  StepReport report;
  report.loss = 2.5;
  for (int64_t step = 1; step <= 10; ++step) {
    report.step = step;
    report.seconds = 0.5;
    progress.add(report, 0.625);
  }
  now += 8;  // 5 of them in steps
  const std::string line = progress.take_line();
  CHECK(line.find("step  10/100") != std::string::npos);
  CHECK(line.find("tokens 10k") != std::string::npos);
  CHECK(line.find("loss 2.5000") != std::string::npos);
  CHECK(line.find("2k tok/s  2 TFLOP/s  MFU 50.0%") != std::string::npos);
  CHECK(line.find("goodput 62.5%  ETA 1m12s") != std::string::npos);
}

namespace {

// Bytes of weights that a plan has in a place.
int64_t weight_bytes(const MemoryPlan& plan, MemoryPlace place) {
  int64_t bytes = 0;
  for (const MemoryPlan::Entry& entry : plan.entries()) {
    if (entry.category == "weights" && entry.place == place) bytes += entry.bytes;
  }
  return bytes;
}

bool declares(const MemoryPlan& plan, const std::string& category) {
  return std::any_of(plan.entries().begin(), plan.entries().end(),
                     [&](const MemoryPlan::Entry& entry) { return entry.category == category; });
}

}  // namespace

TEST_CASE("linear weights are planned in host memory, with buffers on the device where GEMMs or ranks read them",
          "[engine][training_run][offload]") {
  struct Case {
    const char* recipe;
    WeightCopies copies;
    int64_t stage;
    bool has_buffers;
  };
  for (const Case& c : {Case{"bf16", WeightCopies::kAuto, 0, true}, Case{"parka", WeightCopies::kNone, 0, true},
                        Case{"parka", WeightCopies::kRows, 0, false}, Case{"parka", WeightCopies::kBoth, 2, true},
                        Case{"bf16", WeightCopies::kAuto, 3, true}, Case{"parka", WeightCopies::kRows, 3, true}}) {
    CAPTURE(c.recipe, name_of(c.copies), c.stage);
    const TemporaryFolder folder;
    Config config = tiny_config(folder.path().string(), c.recipe);
    config.distributed.zero_stage = c.stage;
    config.model.num_layers = 6;
    config.precision.weight_copies = c.copies;
    config.optimizer.offload = true;
    const auto declared = [](const Config& of) {
      return std::make_unique<DeclaredRun>(of, DeviceKind::kCpu, zero_of(of, 0, 2));
    };
    const auto plain = declared(config);
    config.precision.offload_weights = true;
    const auto offloaded = declared(config);
    const int64_t all = weight_bytes(plain->plan, MemoryPlace::kDevice);
    const int64_t in_host = weight_bytes(offloaded->plan, MemoryPlace::kHost);
    CHECK(weight_bytes(plain->plan, MemoryPlace::kHost) == 0);
    CHECK(in_host > all / 2);
    CHECK(weight_bytes(offloaded->plan, MemoryPlace::kDevice) == all - in_host);
    CHECK(offloaded->plan.total_bytes() < plain->plan.total_bytes());
    CHECK(declares(offloaded->plan, "gathered weights") == c.has_buffers);
  }
}
