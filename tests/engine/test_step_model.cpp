#include "engine/planning/step_model.h"

#include <algorithm>

#include "core/shard.h"
#include "engine/config/config_io.h"
#include "engine/planning/stream_timeline.h"
#include "engine/training/training_run.h"
#include "model/parameter_table.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

namespace {

using Kind = StepAction::Kind;

constexpr int64_t kSequence = 16;

Config config_for(const std::string& folder, const std::string& recipe, int64_t stage, bool tied,
                  int64_t micro_batches, int64_t ranks) {
  write_file(folder + "/train.npy", std::string(100 * kSequence * 2, '\1'));
  return parse_config({{"model",
                        {{"vocab_size", 272},
                         {"d_model", 48},
                         {"num_layers", 4},
                         {"num_heads", 3},
                         {"d_ffn", 80},
                         {"norm", tied ? "layernorm" : "rmsnorm"},
                         {"tie_embeddings", tied}}},
                       {"precision", {{"recipe", recipe}}},
                       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", kSequence}}},
                       {"training", {{"global_batch_size", micro_batches * ranks}, {"micro_batch_size", 1}}},
                       {"distributed", {{"zero_stage", stage}}}},
                      "test");
}

// Passes everything on and writes down what a rank has queued.
class RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(Communicator& real) : real_(real) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  std::string description() const override { return real_.description(); }
  void all_reduce(Device& device, const TensorView& x, Reduction reduction, Peers peers) override {
    actions_.push_back({.kind = Kind::kAllReduce, .bytes = x.bytes(), .peers = peers});
    real_.all_reduce(device, x, reduction, peers);
  }
  void reduce_scatter(Device& device, const TensorView& in, const TensorView& out, Peers peers,
                      Accumulation accumulation) override {
    actions_.push_back({.kind = Kind::kReduceScatter, .bytes = in.bytes(), .peers = peers});
    real_.reduce_scatter(device, in, out, peers, accumulation);
  }
  void all_gather(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    actions_.push_back({.kind = Kind::kAllGather, .bytes = out.bytes(), .peers = peers});
    real_.all_gather(device, in, out, peers);
  }
  void all_gather_columns(Device& device, const TensorView& in, const TensorView& out, Peers peers) override {
    actions_.push_back({.kind = Kind::kAllGather, .bytes = out.bytes(), .peers = peers});
    real_.all_gather_columns(device, in, out, peers);
  }
  uint64_t last_queued() const override { return real_.last_queued(); }
  void wait(Device& device, uint64_t number) override {
    if (number > before_) actions_.push_back({.kind = Kind::kWait, .number = number - before_});
    real_.wait(device, number);
  }
  std::vector<std::string> gather_text(const std::string& text) override { return real_.gather_text(text); }
  double max(double value) override { return real_.max(value); }
  void barrier() override { real_.barrier(); }

  void start() {
    actions_.clear();
    before_ = real_.last_queued();
  }
  const std::vector<StepAction>& actions() const { return actions_; }

 private:
  void divided() override { real_.divide(size_of(Peers::kGroup)); }

  Communicator& real_;
  std::vector<StepAction> actions_;
  uint64_t before_ = 0;
};

std::vector<StepAction> queued_by_a_run(const Config& config, int ranks) {
  std::vector<StepAction> actions;
  ThreadRanks(ranks).run([&](Communicator& real) {
    RecordingCommunicator communicator(real);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    communicator.start();
    REQUIRE(run.step());
    if (communicator.rank() == 0) actions = communicator.actions();
  });
  return actions;
}

std::vector<StepAction> without_compute(std::vector<StepAction> actions) {
  actions.erase(std::remove_if(actions.begin(), actions.end(),
                               [](const StepAction& action) { return action.kind == Kind::kCompute; }),
                actions.end());
  return actions;
}

// A second of work everywhere, and nothing for what is counted from bandwidth.
constexpr ComputeSeconds kSeconds = {.embedding_forward = 1,
                                     .block_forward = 1,
                                     .head = 1,
                                     .block_backward = 1,
                                     .embedding_backward = 1,
                                     .clear_gradients = 1,
                                     .gradient_norm = 1,
                                     .update = 1,
                                     .quantize_weights = 1,
                                     .copy_bandwidth = 1e30};

// A byte a second and no latency: a collective of n GPUs takes (n - 1) / n of its bytes in seconds.
constexpr Links kByteASecond = {.link_bandwidth = 1, .memory_bandwidth = 8};

}  // namespace

TEST_CASE("work with no collective beside it takes its own time", "[engine][step model]") {
  StreamTimeline timeline;
  timeline.compute(2);
  timeline.wait(0);
  timeline.compute(0.5);
  CHECK(timeline.now() == 2.5);
  CHECK(timeline.slowed_seconds() == 0);
  CHECK(timeline.exposed_seconds() == 0);
  CHECK(timeline.communication_seconds() == 0);
}

