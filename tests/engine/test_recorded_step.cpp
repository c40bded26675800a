#include "engine/step/recorded_step.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <sys/resource.h>

#include "core/memory/unit_buffers.h"
#include "engine/step/bound_run.h"
#include "engine/step/declared_run.h"
#include "engine/training/training_run.h"
#include "kernels/device/recording_device.h"
#include "kernels/op/workspace.h"
#include "tests/engine/step_config.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

namespace {

std::string line_of(StepSection section, const std::string& op, const OpCost& cost) {
  return fmt::format("{}: {} of {}, {} bytes, {} flop", name_of(section), op, cost.shape, cost.bytes, cost.flop);
}

std::string line_of(const RecordedCollective& collective) {
  return fmt::format("collective {} of {} bytes, peers {}", static_cast<int>(collective.kind), collective.bytes,
                     static_cast<int>(collective.peers));
}

std::string line_of(const RecordedWait& wait) { return fmt::format("wait, {} newer", wait.newer); }

std::vector<std::string> lines_of(const RecordedStep& step) {
  std::vector<std::string> lines;
  for (const RecordedStep::Part& part : step.parts) {
    for (int64_t i = 0; i < part.times; ++i) {
      for (const RecordedStep::Work& work : part.work) {
        if (const auto* op = std::get_if<RecordedOp>(&work))
          lines.push_back(line_of(op->section, op->op, op->cost));
        if (const auto* collective = std::get_if<RecordedCollective>(&work)) lines.push_back(line_of(*collective));
        if (const auto* wait = std::get_if<RecordedWait>(&work)) lines.push_back(line_of(*wait));
      }
    }
  }
  return lines;
}

constexpr const char* kLine = "a line";  // as the op timer has what TimedCommunicator writes down

// Passes everything on, and puts it in its place among the ops that the device's timer has.
class TimedCommunicator final : public Communicator {
 public:
  explicit TimedCommunicator(Communicator& real)
      : real_(real),
        recording_(real.rank(), real.size(),
                   {.collective =
                        [this](RecordedCollective collective) {
                          ++queued_;
                          write(line_of(collective));
                        },
                    .wait =
                        [this](RecordedWait wait) {
                          if (wait.newer < queued_) write(line_of(wait));  // others are of the step before
                        }}) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  std::string description() const override { return real_.description(); }
  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override {
    device_ = &device;
    recording_.all_reduce(device, x, reduction, peers);
    real_.all_reduce(device, x, reduction, peers);
  }
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override {
    device_ = &device;
    recording_.reduce_scatter(device, in, out, peers, accumulation);
    real_.reduce_scatter(device, in, out, peers, accumulation);
  }
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    device_ = &device;
    recording_.all_gather(device, in, out, peers);
    real_.all_gather(device, in, out, peers);
  }
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    device_ = &device;
    recording_.all_gather_columns(device, in, out, peers);
    real_.all_gather_columns(device, in, out, peers);
  }
  void all_to_all(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    device_ = &device;
    recording_.all_to_all(device, in, out, peers);
    real_.all_to_all(device, in, out, peers);
  }
  uint64_t last_queued() const override { return real_.last_queued(); }
  void wait(Device& device, uint64_t number) override {
    device_ = &device;
    recording_.wait(device, number);
    real_.wait(device, number);
  }
  std::vector<std::string> gather_text(const std::string& text) override { return real_.gather_text(text); }

  void start() { queued_ = 0; }

 private:
  void divided() override {
    real_.divide(mesh());
    recording_.divide(mesh());
  }
  void write(const std::string& line) const {
    OpTimer* const timer = device_->op_timer();
    if (timer == nullptr) return;
    timer->begin(kLine, {.shape = line});
    timer->end();
  }

  Communicator& real_;
  Device* device_ = nullptr;
  uint64_t queued_ = 0;
  RecordingCommunicator recording_;
};

