#include "engine/step/bound_run.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/training/training_run.h"
#include "tests/engine/run_bytes.h"
#include "tests/engine/step_config.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/refusal.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

// Runs that update each unit in backward, against runs that update all of them behind it.
namespace {

constexpr int kSteps = 4;

// One micro-batch of one sequence a step on each rank, without clipping.
Config config_for(const TemporaryFolder& folder, const std::string& recipe, int64_t stage, bool is_llama,
                  int64_t ranks) {
  Config config = step_config(folder.path().string(), recipe, stage, is_llama, 1, ranks);
  write_tokens(config.data.train[0], 100 * kStepSequence);
  config.optimizer.lr = 3e-3;
  config.optimizer.clip_norm = 0;
  config.optimizer.schedule.kind = ScheduleKind::kConstant;
  config.checkpoint.folder = folder.path().string() + "/run";
  return config;
}

Config released(Config config) {
  config.optimizer.release_gradients = true;
  return config;
}

// Sets the memory that gradients have on this rank to NaN in any format.
void spoil_gradients(const TrainingRun& run) {
  for (size_t i = 0; i < run.optimizer().parameters().size(); ++i) {
    const auto& [whole, own] = run.optimizer().gradient_pieces(i);
    for (const TensorView& t : {whole, own}) std::memset(t.data, 0xff, static_cast<size_t>(t.bytes()));
  }
}

using Outcome = RankOutcome;

Outcome train(const Config& config, int ranks) { return train_ranks(config, ranks, kSteps, spoil_gradients); }

void check_same(const Outcome& one, const Outcome& other) {
  CHECK(one.losses == other.losses);
  CHECK(one.held_out == other.held_out);
  CHECK((one.tensors == other.tensors));
  REQUIRE(one.norms.size() == other.norms.size());
  for (size_t i = 0; i < one.norms.size(); ++i)
    CHECK(std::abs(one.norms[i] - other.norms[i]) <= 1e-6 * one.norms[i]);
}

// A CPU that puts infinity into a gradient when backward has computed it, the n-th in its memory.
class InfiniteGradient final : public ForwardingDevice {
 public:
  void arm(const TensorView& gradient, int n) {
    timer_ = std::make_unique<Timer>(gradient, n);
    op_timer_ = timer_.get();
  }
  void disarm() { op_timer_ = nullptr; }

 private:
  // An op has written the gradient where its memory has changed.
  class Timer final : public OpTimer {
   public:
    Timer(const TensorView& gradient, int n) : gradient_(gradient), to_come_(n) {}
    void begin(std::string_view op, OpCost) override {
      is_product_ = op == "gemm";
      if (is_product_) before_ = bytes();
    }
    void end() override {
      if (is_product_ && bytes() != before_ && --to_come_ == 0) gradient_.as<float>()[0] = INFINITY;
    }

   private:
    std::vector<std::byte> bytes() const {
      const auto* const data = static_cast<const std::byte*>(gradient_.data);
      return {data, data + gradient_.bytes()};
    }

    TensorView gradient_;
    int to_come_;
    bool is_product_ = false;
    std::vector<std::byte> before_;
  };
  std::unique_ptr<Timer> timer_;
};

LoadedCheckpoint saved(const CheckpointContents& contents, const std::string& folder) {
  save_checkpoint(folder, contents, {});
  return load_checkpoint(list_checkpoints(folder).back().path);
}

}  // namespace

TEST_CASE("released gradients change no bit where nothing is clipped", "[engine][release]") {
  for (const char* recipe : {"fp32", "bf16", "parka"}) {
    for (const bool is_llama : {false, true}) {
      const TemporaryFolder folder;
      const Config config = config_for(folder, recipe, 0, is_llama, 1);
      CAPTURE(recipe, is_llama);
      check_same(train(released(config), 1), train(config, 1));
    }
  }
}

TEST_CASE("released gradients change no bit at any ZeRO stage", "[engine][release][zero][slow]") {
  // Both models in turn: each meets every recipe at every stage, and every division over ranks at every stage.
  bool is_llama = false;
  for (const char* recipe : {"fp32", "bf16", "fp8_block", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (const auto& [ranks, shard_size] : {std::pair<int, int64_t>{2, 0}, {4, 0}, {4, 2}}) {
        if (stage == 0 && shard_size != 0) continue;
        is_llama = !is_llama;
        CAPTURE(recipe, stage, ranks, shard_size, is_llama);
        const TemporaryFolder folder;
        Config config = config_for(folder, recipe, stage, is_llama, ranks);
        config.distributed.shard_size = shard_size;
        check_same(train(released(config), ranks), train(config, ranks));
      }
    }
  }
}

