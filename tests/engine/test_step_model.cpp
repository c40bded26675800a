#include "engine/planning/step_model.h"

#include <algorithm>
#include <variant>

#include "core/placement.h"
#include "engine/step/declared_run.h"
#include "model/parameter_table.h"
#include "tests/engine/step_config.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

using Kind = RecordedCollective::Kind;

// Work that takes no time but where bytes are written or added up, and that at once.
const WorkSeconds kNoTime = {[](const RecordedOp&) { return 0.0; }, 1e30};

// So many seconds for every op of the head and of the blocks.
WorkSeconds per_op(double head, double block) {
  return {[=](const RecordedOp& op) {
            switch (op.section) {
              case StepSection::kHead: return head;
              case StepSection::kBlockForward:
              case StepSection::kBlockBackward: return block;
              default: return 0.0;
            }
          },
          1e30};
}

// Work that takes as many seconds as it has FLOP.
const WorkSeconds kGiven = {[](const RecordedOp& op) { return op.cost.flop; }, 1e30};
RecordedOp work(double seconds) { return {.op = "", .cost = {.flop = seconds, .shape = ""}}; }
RecordedStep step_of(std::vector<RecordedStep::Work> all) { return {{{std::move(all)}}}; }

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

TEST_CASE("copies from and to host memory go on at once, each behind what it is ordered behind",
          "[engine][step model]") {
  StreamTimeline timeline;
  timeline.compute(1);
  timeline.follow_device();
  timeline.load(0, 2);  // from 1 to 3
  timeline.load(1, 2);  // to 5
  timeline.compute(0.5);
  timeline.wait_loaded(0);
  CHECK(timeline.now() == 3);
  timeline.compute(1);
  timeline.save(2);     // from 4 to 6
  timeline.load(0, 2);  // from 6 to 8
  timeline.wait_loaded(1);
  CHECK(timeline.now() == 5);
  timeline.compute(0.5);
  timeline.save(2);  // from 6 to 8
  timeline.wait_loaded(0);
  timeline.save(1);  // from 8 to 9
  timeline.compute(0.25);
  CHECK(timeline.now() == 8.25);
  timeline.wait_saved();
  timeline.wait_saved();
  CHECK(timeline.now() == 9);
  CHECK(timeline.host_exposed_seconds() == 1.5 + 1 + 2.5 + 0.75);
  CHECK(timeline.exposed_seconds() == 0);
  CHECK_THROWS(timeline.wait_loaded(2));
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
  CHECK(collective_seconds(links, 4, Kind::kAllToAll, 400) == Approx(100 + 10 + 300 / 300.0));
  links.nodes = 4;  // of four GPUs each: 200 bytes a second leave a node
  CHECK(collective_seconds(links, 16, Kind::kAllToAll, 1600) == Approx(100 + 10 + 1 + 300 / 300.0 + 1200 / 50.0));
  CHECK(collective_seconds(links, 16, Kind::kAllGather, 1600) == Approx(100 + 12 * 10 + 3 * 1 + 1500 / 200.0));
  CHECK(collective_seconds(links, 16, Kind::kAllReduce, 1600) == Approx(100 + 2 * (3 * 10 + 2 * 1) + 3000 / 200.0));
  CHECK(collective_seconds(links, 32, Kind::kAllGather, 3200) == Approx(100 + 28 * 10 + 3 * 1 + 3100 / 300.0));
  CHECK(collective_seconds(links, 4, Kind::kAllGather, 400) == Approx(100 + 3 * 1 + 300 / 50.0));
}

