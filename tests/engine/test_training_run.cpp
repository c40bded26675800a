#include "engine/training/training_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/heartbeat.h"
#include "engine/evaluation/evaluation.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "tests/engine/training_run_fixture.h"
#include "tests/support/alone.h"
#include "tests/support/forwarding_device.h"

using namespace parka;
using namespace parka::test;

namespace {

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

// The CPU, whose copies for a save are made as late as the order allows.
class DeviceWithLateStaging final : public ForwardingDevice {
 public:
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t) override { return std::make_unique<LateStaging>(); }

 private:
  class LateStaging final : public StagingBuffer {
   public:
    const std::string& failure() override { return failure_; }
    void begin(const std::vector<TensorView>& tensors) override {
      tensors_ = tensors;
      copies_.clear();
      order_after(0);  // hashes, which no update waits for
    }
    void order_after(size_t index) override {
      while (copies_.size() <= index) {
        const TensorView& tensor = tensors_.at(copies_.size());
        const auto* bytes = static_cast<const std::byte*>(tensor.data);
        copies_.emplace_back(bytes, bytes + tensor.bytes());
      }
    }
    std::span<const std::byte> wait(size_t index) override {
      order_after(index);
      return copies_[index];
    }

   private:
    std::string failure_;
    std::vector<TensorView> tensors_;
    std::vector<std::vector<std::byte>> copies_;
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
    std::vector<uint8_t> value;                    // of element 0, little-endian
  } cases[] = {{"embedding", {0x80, 0x7f}},        // infinity
               {"blocks.1.down.exp_avg", {0x7f}},  // NaN code
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
  const uint64_t heartbeats = last_heartbeat().count;
  TrainingRun run(config, *device, alone());
  CHECK((last_heartbeat().count > heartbeats) == config.data.checksum);
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
  change_byte(0);
  std::filesystem::resize_file(path, 32 * 999);
  CHECK(message().find("\"train.npy\" has 31968 bytes, had 32000") != std::string::npos);
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
  // On a busy machine the data may be there before this thread asks for it; then another run is tried.
  constexpr double kWait = 0.5e-3;
  bool has_waited = false;
  for (int attempt = 0; attempt < 20 && !has_waited; ++attempt) {
    TrainingRun run(config, *device, alone());
    const auto begin = std::chrono::steady_clock::now();
    CHECK(run.data_failure() == nullptr);
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    run.initialize();
    const StepReport first = *run.step();
    has_waited = waited > kWait && first.data_wait_seconds > 0;
    if (!has_waited) continue;
    CHECK(first.data_wait_seconds > 0.5 * waited);
    CHECK(run.step()->data_wait_seconds < 0.5 * first.data_wait_seconds);  // each wait is told once
  }
  CHECK(has_waited);
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
  for (const std::string& file : config.data.train) std::filesystem::remove(file + ".mask");
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

TEST_CASE("what a save copies beside the next step is what the step before has left", "[engine][training_run]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path().string(), "parka");
  config.model.moe = {.num_experts = 4,
                      .experts_per_token = 2,
                      .score = RouterScore::kSigmoid,
                      .normalize_weights = true,
                      .correction_bias = true};
  config.training.router_bias_rate = 0.01;
  config.optimizer.frozen = {"*.experts.*"};  // no update behind the biases waits for their copies
  DeviceWithLateStaging device;
  TrainingRun run(config, device, alone());
  run.initialize();
  run.prepare_staging();
  run.step();
  CheckpointContents copied = run.snapshot();
  const CheckpointContents staged = run.snapshot(TrainingRun::SnapshotForm::kStaged);
  run.step();
  bool moved = false;
  CheckpointContents after = run.snapshot();
  for (const HostTensor& tensor : staged.tensors) {
    std::vector<std::byte> bytes;
    CAPTURE(tensor.name);
    CHECK_NOTHROW(tensor.source->read([&](auto part) { bytes.insert(bytes.end(), part.begin(), part.end()); }));
    CHECK(bytes == tensor_named(copied, tensor.name).bytes);
    moved = moved || (tensor.name.ends_with("router_bias") && bytes != tensor_named(after, tensor.name).bytes);
  }
  CHECK(moved);
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
  config.training.spike_window = 2;  // a spike every few steps
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

TEST_CASE("a run whose recipe has got a key since is told of it", "[engine][training_run]") {
  const TemporaryFolder folder;
  const Config config = tiny_config(folder.path().string(), "parka");
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone()), restored(config, *device, alone());
  run.initialize();
  run.step();
  const std::vector<std::string> differences =
      restored.restore(saved(run, folder / "run", [](CheckpointContents& contents) {
        contents.state["config"]["precision"].erase("head");
      }));
  CHECK(differences == std::vector<std::string>{R"(precision.head: "compute" in the checkpoint, "fp8" now)"});
}

TEST_CASE("a finite step ends the count of skipped ones that a run was restored with", "[engine][training_run]") {
  const TemporaryFolder folder;
  const Config config = tiny_config(folder.path().string(), "bf16");
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone()), restored(config, *device, alone());
  run.initialize();
  for (int i = 0; i < 4; ++i) run.step();
  CHECK(!run.snapshot().state.contains("skipped_in_a_row"));
  restored.restore(saved(run, folder / "run", [](CheckpointContents& contents) {
    contents.state["applied_steps"] = 2;
    contents.state["skipped_in_a_row"] = 2;
  }));
  CHECK(restored.skipped_in_a_row() == 2);
  CHECK(restored.snapshot().state.at("skipped_in_a_row") == 2);
  restored.step();
  CHECK(restored.skipped_in_a_row() == 0);
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