TEST_CASE("released gradients change no bit whatever copies and activations are kept",
          "[engine][release][zero][slow]") {
  for (const WeightCopies copies : {WeightCopies::kBoth, WeightCopies::kRows, WeightCopies::kNone}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 1}, {2, 3}}) {
        CAPTURE(name_of(copies), name_of(recompute), ranks, stage);
        const TemporaryFolder folder;
        Config config = config_for(folder, "parka", stage, true, ranks);
        config.model.num_layers = 5;
        config.precision.weight_copies = copies;
        config.precision.recompute = recompute;
        config.precision.offload_blocks = 3;
        config.optimizer.gradient = DType::kBF16;
        config.telemetry.interval = stage == 3 ? 0 : 2;
        check_same(train(released(config), ranks), train(config, ranks));
      }
    }
  }
}

TEST_CASE("updates in backward of states in host memory change no bit", "[engine][release][offload]") {
  for (const auto& [recipe, master] : {std::pair{"parka", MasterForm::kFp32}, {"parka", MasterForm::kFp24Split}}) {
    for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {4, 2}, {2, 3}}) {
      CAPTURE(recipe, name_of(master), ranks, stage);
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, stage, true, ranks);
      config.optimizer.master = master;
      const Outcome plain = train(config, ranks);
      config.optimizer.offload = true;
      check_same(train(released(config), ranks), plain);
    }
  }
}

TEST_CASE("updates in backward of weights in host memory change no bit", "[engine][release][offload]") {
  for (const auto& [recipe, copies] : {std::pair{"bf16", WeightCopies::kAuto},
                                       {"parka", WeightCopies::kNone},
                                       {"parka", WeightCopies::kRows},
                                       {"parka", WeightCopies::kBoth}}) {
    for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {4, 2}, {2, 3}}) {
      CAPTURE(recipe, name_of(copies), ranks, stage);
      const TemporaryFolder folder;
      Config config = config_for(folder, recipe, stage, true, ranks);
      config.model.num_layers = 4;
      config.precision.weight_copies = copies;
      const Outcome plain = train(config, ranks);
      config.optimizer.offload = true;
      config.precision.offload_weights = true;
      check_same(train(released(config), ranks), plain);
    }
  }
}

TEST_CASE("checks for corruption change no bit of released gradients, and watch them", "[engine][release]") {
  for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {2, 3}}) {
    CAPTURE(ranks, stage);
    const TemporaryFolder folder;
    Config config = released(config_for(folder, "parka", stage, true, ranks));
    config.reliability = {.replay_interval = 0, .state_interval = 0};
    const Outcome plain = train(config, ranks);
    config.reliability = {.replay_interval = 1, .state_interval = 1};
    check_same(train(config, ranks), plain);
  }
}

TEST_CASE("the step before clips released gradients, in a resumed run too", "[engine][release]") {
  for (const char* recipe : {"fp32", "coat"}) {
    CAPTURE(recipe);
    const TemporaryFolder folder;
    const auto device = make_cpu_device();
    Config config = released(config_for(folder, recipe, 0, true, 1));
    config.optimizer.clip_norm = 0.1;  // far below the norms
    TrainingRun run(config, *device, alone());
    run.initialize();
    for (int i = 0; i < 3; ++i) CHECK(run.step()->grad_norm > 0.2);
    CheckpointContents contents = run.snapshot();
    TrainingRun restored(config, *device, alone()), unclipped(config, *device, alone());
    restored.restore(saved(contents, folder.path().string() + "/run"));
    contents.state.erase("last_norm");  // as of a run that did not release them
    unclipped.restore(saved(contents, folder.path().string() + "/other"));
    for (int i = 0; i < 3; ++i) {
      const StepReport a = *run.step(), b = *restored.step();
      CHECK((a.loss == b.loss && a.grad_norm == b.grad_norm && a.applied && b.applied));
      unclipped.step();
      CHECK((tensors_of(restored) == tensors_of(run)));
    }
    CHECK((tensors_of(unclipped) != tensors_of(run)));
  }
}