TEST_CASE("bytes cost the work beside them the same however long they take", "[engine][step model]") {
  const RecordedStep recorded =
      step_of({RecordedCollective{Kind::kAllGather, 200, Peers::kAll}, work(1000), RecordedWait{0}});
  Links links = kByteASecond;
  links.interference = 1;
  for (const double latency : {0.0, 300.0}) {
    links.start_latency = latency;
    const StepPrediction step = predict_step(recorded, kGiven, links, {0, 2});
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
    const RecordedStep step = step_of({RecordedCollective{kind, 400, Peers::kAll}, work(1e5)});
    return predict_step(step, kGiven, links, {0, 4}).slowed_seconds;
  };
  // Of 4 GPUs each reads its 100 bytes for all and writes 400; reads 300 for others and writes 300; does both.
  CHECK(slowed(Kind::kAllGather, 1) == Approx(800 / 8.0));
  CHECK(slowed(Kind::kReduceScatter, 1) == Approx(600 / 8.0));
  CHECK(slowed(Kind::kAllReduce, 1) == Approx(1200 / 8.0));
  CHECK(slowed(Kind::kAllToAll, 1) == Approx(600 / 8.0));
  CHECK(slowed(Kind::kAllGather, 1e6) == Approx(0.9 * 300));
}

TEST_CASE("groups of GPUs exchange within nodes, and pieces between them", "[engine][step model]") {
  Links links = {.link_bandwidth = 300, .network_bandwidth = 50, .memory_bandwidth = 1};
  links.nodes = 2;  // of four GPUs each
  const auto seconds = [&](Kind kind, Peers peers, int64_t bytes, int shard_size, int context_size = 1) {
    const RecordedStep step = step_of({RecordedCollective{kind, bytes, peers}, RecordedWait{0}});
    return predict_step(step, kGiven, links, {0, 8, shard_size, context_size}).seconds;
  };
  CHECK(seconds(Kind::kAllToAll, Peers::kContext, 200, 4, 2) == Approx(100 / 300.0));
  CHECK(seconds(Kind::kAllToAll, Peers::kContext, 800, 2, 8) == Approx(300 / 300.0 + 400 / 50.0));
  CHECK(seconds(Kind::kAllToAll, Peers::kContext, 800, 4) == 0);
  CHECK(seconds(Kind::kAllGather, Peers::kShard, 400, 4) == Approx(300 / 300.0));
  CHECK(seconds(Kind::kAllGather, Peers::kAll, 800, 4) == Approx(700 / 200.0));
  CHECK(seconds(Kind::kAllReduce, Peers::kReplicate, 100, 4) == Approx(100 / 50.0));   // one GPU of each node
  CHECK(seconds(Kind::kAllReduce, Peers::kReplicate, 100, 2) == Approx(150 / 100.0));  // two of each
  CHECK(seconds(Kind::kAllGather, Peers::kShard, 800, 8) == Approx(700 / 200.0));
  CHECK(seconds(Kind::kAllGather, Peers::kShard, 800, 1) == 0);
  // A group of 12 in nodes of 8 has the second half of a node: 4 GPUs' way out at least.
  links.nodes = 3;
  const RecordedStep gather = step_of({RecordedCollective{Kind::kAllGather, 1200, Peers::kShard}, RecordedWait{0}});
  CHECK(predict_step(gather, kGiven, links, {0, 24, 12, 1}).seconds == Approx(1100 / 300.0));
  links.network_bandwidth = 10;
  CHECK(predict_step(gather, kGiven, links, {0, 24, 12, 1}).seconds == Approx(1100 / 60.0));
  CHECK(predict_step(gather, kGiven, links, {0, 36, 12, 1}).seconds == Approx(1100 / 300.0));  // one node of twelve
}

TEST_CASE("one GPU only computes", "[engine][step model]") {
  const TemporaryFolder folder;
  const Config config = step_config(folder.path().string(), "bf16", 3, true, 3, 1);
  const RecordedStep recorded = record_step(config, 1);
  double ops = 0;
  for (const RecordedStep::Part& part : recorded.parts) {
    for (const RecordedStep::Work& work : part.work) ops += std::holds_alternative<RecordedOp>(work) ? 1 : 0;
  }
  const StepPrediction step =
      predict_step(recorded, {[](const RecordedOp&) { return 1.0; }, 1e30}, kByteASecond, {0, 1});
  CHECK(step.seconds == Approx(ops));
  CHECK(step.seconds == step.compute_seconds);
  CHECK(step.hidden_fraction() == 1);
}