// What rank 0 of a real run has queued in its second step.
std::vector<std::string> lines_of_a_run(const Config& config, int ranks) {
  std::vector<std::string> lines;
  ThreadRanks(ranks).run([&](Communicator& real) {
    TimedCommunicator communicator(real);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    PARKA_REQUIRE(run.step());  // Catch2's own are not for several threads
    communicator.start();
    device->start_op_timer();
    PARKA_REQUIRE(run.step());
    const std::vector<OpTime> times = device->stop_op_timer();
    if (communicator.rank() != 0) return;
    for (const OpTime& time : times) {
      if (time.op == kWaitOp && communicator.size() > 1) continue;  // beside the line of its collective
      lines.push_back(time.op == kLine ? time.cost.shape : line_of(time.section, time.op, time.cost));
    }
  });
  return lines;
}

void check_recording(const Config& config, int ranks) {
  const std::vector<std::string> queued = lines_of_a_run(config, ranks),
                                 recorded = lines_of(record_step(config, ranks));
  REQUIRE(queued.size() > 100);
  const auto [real, told] = std::mismatch(queued.begin(), queued.end(), recorded.begin(), recorded.end());
  CAPTURE(queued.size(), recorded.size(), real == queued.end() ? "the end" : *real,
          told == recorded.end() ? "the end" : *told);
  CHECK((real == queued.end() && told == recorded.end()));
}

int64_t most_workspace(const RecordedStep& step) {
  int64_t most = 0;
  for (const RecordedStep::Part& part : step.parts) {
    for (const RecordedStep::Work& work : part.work) {
      if (const auto* op = std::get_if<RecordedOp>(&work)) most = std::max(most, op->workspace_bytes);
    }
  }
  return most;
}

}  // namespace

TEST_CASE("a recorded step has the ops that a step of training times, one by one", "[engine][recorded step]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "fp8_block", "coat", "parka"}) {
    for (const bool is_llama : {false, true}) {
      for (const int64_t micro_batches : {1, 2, 5}) {
        CAPTURE(recipe, is_llama, micro_batches);
        check_recording(step_config(folder.path().string(), recipe, 0, is_llama, micro_batches, 1), 1);
      }
      Config config = step_config(folder.path().string(), recipe, 0, is_llama, 3, 1);
      config.precision.recompute = Recompute::kBlock;
      if (config.precision.gemm != GemmPrecision::kCompute) config.precision.weight_copies = WeightCopies::kNone;
      config.training.logits_chunk_tokens = 5;
      CAPTURE(recipe, is_llama, "block recompute, no copies of weights, logits in chunks");
      check_recording(config, 1);
    }
    for (const NormPlacement placement : {NormPlacement::kAfter, NormPlacement::kBoth}) {
      Config config = step_config(folder.path().string(), recipe, 0, true, 2, 1);
      config.model.norm_placement = placement;
      config.model.qkv_bias = placement == NormPlacement::kBoth;
      CAPTURE(recipe, name_of(placement));
      check_recording(config, 1);
    }
  }
}

TEST_CASE("a recorded step has the ops, collectives and waits of ranks in their order",
          "[engine][recorded step][slow]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "fp8_block"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (const int ranks : {2, 3}) {
        CAPTURE(recipe, stage, ranks);
        const TemporaryFolder folder;
        check_recording(step_config(folder.path().string(), recipe, stage, ranks == 2, 4, ranks), ranks);
      }
      const TemporaryFolder folder;
      Config config = step_config(folder.path().string(), recipe, stage, true, 2, 4);
      config.distributed.shard_size = 2;
      if (config.precision.gemm != GemmPrecision::kCompute) config.precision.weight_copies = WeightCopies::kBoth;
      CAPTURE(recipe, stage, "two groups of two");
      check_recording(config, 4);
    }
  }
}