TEST_CASE("a collective is hidden behind the work that follows it, and slows it", "[engine][step model]") {
  StreamTimeline timeline;
  timeline.compute(2);
  timeline.collective(1, 0.25);
  timeline.compute(3);  // 0.75 seconds' worth of it in the first
  timeline.wait(1);
  CHECK(timeline.now() == 5.25);
  CHECK(timeline.slowed_seconds() == 0.25);
  CHECK(timeline.exposed_seconds() == 0);
  CHECK(timeline.communication_seconds() == 1);
}

TEST_CASE("what waits for a collective is exposed to it", "[engine][step model]") {
  StreamTimeline timeline;
  timeline.compute(1);
  timeline.collective(4, 0.5);
  timeline.compute(1);  // two seconds beside the collective
  CHECK(timeline.now() == 3);
  timeline.wait(1);
  CHECK(timeline.now() == 5);
  CHECK(timeline.slowed_seconds() == 1);
  CHECK(timeline.exposed_seconds() == 2);
  timeline.collective(1, 0);
  timeline.wait(2);
  CHECK(timeline.now() == 6);
  CHECK(timeline.exposed_seconds() == 3);
}

TEST_CASE("collectives run one after the other", "[engine][step model]") {
  StreamTimeline timeline;
  timeline.collective(1, 0);
  timeline.collective(2, 0.5);  // from 1 to 3
  timeline.compute(1.5);
  CHECK(timeline.now() == 2);
  timeline.collective(1, 0);  // from 3 to 4
  timeline.wait(1);
  CHECK(timeline.now() == 2);
  timeline.wait(3);
  CHECK(timeline.now() == 4);
  timeline.collective(1, 0.5);  // from 4: the work before it is done by then
  timeline.compute(0.25);
  CHECK(timeline.now() == 4.5);
  CHECK_THROWS(timeline.wait(5));
  CHECK_THROWS(timeline.collective(1, 1));
}

TEST_CASE("a collective takes latency and its bytes over the slowest links", "[engine][step model]") {
  Links links = {.link_bandwidth = 300,
                 .network_bandwidth = 50,
                 .start_latency = 100,
                 .link_latency = 10,
                 .network_latency = 1};
  CHECK(collective_seconds(links, 4, Kind::kAllGather, 400) == Approx(100 + 3 * 10 + 300 / 300.0));
  CHECK(collective_seconds(links, 4, Kind::kReduceScatter, 400) == Approx(100 + 3 * 10 + 300 / 300.0));
  CHECK(collective_seconds(links, 4, Kind::kAllReduce, 400) == Approx(100 + 2 * 3 * 10 + 600 / 300.0));
  links.nodes = 4;  // of four GPUs each: 200 bytes a second leave a node
  CHECK(collective_seconds(links, 16, Kind::kAllGather, 1600) == Approx(100 + 12 * 10 + 3 * 1 + 1500 / 200.0));
  CHECK(collective_seconds(links, 16, Kind::kAllReduce, 1600) == Approx(100 + 2 * (3 * 10 + 2 * 1) + 3000 / 200.0));
  CHECK(collective_seconds(links, 32, Kind::kAllGather, 3200) == Approx(100 + 28 * 10 + 3 * 1 + 3100 / 300.0));
  CHECK(collective_seconds(links, 4, Kind::kAllGather, 400) == Approx(100 + 3 * 1 + 300 / 50.0));
}

TEST_CASE("bytes cost the work beside them the same however long they take", "[engine][step model]") {
  const std::vector<StepAction> actions = {{.kind = Kind::kAllGather, .bytes = 200},
                                           {.kind = Kind::kCompute, .seconds = 1000},
                                           {.kind = Kind::kWait, .number = 1}};
  Links links = kByteASecond;
  links.interference = 1;
  for (const double latency : {0.0, 300.0}) {
    links.start_latency = latency;
    const StepPrediction step = predict_step(actions, links, 2);
    CHECK(step.slowed_seconds == Approx(50));  // 200 bytes read and 200 written
    CHECK(step.seconds == Approx(1050));
    CHECK(step.communication_seconds == Approx(100 + latency));
    CHECK(step.communicated_bytes == 100);
    CHECK(step.hidden_fraction() == 1);
  }
}