TEST_CASE("states in host memory pass the link once in each direction, and the step waits for what nothing hides",
          "[engine][step model]") {
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "parka", 0, true, 1, 1);
  const auto predict = [&](double host_bandwidth) {
    Links links = kByteASecond;
    links.host_bandwidth = host_bandwidth;
    return predict_step(record_step(config, 1), per_op(0, 1), links, {0, 1});
  };
  const StepPrediction on_device = predict(1);
  CHECK(on_device.host_bytes_in == 0);
  CHECK(on_device.host_exposed_seconds == 0);
  config.optimizer.offload = true;
  double bytes = 0;  // without padding to MemoryPlan::kAlignment
  const DeclaredRun run(config, DeviceKind::kCpu);
  for (const MemoryPlan::Entry& entry : run.plan.entries()) {
    if (entry.place == MemoryPlace::kHost) bytes += static_cast<double>(entry.shape[0] * size_of(entry.dtype));
  }
  const StepPrediction slow = predict(1), fast = predict(2);
  CHECK(bytes > 0);
  CHECK(slow.host_bytes_in == bytes);
  CHECK(slow.host_bytes_out == bytes);
  CHECK(slow.compute_seconds == Approx(on_device.compute_seconds));
  CHECK(slow.seconds == Approx(slow.compute_seconds + slow.host_exposed_seconds));
  // Both directions at once, but for the first part and the last; no update takes time here.
  CHECK(slow.host_exposed_seconds >= bytes);
  CHECK(slow.host_exposed_seconds < 1.5 * bytes);
  CHECK(fast.host_exposed_seconds == Approx(slow.host_exposed_seconds / 2));
}

TEST_CASE("micro-batches between the first and the last are each as one that is recorded", "[engine][step model]") {
  RecordedStep step;
  const auto op = [](const char* name) { return RecordedOp{.op = name}; };
  const RecordedCollective sum = {RecordedCollective::Kind::kAllReduce, 8, Peers::kAll};
  step.parts.push_back({{op("a"), sum, sum}});
  step.parts.push_back({{RecordedWait{1}, op("b"), op("c"), sum}, 2});
  step.parts.push_back({{RecordedWait{0}, RecordedFill{6}}});
  const StepPrediction got =
      predict_step(step, {[](const RecordedOp& op) { return op.op == "a" ? 1.0 : 10.0; }, 2}, kByteASecond, {0, 2});
  StreamTimeline want;
  const auto queue_sum = [&] { want.collective(8, 0); };
  want.compute(1);
  queue_sum();
  queue_sum();
  for (const uint64_t waited_for : {1, 2}) {
    want.wait(waited_for);
    want.compute(20);
    queue_sum();
  }
  want.wait(4);
  want.compute(3);
  CHECK(got.seconds == want.now());
  CHECK(got.compute_seconds == 44);
  CHECK(got.exposed_seconds == want.exposed_seconds());
  CHECK(got.communicated_bytes == 32);
}

TEST_CASE("a step of very many micro-batches is predicted from its first ones", "[engine][step model]") {
  constexpr int64_t kRanks = 4, kMany = 2000;
  const TemporaryFolder folder;
  Links links = kByteASecond;
  links.interference = 0.5;
  links.host_bandwidth = 1;
  // Nothing is hidden, a part, and nearly all.
  const double block = GENERATE(1.0, 500.0, 5e4);
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(block, stage);
    Config config = step_config(folder.path().string(), "bf16", stage, true, 3, kRanks);
    config.optimizer.offload = stage > 0;
    config.precision.offload_weights = stage > 0;
    RecordedStep step = record_step(config, kRanks), each = step;
    REQUIRE(step.parts.size() > 2);
    step.parts[1].times = kMany;
    each.parts[1].times = 1;
    each.parts.insert(each.parts.begin() + 1, kMany - 1, each.parts[1]);
    const StepPrediction got = predict_step(step, per_op(10, block), links, {0, kRanks}),
                         want = predict_step(each, per_op(10, block), links, {0, kRanks});
    CHECK(got.seconds == Approx(want.seconds));
    CHECK(got.compute_seconds == Approx(want.compute_seconds));
    CHECK(got.slowed_seconds == Approx(want.slowed_seconds));
    CHECK(got.exposed_seconds == Approx(want.exposed_seconds));
    CHECK(got.host_exposed_seconds == Approx(want.host_exposed_seconds));
    CHECK(got.communication_seconds == Approx(want.communication_seconds));
    CHECK(got.communicated_bytes == Approx(want.communicated_bytes));
    CHECK(got.host_bytes_in == Approx(want.host_bytes_in));
    CHECK(got.host_bytes_out == Approx(want.host_bytes_out));
  }
}