TEST_CASE("blocks in gather buffers are gathered again neither in backward nor in the next micro-batch",
          "[engine][recorded step]") {
  constexpr int64_t kMicroBatches = 4, kBlocks = 6;
  for (const WeightCopies copies : {WeightCopies::kRows, WeightCopies::kBoth}) {
    CAPTURE(name_of(copies));
    const TemporaryFolder folder;
    Config config = step_config(folder.path().string(), "parka", 3, true, kMicroBatches, 2);
    config.model.num_layers = kBlocks;
    config.precision.weight_copies = copies;
    check_recording(config, 2);
    int64_t num_gathers = 0;
    for (const RecordedStep::Part& part : record_step(config, 2).parts) {
      for (const RecordedStep::Work& work : part.work) {
        const auto* collective = std::get_if<RecordedCollective>(&work);
        if (collective != nullptr && collective->kind == RecordedCollective::Kind::kAllGather) {
          num_gathers += part.times;
        }
      }
    }
    // Forward of the first micro-batch gathers all blocks, each later pass those that are not in place.
    // Transposed codes are gathered over those of forward, and take their place.
    const int64_t others = kBlocks - kGatherBuffers, passes = 2 * kMicroBatches;
    const int64_t of_blocks = copies == WeightCopies::kRows ? kBlocks + (passes - 1) * others : passes * kBlocks;
    const ParameterTable table = make_parameter_table(config.model, false);
    const auto units = [&](int unit) { return static_cast<int64_t>(table.unit(unit).size()); };
    CHECK(num_gathers == of_blocks * units(1) + units(0) + units(table.head_unit()));
  }
}

TEST_CASE("backward that runs a block again leaves out the last product, which only later blocks read",
          "[engine][recorded step]") {
  for (const bool experts : {false, true}) {
    const TemporaryFolder folder;
    Config config = step_config(folder.path().string(), "bf16", 0, true, 2, 1);
    config.precision.recompute = Recompute::kBlock;
    if (experts) {
      config.model.moe.num_experts = 4;
      config.model.moe.experts_per_token = 2;
    }
    double forward = 0, backward = 0, down = 0;  // FLOP of products
    for (const RecordedStep::Part& part : record_step(config, 1).parts) {
      for (const RecordedStep::Work& work : part.work) {
        const auto* op = std::get_if<RecordedOp>(&work);
        if (op == nullptr || op->cost.products != Products::kGemm) continue;
        const double flop = static_cast<double>(part.times) * op->cost.flop;
        if (op->section == StepSection::kBlockBackward) backward += flop;
        if (op->section != StepSection::kBlockForward) continue;
        forward += flop;
        const bool is_down = op->cost.shape.find(experts ? " x 48 x 80 " : "16 x 48 x 80 ") != std::string::npos;
        if (is_down) down += flop;
      }
    }
    CAPTURE(experts, forward, backward, down);
    CHECK(down > 0);
    // Gradients of input and weight take as much as forward, each.
    CHECK(backward == 3 * forward - down);
  }
}

TEST_CASE("updates in backward are recorded as ranks queue them", "[engine][recorded step][release]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (const auto& [ranks, stage, shard_size] :
         {std::tuple<int, int64_t, int64_t>{1, 0, 0}, {2, 0, 0}, {2, 1, 0}, {3, 2, 0}, {2, 3, 0}, {4, 3, 2}}) {
      CAPTURE(recipe, ranks, stage, shard_size);
      const TemporaryFolder folder;
      Config config = step_config(folder.path().string(), recipe, stage, ranks == 2, 1, ranks);
      config.optimizer.release_gradients = true;
      config.distributed.shard_size = shard_size;
      check_recording(config, ranks);
      const Zero zero = zero_of(config, 0, ranks);
      const DeclaredRun declared(config, DeviceKind::kCuda, zero);
      CHECK(declared.plan[declared.workspace].bytes >= most_workspace(record_step(config, ranks)));
    }
  }
}