TEST_CASE("what communication reads and writes in memory is what it costs, up to nearly all",
          "[engine][step model]") {
  const auto slowed = [](Kind kind, double interference) {
    Links links = kByteASecond;
    links.interference = interference;
    const std::vector<StepAction> actions = {{.kind = kind, .bytes = 400},
                                             {.kind = Kind::kCompute, .seconds = 1e5}};
    return predict_step(actions, links, 4).slowed_seconds;
  };
  // Of 4 GPUs each reads its 100 bytes for all and writes 400; reads 300 for others and writes 300; does both.
  CHECK(slowed(Kind::kAllGather, 1) == Approx(800 / 8.0));
  CHECK(slowed(Kind::kReduceScatter, 1) == Approx(600 / 8.0));
  CHECK(slowed(Kind::kAllReduce, 1) == Approx(1200 / 8.0));
  CHECK(slowed(Kind::kAllGather, 1e6) == Approx(0.9 * 300));
}

TEST_CASE("the schedule of a step is what ranks queue, to the byte", "[engine][step model][slow]") {
  for (const char* recipe : {"fp32", "bf16", "coat", "fp8_block"}) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      for (const int ranks : {2, 3}) {
        const bool tied = ranks == 3;
        CAPTURE(recipe, stage, ranks);
        const TemporaryFolder folder;
        const Config config = config_for(folder.path().string(), recipe, stage, tied, 2, ranks);
        const std::vector<StepAction> queued = queued_by_a_run(config, ranks);
        REQUIRE(!queued.empty());
        CHECK((without_compute(schedule_step(config, ranks, kSeconds)) == queued));
      }
      const TemporaryFolder folder;
      Config config = config_for(folder.path().string(), recipe, stage, false, 2, 4);
      config.distributed.shard_size = 2;
      CAPTURE(recipe, stage, "two groups of two");
      CHECK((without_compute(schedule_step(config, 4, kSeconds)) == queued_by_a_run(config, 4)));
    }
  }
}

TEST_CASE("masks and documents add nothing to what ranks queue", "[engine][step model]") {
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    const TemporaryFolder folder;
    Config config = config_for(folder.path().string(), "coat", stage, false, 2, 4);
    std::string marks(100 * kSequence, '\0');
    for (size_t i = 0; i < marks.size(); i += 7) marks[i] = i % 2 == 0 ? '\3' : '\1';
    write_file(config.data.train[0] + ".mask", marks);
    config.data.loss_mask = true;
    config.data.documents = DocumentMode::kSeparate;
    config.distributed.shard_size = stage == 0 ? 0 : 2;
    CHECK((without_compute(schedule_step(config, 4, kSeconds)) == queued_by_a_run(config, 4)));
  }
}

TEST_CASE("groups of GPUs exchange within nodes, and pieces between them", "[engine][step model]") {
  Links links = {.link_bandwidth = 300, .network_bandwidth = 50, .memory_bandwidth = 1};
  links.nodes = 2;  // of four GPUs each
  const auto seconds = [&](Kind kind, Peers peers, int64_t bytes, int64_t shard_size) {
    const std::vector<StepAction> actions = {{.kind = kind, .bytes = bytes, .peers = peers},
                                             {.kind = Kind::kWait, .number = 1}};
    return predict_step(actions, links, 8, shard_size).seconds;
  };
  CHECK(seconds(Kind::kAllGather, Peers::kGroup, 400, 4) == Approx(300 / 300.0));
  CHECK(seconds(Kind::kAllGather, Peers::kAll, 800, 4) == Approx(700 / 200.0));
  CHECK(seconds(Kind::kAllReduce, Peers::kAcross, 100, 4) == Approx(100 / 50.0));   // one GPU of each node
  CHECK(seconds(Kind::kAllReduce, Peers::kAcross, 100, 2) == Approx(150 / 100.0));  // two of each
  CHECK(seconds(Kind::kAllGather, Peers::kGroup, 800, 8) == Approx(700 / 200.0));
  CHECK(seconds(Kind::kAllGather, Peers::kGroup, 800, 1) == 0);
  // A group of 12 in nodes of 8 has the second half of a node: 4 GPUs' way out at least.
  links.nodes = 3;
  const std::vector<StepAction> gather = {{.kind = Kind::kAllGather, .bytes = 1200, .peers = Peers::kGroup},
                                          {.kind = Kind::kWait, .number = 1}};
  CHECK(predict_step(gather, links, 24, 12).seconds == Approx(1100 / 300.0));
  links.network_bandwidth = 10;
  CHECK(predict_step(gather, links, 24, 12).seconds == Approx(1100 / 60.0));
  CHECK(predict_step(gather, links, 36, 12).seconds == Approx(1100 / 300.0));  // one node of twelve
}

TEST_CASE("one GPU only computes", "[engine][step model]") {
  const TemporaryFolder folder;
  const Config config = config_for(folder.path().string(), "bf16", 3, false, 3, 1);
  const std::vector<StepAction> actions = schedule_step(config, 1, kSeconds);
  CHECK(without_compute(actions).empty());
  const StepPrediction step = predict_step(actions, kByteASecond, 1);
  CHECK(step.seconds == Approx(3 * (3 + 2 * 4) + 4));
  CHECK(step.seconds == step.compute_seconds);
  CHECK(step.hidden_fraction() == 1);
}