TEST_CASE("gradients are cleared where they are written anew, and pieces of them are summed in every micro-batch",
          "[engine][step model]") {
  constexpr int64_t kRanks = 4, kMicroBatches = 3;
  const TemporaryFolder folder;
  for (int64_t stage = 0; stage <= 3; ++stage) {
    for (const bool is_llama : {false, true}) {
      CAPTURE(stage, is_llama);
      const Config config = step_config(folder.path().string(), "bf16", stage, is_llama, kMicroBatches, kRanks);
      const Shard shard = {0, kRanks};
      int64_t cleared = 0, summed = 0;  // bytes, of a micro-batch and of a step
      for (const ParameterInfo& p : make_parameter_table(config.model, false).all) {
        const bool no_gemm_writes = p.role == ParameterRole::kNorm || p.role == ParameterRole::kEmbedding;
        cleared += no_gemm_writes ? 4 * p.numel() : 0;
        if (stage >= 1) cleared += 4 * (shard.padded(p.numel()) - p.numel());
        // Pieces of 4 ranks are read and one is written; but for the first time what there is of it is read, too.
        if (stage >= 2) summed += (kMicroBatches * (kRanks + 2) - 1) * 4 * shard.piece(p.numel());
      }
      const WorkSeconds byte_a_second = {[](const RecordedOp&) { return 0.0; }, 1};
      const StepPrediction step =
          predict_step(record_step(config, kRanks), byte_a_second, kByteASecond, {0, kRanks});
      const int64_t loss = 4;
      CHECK(step.compute_seconds ==
            Approx(static_cast<double>((stage >= 2 ? kMicroBatches : 1) * cleared + summed + loss)));
    }
  }
}

TEST_CASE("each ZeRO stage waits for what nothing hides", "[engine][step model]") {
  constexpr int64_t kRanks = 4, kMicroBatches = 3;
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "bf16", 0, true, kMicroBatches, kRanks);
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

  constexpr double kLong = 1e6;  // hides all the rest
  for (int64_t stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    config.distributed.zero_stage = stage;
    const auto predicted = [&](const WorkSeconds& seconds, const Links& links) {
      return predict_step(record_step(config, kRanks), seconds, links, {0, kRanks});
    };
    const StepPrediction step = predicted(per_op(kLong, kLong), kByteASecond);
    CHECK(step.exposed_seconds == Approx(expected[stage]));
    CHECK(step.slowed_seconds == 0);
    CHECK(step.seconds == Approx(step.compute_seconds + step.exposed_seconds));
    // With next to no work nearly everything is exposed.
    const StepPrediction exposed = predicted(kNoTime, kByteASecond);
    CHECK(exposed.seconds == Approx(exposed.communication_seconds));
    CHECK(exposed.hidden_fraction() == Approx(0).margin(1e-12));
    // Whatever hides what, the parts add up.
    Links links = kByteASecond;
    links.interference = 0.5;
    const StepPrediction mixed = predicted(per_op(kLong, 2e3), links);
    CHECK(mixed.slowed_seconds > 0);
    CHECK(mixed.seconds == Approx(mixed.compute_seconds + mixed.slowed_seconds + mixed.exposed_seconds));
  }
}