TEST_CASE("updates of states in host memory are recorded as they are queued, with their copies",
          "[engine][recorded step][offload]") {
  using Kind = RecordedTransfer::Kind;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = step_config(folder.path().string(), "parka", stage, true, 2, 2);
    config.optimizer.offload = true;
    check_recording(config, 2);
    // Of parts of parameters, which are updated one after another: wait, save, and a load into the buffer that it
    // frees. Three loads are ahead.
    std::vector<RecordedTransfer> transfers;
    for (const RecordedStep::Part& part : record_step(config, 2).parts) {
      for (const RecordedStep::Work& work : part.work) {
        if (const auto* transfer = std::get_if<RecordedTransfer>(&work)) transfers.push_back(*transfer);
      }
    }
    const auto num_parts = static_cast<size_t>(
        std::count_if(transfers.begin(), transfers.end(), [](const auto& t) { return t.kind == Kind::kSave; }));
    REQUIRE(num_parts > 3);
    std::vector<std::pair<Kind, size_t>> expected = {{Kind::kFollowDevice, 0}};
    for (size_t part = 0; part < 3; ++part) expected.emplace_back(Kind::kLoad, part);
    for (size_t part = 0; part < num_parts; ++part) {
      expected.emplace_back(Kind::kWaitLoaded, part % 3);
      expected.emplace_back(Kind::kSave, 0);
      if (part + 3 < num_parts) expected.emplace_back(Kind::kLoad, part % 3);
    }
    expected.emplace_back(Kind::kWaitSaved, 0);
    std::vector<std::pair<Kind, size_t>> recorded;
    for (const RecordedTransfer& transfer : transfers) recorded.emplace_back(transfer.kind, transfer.slot);
    CHECK((recorded == expected));
  }
}

TEST_CASE("steps with weights in host memory are recorded as ranks queue them",
          "[engine][recorded step][offload]") {
  for (const char* recipe : {"bf16", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      CAPTURE(recipe, stage);
      const TemporaryFolder folder;
      Config config = step_config(folder.path().string(), recipe, stage, true, 3, 2);
      config.optimizer.offload = config.precision.offload_weights = true;
      check_recording(config, 2);
    }
  }
}

TEST_CASE("masks and documents are recorded as ranks queue them", "[engine][recorded step]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = step_config(folder.path().string(), "coat", stage, true, 2, 4);
    std::string marks(100 * kStepSequence, '\0');
    for (size_t i = 0; i < marks.size(); i += 7) marks[i] = i % 2 == 0 ? '\3' : '\1';
    write_file(config.data.train[0] + ".mask", marks);
    config.data.loss_mask = true;
    config.data.documents = DocumentMode::kSeparate;
    config.distributed.shard_size = stage == 0 ? 0 : 2;
    check_recording(config, 4);
  }
}

TEST_CASE("ranks that share sequences are recorded as they queue their exchanges",
          "[engine][recorded step][context]") {
  for (const char* recipe : {"fp32", "coat", "parka"}) {
    for (const auto& [ranks, stage, shard_size, releases] :
         {std::tuple<int, int64_t, int64_t, bool>{2, 0, 0, false},
          {2, 3, 0, false},
          {4, 1, 0, false},
          {4, 2, 2, false},
          {4, 3, 0, true},
          {2, 0, 0, true}}) {
      CAPTURE(recipe, ranks, stage, shard_size, releases);
      const TemporaryFolder folder;
      Config config = step_config(folder.path().string(), recipe, stage, true, releases ? 1 : 3, ranks / 2);
      config.model.num_heads = 4;
      config.model.num_kv_heads = 2;
      config.model.given_head_dim = 16;
      config.model.sliding_window = stage == 1 ? 6 : 0;
      config.model.qk_norm = stage == 2 ? QkNormKind::kPerHead : QkNormKind::kNone;
      config.data.sequence_length = 2 * kStepSequence;
      config.distributed.shard_size = shard_size;
      config.distributed.context_parallel = 2;
      config.optimizer.release_gradients = releases;
      validate(config);
      check_recording(config, ranks);
      const DeclaredRun declared(config, DeviceKind::kCuda, zero_of(config, 0, ranks));
      CHECK(declared.plan[declared.workspace].bytes >= most_workspace(record_step(config, ranks)));
    }
  }
}