TEST_CASE("a gradient that is not finite reaches neither its unit nor those after it", "[engine][release]") {
  const TemporaryFolder folder;
  for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {2, 3}}) {
    CAPTURE(ranks, stage);
    const Config config = released(config_for(folder, "fp32", stage, true, ranks));
    std::atomic<int> num_wrong = 0, num_updated = 0;
    ThreadRanks(ranks).run([&](Communicator& communicator) {
      InfiniteGradient device;
      TrainingRun run(config, device, communicator);
      run.initialize();
      run.step();
      const ParameterTable& table = run.model().parameters();
      const auto bad = static_cast<size_t>(table.index_of("blocks.2.down"));
      const TensorBytes before = tensors_of(run);
      // On one rank all blocks use the same memory, on two every other one.
      if (communicator.rank() == 0) {
        device.arm(run.optimizer().gradients()[bad], communicator.size() == 1 ? 2 : 1);
      }
      const StepReport report = *run.step();
      device.disarm();
      const TensorBytes after = tensors_of(run);
      num_wrong += report.applied || std::isfinite(report.grad_norm) || !std::isfinite(report.loss);
      num_wrong += report.culprit != "blocks.2.down";
      for (const NamedTensor& tensor : run.tensors()) {
        const bool is_updated = table.all[tensor.parameter].unit > table.all[bad].unit;
        if (tensor.view.numel() == 0) continue;
        const bool has_changed = before.at(tensor.name) != after.at(tensor.name);
        num_wrong += has_changed != is_updated;
        num_updated += has_changed;
      }
    });
    CHECK(num_wrong == 0);
    CHECK(num_updated > 0);
  }
}

TEST_CASE("a loss that is not finite changes no unit of released gradients", "[engine][release]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  TrainingRun run(released(config_for(folder, "bf16", 0, true, 1)), *device, alone());
  run.initialize();
  run.step();
  const TensorView norm = run.model().weights().plain(run.model().parameters().final_norm);
  norm.as<BFloat16>()[0] = encode_bf16(INFINITY);
  const TensorBytes before = tensors_of(run);
  const StepReport report = *run.step();
  CHECK((!report.applied && !std::isfinite(report.loss)));
  CHECK((tensors_of(run) == before));
}

TEST_CASE("released gradients take the buffers of two units, or on one rank of one, in place of the memory of all",
          "[engine][release]") {
  const TemporaryFolder folder;
  for (const bool is_llama : {false, true}) {
    for (const auto& [ranks, stage] : {std::pair<int, int64_t>{1, 0}, {2, 0}, {2, 1}, {2, 2}, {2, 3}}) {
      CAPTURE(is_llama, ranks, stage);
      const Config config = config_for(folder, "bf16", stage, is_llama, ranks);
      const Zero zero = zero_of(config, 0, ranks);
      const auto gradients_of = [&](const Config& c) {
        int64_t bytes = 0;
        const DeclaredRun run(c, DeviceKind::kCpu, zero);
        for (const auto& total : run.plan.summary()) {
          if (total.category == kGradientCategory || total.category == "gradient buckets") bytes += total.bytes;
        }
        return bytes;
      };
      // Of the units in each buffer the largest: a block, with a tied embedding of its own or beside one.
      std::vector<int64_t> sizes(kGradientBuffers), units(static_cast<size_t>(config.model.num_layers) + 2);
      for (const ParameterInfo& p : make_parameter_table(config.model, false).all) {
        int64_t& unit = units[static_cast<size_t>(p.unit)];
        unit += zero.shard().padded(p.numel());
        const bool is_tied = p.role == ParameterRole::kTiedEmbedding;
        int64_t& size = sizes[static_cast<size_t>(is_tied ? 2 : p.unit % ranks)];
        size = std::max(size, unit);
      }
      int64_t bytes = 0;
      for (const int64_t size : sizes) bytes += ceil_div(4 * size, MemoryPlan::kAlignment) * MemoryPlan::kAlignment;
      CHECK(gradients_of(released(config)) == bytes);
      CHECK(gradients_of(config) > bytes);
    }
  }
}

TEST_CASE("steps of several micro-batches cannot release gradients", "[engine][release]") {
  const TemporaryFolder folder;
  Config config = released(config_for(folder, "fp32", 0, true, 4));
  CHECK(refusal([&] { zero_of(config, 0, 4); }).empty());
  const std::string wanted =
      "optimizer.release_gradients = true needs steps of one micro-batch, and training.micro_batch_size = 1 is not "
      "global_batch_size / ranks = 4 / 2; change one of them, or set release_gradients = false";
  CHECK(refusal([&] { zero_of(config, 0, 2); }) == wanted);
  CHECK(refusal([&] { zero_of(config, 0, 3); }).find("4 / 3") != std::string::npos);
  const auto device = make_cpu_device();
  CHECK(refusal([&] { TrainingRun(config, *device, alone()); }).find("4 / 1") != std::string::npos);
  config.optimizer.release_gradients = false;
  CHECK(refusal([&] { zero_of(config, 0, 2); }).empty());
}