TEST_CASE("gradients are cleared where they are written anew, and pieces of them are summed in every micro-batch",
          "[engine][step model]") {
  constexpr int64_t kRanks = 4, kMicroBatches = 3;
  const TemporaryFolder folder;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const bool tied : {false, true}) {
      CAPTURE(stage, tied);
      const Config config = config_for(folder.path().string(), "bf16", stage, tied, kMicroBatches, kRanks);
      // Pieces of 4 ranks are read and one is written; but for the first time what there is of it is read, too.
      int64_t summed = 0;  // bytes
      for (const ParameterInfo& p : make_parameter_table(config.model, false).all) {
        summed += (kMicroBatches * (kRanks + 2) - 1) * 4 * Shard{0, kRanks}.piece(p.numel());
      }
      const ComputeSeconds compute = {.clear_gradients = 1e9, .copy_bandwidth = 1};
      const StepPrediction step = predict_step(schedule_step(config, kRanks, compute), kByteASecond, kRanks);
      const double expected = stage >= 2 ? kMicroBatches * 1e9 + static_cast<double>(summed) : 1e9;
      CHECK(step.compute_seconds == Approx(expected));
    }
  }
}

TEST_CASE("each ZeRO stage waits for what nothing hides", "[engine][step model]") {
  constexpr int64_t kRanks = 4, kMicroBatches = 3;
  const TemporaryFolder folder;
  Config config = config_for(folder.path().string(), "bf16", 0, false, kMicroBatches, kRanks);
  const ParameterTable table = make_parameter_table(config.model, false);
  const Shard shard = {0, kRanks};
  // Seconds of gathering, or reducing and scattering, a unit in bf16 or, twice as many bytes, in fp32.
  const auto seconds = [&](int unit, int64_t size) {
    int64_t bytes = 0;
    for (int index : table.unit(unit)) bytes += size * shard.padded(table.all[static_cast<size_t>(index)].numel());
    return 0.75 * static_cast<double>(bytes);
  };
  const auto whole = [&](int unit) {  // as it is reduced by stage 0: without padding
    int64_t numel = 0;
    for (int index : table.unit(unit)) numel += table.all[static_cast<size_t>(index)].numel();
    return 1.5 * 4 * static_cast<double>(numel);
  };
  double all_weights = 0;
  for (int unit = 0; unit < table.num_units(); ++unit) all_weights += seconds(unit, 2);
  const double norm = 1.5 * 4 * static_cast<double>(table.all.size() + 1) + 1.5 * 4;  // and the loss
  const double ends = seconds(0, 2) + seconds(table.head_unit(), 2);
  const double expected[] = {
      // Gradients that come last, of the first block and the embedding, and one number.
      whole(1) + whole(0) + 1.5 * 4,
      seconds(1, 4) + seconds(0, 4) + norm + all_weights,
      seconds(1, 4) + seconds(0, 4) + norm + all_weights,
      // The first block is gathered while the embedding works, for no time here, and left where it is by backward.
      seconds(1, 2) + seconds(1, 4) + seconds(0, 4) + norm + ends,
  };

  ComputeSeconds compute = kSeconds;
  compute.embedding_forward = compute.embedding_backward = compute.clear_gradients = 0;
  compute.head = compute.block_forward = compute.block_backward = 1e6;  // hides all the rest
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    config.distributed.zero_stage = stage;
    const StepPrediction step = predict_step(schedule_step(config, kRanks, compute), kByteASecond, kRanks);
    CHECK(step.exposed_seconds == Approx(expected[stage]));
    CHECK(step.slowed_seconds == 0);
    CHECK(step.seconds == Approx(step.compute_seconds + step.exposed_seconds));
    // With next to no work nearly everything is exposed.
    const ComputeSeconds none = {.copy_bandwidth = 1e30};
    const StepPrediction exposed = predict_step(schedule_step(config, kRanks, none), kByteASecond, kRanks);
    CHECK(exposed.seconds == Approx(exposed.communication_seconds));
    CHECK(exposed.hidden_fraction() == Approx(0).margin(1e-12));
    // Whatever hides what, the parts add up.
    Links links = kByteASecond;
    links.interference = 0.5;
    compute.block_forward = compute.block_backward = 20e3;
    const StepPrediction mixed = predict_step(schedule_step(config, kRanks, compute), links, kRanks);
    CHECK(mixed.slowed_seconds > 0);
    CHECK(mixed.seconds == Approx(mixed.compute_seconds + mixed.slowed_seconds + mixed.exposed_seconds));
    compute.block_forward = compute.block_backward = 1e6;
  }
}