TEST_CASE("ranks that divide experts are recorded as they queue their exchanges", "[engine][recorded step][moe]") {
  for (const char* recipe : {"fp32", "parka"}) {
    for (const auto& [ranks, stage, places, releases] : {std::tuple<int, int64_t, int64_t, bool>{1, 0, 1, false},
                                                         {2, 0, 2, false},
                                                         {2, 3, 2, false},
                                                         {4, 1, 2, false},
                                                         {4, 2, 4, false},
                                                         {4, 1, 2, true}}) {
      CAPTURE(recipe, ranks, stage, places, releases);
      const TemporaryFolder folder;
      Config config = step_config(folder.path().string(), recipe, stage, true, releases ? 1 : 3, ranks);
      config.model.moe = {.num_experts = 8, .experts_per_token = 3};
      if (stage < 3) config.model.moe.shared_width = 32;
      config.training.balance_loss = 0.01;
      config.distributed.expert_parallel = places;
      config.optimizer.release_gradients = releases;
      validate(config);
      check_recording(config, ranks);
      const DeclaredRun declared(config, DeviceKind::kCuda, zero_of(config, 0, ranks));
      CHECK(declared.plan[declared.workspace].bytes >= most_workspace(record_step(config, ranks)));
    }
  }
}

TEST_CASE("images are recorded as ranks queue them", "[engine][recorded step][vision]") {
  for (const auto& [recipe, tower] : {std::pair{"bf16", Storage::kCompute},
                                      {"parka", Storage::kCompute},
                                      {"parka", Storage::kFp8},
                                      {"fp8_block", Storage::kFp8}}) {
    for (const auto& [ranks, stage] : {std::tuple<int, int64_t>{1, 0}, {2, 0}, {2, 2}, {2, 3}}) {
      for (const bool is_frozen : {false, true}) {
        for (const bool releases : {false, true}) {
          CAPTURE(recipe, name_of(tower), ranks, stage, is_frozen, releases);
          const TemporaryFolder folder;
          Config config = step_config(folder.path().string(), recipe, stage, ranks == 2, releases ? 1 : 2, ranks);
          config.model.vision.tower = {.kind = TowerKind::kClip,
                                       .width = 32,
                                       .num_layers = 3,
                                       .num_heads = 2,
                                       .d_ffn = 48,
                                       .image_size = 12,
                                       .patch_size = 4};
          config.model.vision.image_token = 5;
          config.precision.tower = tower;
          config.data.images_per_sequence = 2;
          config.optimizer.release_gradients = releases;
          if (is_frozen) config.optimizer.frozen = {"vision.*"};
          validate(config);
          check_recording(config, ranks);
          const DeclaredRun declared(config, DeviceKind::kCuda, zero_of(config, 0, ranks));
          CHECK(declared.plan[declared.workspace].bytes >= most_workspace(record_step(config, ranks)));
        }
      }
    }
  }
}

TEST_CASE("windows are recorded as they are queued, without the pairs that they leave out",
          "[engine][recorded step]") {
  for (const bool documents : {false, true}) {
    CAPTURE(documents);
    const TemporaryFolder folder;
    Config config = step_config(folder.path().string(), "coat", 0, true, 2, 1);
    config.model.sliding_window = 6;
    config.model.full_attention_every = 4;
    config.model.local_rope_theta = 100;
    config.data.documents = documents ? DocumentMode::kSeparate : DocumentMode::kJoined;
    if (documents) {
      std::string tokens(100 * kStepSequence * 2, '\1');
      for (size_t i = 0; i < tokens.size(); i += 20) tokens[i] = 2, tokens[i + 1] = 0;  // every tenth token is 2
      write_file(config.data.train[0], tokens);
      config.data.document_end = 2;
    }
    check_recording(config, 1);
    double flop = 0;
    const RecordedStep step = record_step(config, 1);
    for (const RecordedStep::Part& part : step.parts) {
      for (const RecordedStep::Work& work : part.work) {
        const auto* op = std::get_if<RecordedOp>(&work);
        if (op == nullptr || op->cost.products != Products::kAttentionForward) continue;
        flop += op->cost.flop * static_cast<double>(part.times);
      }
    }
    const double tokens = 2 * kStepSequence, full = kStepSequence / 2.0, windowed = 6 - 36 / (2.0 * kStepSequence);
    CHECK(flop == 2 * 2 * 48 * tokens * (full + 3 * windowed));
  }
}

TEST_CASE("the products of a recorded step are three of every weight matrix, and seven of attention",
          "[engine][recorded step]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"bf16", "parka"}) {
    const Config config = step_config(folder.path().string(), recipe, 0, true, 4, 1);
    std::map<Products, double> flop;
    const RecordedStep step = record_step(config, 1);
    for (const RecordedStep::Part& part : step.parts) {
      for (const RecordedStep::Work& work : part.work) {
        const auto* op = std::get_if<RecordedOp>(&work);
        if (op != nullptr) flop[op->cost.products] += op->cost.flop * static_cast<double>(part.times);
      }
    }
    double elements = 0;
    for (const ParameterInfo& p : make_parameter_table(config.model, false).all) {
      const bool multiplies = p.role != ParameterRole::kNorm && p.role != ParameterRole::kEmbedding;
      elements += multiplies ? static_cast<double>(p.numel()) : 0.0;
    }
    const double tokens = 4 * kStepSequence, causal = 0.5;
    CHECK(flop[Products::kNone] == 0);
    CHECK(flop[Products::kGemm] == 3 * 2 * elements * tokens);
    CHECK(flop[Products::kAttentionForward] == causal * 2 * 2 * 4 * 48 * kStepSequence * tokens);
    CHECK(flop[Products::kAttentionBackward] == 2.5 * flop[Products::kAttentionForward]);
  }
}

TEST_CASE("the plan of a run on a GPU has the workspace that its ops take, and no op gets less",
          "[engine][recorded step]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"fp32", "bf16", "fp8_linear", "fp8_block", "coat", "parka"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      CAPTURE(recipe, stage);
      Config config = step_config(folder.path().string(), recipe, stage, true, 2, 2);
      config.telemetry.interval = stage == 3 ? 0 : 1;  // which looks at whole weights
      const Zero zero = zero_of(config, 1, 2);
      DeclaredRun declared(config, DeviceKind::kCuda, zero);
      const int64_t planned = declared.plan[declared.workspace].bytes;
      CHECK(planned == most_workspace(record_step(config, 2)));
      CHECK(planned == record_workspace_bytes(config, zero));
      CHECK(planned >= cuda::kGemmWorkspaceBytes);
      CHECK((planned > cuda::kGemmWorkspaceBytes) == (config.precision.gemm == GemmPrecision::kFp8Block));
      CHECK(!DeclaredRun(config, DeviceKind::kCpu, zero).workspace.valid());
    }
  }
}

TEST_CASE("an op that takes more workspace than there is is refused by name", "[engine][recorded step]") {
  const TemporaryFolder folder;
  const Config config = step_config(folder.path().string(), "fp8_block", 0, true, 1, 1);
  const int64_t taken = record_workspace_bytes(config, {});
  const std::vector<int32_t> ids(kStepSequence);
  const auto queue_step = [&](int64_t workspace) {
    return refusal(
        [&] {
          RecordingDevice device(DeviceKind::kCuda);
          RecordingCommunicator communicator(0, 1);
          const Zero zero;
          DeclaredRun declared(config, DeviceKind::kCuda, zero, workspace);
          const Arena arena(device, declared.plan);
          BoundRun bound(config, zero, declared, arena, device, communicator);
          const BoundRun::MicroBatch how = bound.begin_micro_batch({true, true});
          declared.model.accumulate_gradients(device, {ids.data(), ids.data(), {1, kStepSequence}},
                                              bound.loss_options(1), declared.optimizer.gradients(),
                                              how.accumulation, how.queueing);
        },
        ExitCode::kInternal);
  };
  CHECK(queue_step(taken).empty());
  const std::string message = queue_step(taken - 1);
  CHECK(message.find(fmt::format("gemm: needs {} bytes of workspace", taken)) != std::string::npos);
}

TEST_CASE("memory of a device that records is addresses, of any size", "[engine][recorded step]") {
  RecordingDevice device(DeviceKind::kCuda);
  void* const one = device.allocate(int64_t{1} << 55);
  void* const other = device.allocate(int64_t{1} << 55);
  CHECK(one != other);
  CHECK(reinterpret_cast<uintptr_t>(one) % 256 == 0);
  device.release(one);
  device.release(nullptr);
  CHECK_THROWS(device.allocate(int64_t{1} << 62));
  std::vector<char> host(3, 'x');
  device.copy_to_host(host.data(), other, 3);
  CHECK(host == std::vector<char>(3, '\0'));
  CHECK(static_cast<const char*>(device.copy_to_host_later(other, 3)->wait())[2] == '\0');
}

TEST_CASE("a model of 70 billion parameters is planned in a small memory and a short time",
          "[engine][recorded step]") {
  Config config = parse_config({{"model",
                                 {{"vocab_size", 128256},
                                  {"d_model", 8192},
                                  {"num_layers", 80},
                                  {"num_heads", 64},
                                  {"num_kv_heads", 8},
                                  {"d_ffn", 28672},
                                  {"norm", "rmsnorm"},
                                  {"tie_embeddings", false}}},
                                {"precision", {{"recipe", "parka"}}},
                                {"data", {{"train", {"none.npy"}}, {"sequence_length", 8192}}},
                                {"training", {{"global_batch_size", 512}, {"micro_batch_size", 1}}},
                                {"distributed", {{"zero_stage", 3}}}},
                               "test");
  const auto memory_kb = [] {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const auto cpu_seconds = [] { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; };
  const auto memory_before = memory_kb();
  const double start = cpu_seconds();
  const DeclaredRun declared(config, DeviceKind::kCuda, zero_of(config, 0, 64));
  const RecordedStep step = record_step(config, 64);
  CHECK(declared.plan.total_bytes() > int64_t{10} << 30);
  CHECK(declared.plan[declared.workspace].bytes == most_workspace(step));
  REQUIRE(step.parts.size() == 4);
  CHECK(step.parts[1].times == 512 / 64 - 2);
  CHECK(memory_kb() - memory_before < 200 << 10);
  CHECK(cpu_seconds() - start < 10);  // a sanitizer's too
}

namespace {

// What micro-batches of a run on one GPU copy from host memory.
class RecordedLoads {
 public:
  explicit RecordedLoads(const Config& config)
      : zero_(zero_of(config, 0, 1)),
        device_(DeviceKind::kCuda, {.op = [this](const RecordedOp&) { ++num_ops_; },
                                    .product = {},
                                    .fill = {},
                                    .transfer = [this](const RecordedTransfer& transfer) { add(transfer); }}),
        communicator_(0, 1),
        declared_(config, DeviceKind::kCuda, zero_, /*workspace_bytes=*/0),
        arena_(device_, declared_.plan),
        bound_(config, zero_, declared_, arena_, device_, communicator_) {}

  // The bytes of each copy of a micro-batch, in their order.
  std::vector<int64_t> of_micro_batch(const ParameterExchange::Place& place) {
    static constexpr int32_t kUnread = 0;
    loads_.clear();
    const BoundRun::MicroBatch how = bound_.begin_micro_batch(place);
    declared_.model.accumulate_gradients(device_, {&kUnread, &kUnread, {1, kStepSequence}}, bound_.loss_options(1),
                                         declared_.optimizer.gradients(), how.accumulation, how.queueing);
    return loads_;
  }
  // Loads that no op ran beside, before something waited for them.
  int num_exposed() const { return num_exposed_; }

 private:
  void add(const RecordedTransfer& transfer) {
    if (transfer.kind == RecordedTransfer::Kind::kLoad) {
      loads_.push_back(transfer.bytes);
      ops_at_load_[transfer.slot] = num_ops_;
    }
    if (transfer.kind == RecordedTransfer::Kind::kWaitLoaded) {
      num_exposed_ += ops_at_load_[transfer.slot] == num_ops_ ? 1 : 0;
    }
  }

  int64_t num_ops_ = 0;
  std::map<size_t, int64_t> ops_at_load_;
  std::vector<int64_t> loads_;
  int num_exposed_ = 0;
  Zero zero_;
  RecordingDevice device_;
  RecordingCommunicator communicator_;
  DeclaredRun declared_;
  Arena arena_;
  BoundRun bound_;
};

}  // namespace

TEST_CASE(
    "a block's weights come from host memory while the block before them is at work, and stay for the next pass",
    "[engine][recorded step][offload]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"fp32", "bf16", "fp8_block", "parka"}) {
    CAPTURE(recipe);
    Config config = step_config(folder.path().string(), recipe, 0, true, 2, 1);
    config.model.num_layers = 5;
    config.optimizer.offload = config.precision.offload_weights = true;
    config.precision.weight_copies = WeightCopies::kNone;
    RecordedLoads loads(config);
    const int64_t d = config.model.d_model, f = config.model.d_ffn;
    const int64_t block = config.model.d_qkv() * d + d * d + 3 * d * f;
    const int64_t bytes = block * size_of(config.precision.compute);
    // Backward begins with the blocks that forward has ended with, and the next forward with backward's last.
    const auto others = static_cast<size_t>(5 - kGatherBuffers);
    CHECK(loads.of_micro_batch({.is_first = true, .is_last = false}) == std::vector(5 + others, bytes));
    CHECK(loads.of_micro_batch({.is_first = false, .is_last = true}) == std::vector(2 * others, bytes));
    CHECK(loads.num_exposed() == 0);
  }
}

TEST_CASE("micro-batches copy no weights from host memory where FP8 copies are kept",
          "[engine][recorded step][offload]") {
  const TemporaryFolder folder;
  for (const WeightCopies copies : {WeightCopies::kBoth, WeightCopies::kRows}) {
    CAPTURE(name_of(copies));
    Config config = step_config(folder.path().string(), "parka", 0, true, 2, 1);
    config.optimizer.offload = config.precision.offload_weights = true;
    config.precision.weight_copies = copies;
    RecordedLoads loads(config);
    CHECK(loads.of_micro_batch({.is_first = true, .is_last = true}).empty());
  }
}

TEST_CASE("transposed codes that are gathered fit into the exchange buffer where adapters alone are trained",
          "[engine][lora][zero]") {
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "parka", 3, true, 2, 2);
  config.precision.weight_copies = WeightCopies::kBoth;
  config.finetune.method = FinetuneMethod::kLora;
  config.finetune.rank = 1;
  const Zero zero = zero_of(config, 0, 2);
  const DeclaredRun declared(config, DeviceKind::kCuda, zero);
  REQUIRE(declared.model.weights().has_pieces_for_backward(1));
  CHECK_FALSE(record_step(config, 2).parts.empty());  // the communicator refuses what does not fit
}
