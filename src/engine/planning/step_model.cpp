#include "engine/planning/step_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <memory>
#include <string_view>
#include <tuple>
#include <variant>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/median.h"
#include "core/tensor.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/step/declared_run.h"
#include "engine/step/parameter_exchange.h"
#include "kernels/device/recording_device.h"
#include "kernels/ops/attention/rope.h"
#include "kernels/ops/swiglu/swiglu.h"
#include "optim/state_stream.h"

namespace parka {
namespace {

using Kind = RecordedCollective::Kind;

constexpr int64_t kMostQueued = 64;  // of the times that a part is: by then each takes as long as the one before

// Bytes that each GPU sends in a ring: all shards but one, and as many again for the gathering of a result.
double bytes_sent(int64_t num_gpus, Kind kind, int64_t bytes) {
  const double once =
      static_cast<double>(bytes) * static_cast<double>(num_gpus - 1) / static_cast<double>(num_gpus);
  return kind == Kind::kAllReduce ? 2 * once : once;
}

// Bytes that each GPU reads and writes in its memory. An all-gather reads the local shard once per GPU and writes
// every shard. A reduction reads what it sends and writes what it receives.
double bytes_in_memory(int64_t num_gpus, Kind kind, int64_t bytes) {
  if (kind == Kind::kAllGather) return 2 * static_cast<double>(bytes);
  return 2 * bytes_sent(num_gpus, kind, bytes);
}

double latency(const Links& links, int64_t num_gpus, Kind kind) {
  const auto gpus = static_cast<double>(num_gpus), nodes = static_cast<double>(links.nodes);
  if (kind == Kind::kAllReduce) {
    const double up = (gpus / nodes - 1) * links.link_latency + std::ceil(std::log2(nodes)) * links.network_latency;
    return links.start_latency + 2 * up;
  }
  if (kind == Kind::kAllToAll) {  // all messages at once
    return links.start_latency + (gpus > nodes ? links.link_latency : 0) + (nodes > 1 ? links.network_latency : 0);
  }
  return links.start_latency + (gpus - nodes) * links.link_latency + (nodes - 1) * links.network_latency;
}

// The GPUs of a collective, and the nodes that they are in.
struct Group {
  int64_t num_gpus;
  Links links;
};
Group group_of(Peers peers, const Links& links, const Mesh& mesh) {
  Group group = {mesh.size(peers), links};
  if (peers == Peers::kAll) return group;
  const int per_node = mesh.size(Peers::kAll) / static_cast<int>(links.nodes);
  group.links.nodes = ceil_div(group.num_gpus, mesh.size_on_node(peers, per_node));
  return group;
}

void transfer(const RecordedTransfer& what, const Links& links, StreamTimeline& timeline,
              StepPrediction& prediction) {
  using Transfer = RecordedTransfer::Kind;
  const auto bytes = static_cast<double>(what.bytes);
  PARKA_REQUIRE(bytes == 0 || links.host_bandwidth > 0);
  switch (what.kind) {
    case Transfer::kFollowDevice: timeline.follow_device(); break;
    case Transfer::kLoad:
      timeline.load(what.slot, bytes / links.host_bandwidth);
      prediction.host_bytes_in += bytes;
      break;
    case Transfer::kWaitLoaded: timeline.wait_loaded(what.slot); break;
    case Transfer::kSave:
      timeline.save(bytes / links.host_bandwidth);
      prediction.host_bytes_out += bytes;
      break;
    case Transfer::kWaitSaved: timeline.wait_saved(); break;
  }
}

// The time of the work so far.
class PredictedStep {
 public:
  PredictedStep(const Links& links, const Mesh& mesh) : links_(links), mesh_(mesh) {}

  // `own`: the seconds of the rank's own work in it.
  void queue(const RecordedStep::Work& work, double own) {
    if (own > 0) timeline_.compute(own);
    prediction_.compute_seconds += own;
    if (const auto* const moved = std::get_if<RecordedTransfer>(&work)) {
      transfer(*moved, links_, timeline_, prediction_);
    } else if (const auto* const collective = std::get_if<RecordedCollective>(&work)) {
      ++queued_;
      queue_collective(*collective);
    } else if (const auto* const wait = std::get_if<RecordedWait>(&work)) {
      PARKA_REQUIRE(wait->newer < queued_);
      timeline_.wait(queued_ - wait->newer);
    }
  }

  void repeat_since(const PredictedStep& before, int64_t times) {
    timeline_.repeat_since(before.timeline_, times);
    for (const auto sum : {&StepPrediction::compute_seconds, &StepPrediction::communicated_bytes,
                           &StepPrediction::host_bytes_in, &StepPrediction::host_bytes_out}) {
      prediction_.*sum += static_cast<double>(times) * (prediction_.*sum - before.prediction_.*sum);
    }
  }

  StepPrediction prediction() const {
    StepPrediction result = prediction_;
    result.seconds = timeline_.now();
    result.slowed_seconds = timeline_.slowed_seconds();
    result.exposed_seconds = timeline_.exposed_seconds();
    result.host_exposed_seconds = timeline_.host_exposed_seconds();
    result.communication_seconds = timeline_.communication_seconds();
    return result;
  }

 private:
  void queue_collective(const RecordedCollective& what) {
    const Group group = group_of(what.peers, links_, mesh_);
    if (group.num_gpus == 1) {
      timeline_.collective(0, 0);
      return;
    }
    const double seconds = collective_seconds(group.links, group.num_gpus, what.kind, what.bytes);
    PARKA_REQUIRE(links_.memory_bandwidth > 0);
    const double in_memory = bytes_in_memory(group.num_gpus, what.kind, what.bytes) / links_.memory_bandwidth;
    constexpr double kMost = 0.9;  // something gets on
    timeline_.collective(seconds, std::min(kMost, links_.interference * in_memory / seconds));
    prediction_.communicated_bytes += bytes_sent(group.num_gpus, what.kind, what.bytes);
  }

  Links links_;
  Mesh mesh_;
  uint64_t queued_ = 0;  // collectives
  StreamTimeline timeline_;
  StepPrediction prediction_;  // but for the times, which the timeline has
};

// The seconds of a rank's own work in each thing that it queues.
std::vector<double> own_seconds(const RecordedStep::Part& part, const WorkSeconds& seconds) {
  std::vector<double> own;
  for (const RecordedStep::Work& work : part.work) {
    const auto* const op = std::get_if<RecordedOp>(&work);
    const auto* const fill = std::get_if<RecordedFill>(&work);
    const auto* const collective = std::get_if<RecordedCollective>(&work);
    const int64_t moved = fill != nullptr ? fill->bytes : collective != nullptr ? collective->summed_bytes : 0;
    own.push_back(op != nullptr ? seconds.of_op(*op) : static_cast<double>(moved) / seconds.copy_bandwidth);
  }
  return own;
}

// The time of an op that has next to nothing to do: a launch is not divided over ranks.
constexpr double kLaunchSeconds = 5e-6;
// The share of copy bandwidth that quantizing or transposing a weight reaches in a step: 75 to 88 % were measured.
constexpr double kQuantizeOfCopy = 0.8;

constexpr double kMost = 1e30;  // of any number, so that sums and products of some stay finite

double positive(const nlohmann::json& value, const char* key, const std::string& path) {
  const double number = value.get<double>();
  if (!(number > 0 && number <= kMost)) {
    throw_bad_input("{}: {} is {}, which no measurement gives: run `parka bench` again", path, key, number);
  }
  return number;
}

// A whole number of at most kMaxExactInteger, so that products with others fit.
int64_t count(const nlohmann::json& value, const char* key, const std::string& path) {
  const double number = positive(value, key, path);
  if (number < 1 || number > static_cast<double>(kMaxExactInteger) || number != std::floor(number)) {
    throw_bad_input("{}: {} is {}, which no measurement gives: run `parka bench` again", path, key, number);
  }
  return static_cast<int64_t>(number);
}

// Reads how much an op has to do: some do next to nothing.
double amount(const nlohmann::json& op, const char* key, const std::string& path) {
  const double number = op.at(key).get<double>();
  if (!(number >= 0 && number <= kMost)) {
    throw_bad_input("{}: {} is {}, which no op has: run `parka bench` again", path, key, number);
  }
  return number;
}

StepSection section_of(const std::string& name, const std::string& path) {
  for (const auto& [section, known] : EnumNames<StepSection>::kAll) {
    if (known == name) return section;
  }
  throw_bad_input("{}: \"{}\" is no section of a step: run `parka bench` again", path, printable(name));
}

OpSummary parse_op(const nlohmann::json& json, const std::string& path) {
  OpSummary op;
  op.section = section_of(json.at("section").get<std::string>(), path);
  op.op = json.at("op").get<std::string>();
  op.count = count(json.at("runs"), "runs", path);
  op.cost = {.bytes = amount(json, "bytes", path), .flop = amount(json, "flop", path), .shape = json.at("shape")};
  op.seconds = json.at("seconds").get<double>();  // a timer may not see an op that takes next to nothing
  if (!(op.seconds >= 0 && op.seconds <= kMost))
    throw_bad_input("{}: {} takes {} seconds: run `parka bench` again", path, op.op, op.seconds);
  return op;
}

// Returns how long a step waited for a HostStream. Waits for other copies are part of the work between them.
double host_wait_of(const nlohmann::json& waits, const std::string& path) {
  constexpr std::string_view kWaits[] = {StateStream::kLoadWait, StateStream::kSaveWait,
                                         ParameterExchange::kLoadWait, ParameterExchange::kSaveWait};
  double sum = 0;
  for (const nlohmann::json& wait : waits) {
    const std::string what = wait.at("for").get<std::string>();
    if (std::ranges::find(kWaits, what) != std::end(kWaits)) sum += amount(wait, "seconds", path);
  }
  return sum;
}

// The times of ops by a measurement.
class MeasuredOps {
 public:
  explicit MeasuredOps(const StepMeasurement& one) : copy_bandwidth_(one.copy_bandwidth) {
    for (const OpSummary& op : one.ops) {
      for (const Key& key : keys_of(op.section, op.op, op.cost)) means_[key].add(op);
    }
  }

  // Scales the time of the measured ops that are most like it by how much it has to do. Without any it is
  // taken for one that makes codes of a weight, as ZeRO and kept copies may add and no measurement has.
  double seconds(const RecordedOp& op) const {
    const double work = work_of(op.cost);
    for (const Key& key : keys_of(op.section, op.op, op.cost)) {
      const auto found = means_.find(key);
      if (found != means_.end()) return found->second.seconds_of(work);
    }
    return work / (kQuantizeOfCopy * copy_bandwidth_);
  }

 private:
  using Key = std::tuple<StepSection, std::string, std::string>;

  static double work_of(const OpCost& cost) { return cost.flop > 0 ? cost.flop : cost.bytes; }

  // From the most to the least like: of the same shape, of the same but for accumulation, of the section, of any.
  static std::array<Key, 4> keys_of(StepSection section, const std::string& op, const OpCost& cost) {
    const bool adds = cost.shape.ends_with(kOntoOutput);
    const std::string shape = adds ? cost.shape.substr(0, cost.shape.size() - kOntoOutput.size()) : cost.shape;
    const char *const kEitherWay = " (either way)", *const kAnyShape = "any shape";
    return {Key{section, op, cost.shape}, Key{section, op, shape + kEitherWay}, Key{section, op, kAnyShape},
            Key{StepSection::kNone, op, kAnyShape}};
  }

  struct Mean {
    double seconds = 0, work = 0, runs = 0;  // sums

    void add(const OpSummary& op) {
      seconds += op.seconds;
      work += work_of(op.cost) * static_cast<double>(op.count);
      runs += static_cast<double>(op.count);
    }
    // A launch takes its time whatever there is to do.
    double seconds_of(double of_work) const {
      const double mean = seconds / runs, launch = std::min(mean, kLaunchSeconds);
      return work > 0 ? launch + (mean - launch) * of_work * runs / work : mean;
    }
  };
  std::map<Key, Mean> means_;
  double copy_bandwidth_;
};

// The share of the rows at a rank's experts that have a token of evenly chosen ones. The cost of their products,
// which knows no routing, is that of all rows.
double share_of_rows(const Config& config) {
  const int64_t ranks = config.distributed.expert_parallel, k = config.model.moe.experts_per_token;
  if (ranks == 1) return 1;
  return static_cast<double>(k) / static_cast<double>(ranks * std::min(k, config.model.moe.num_experts / ranks));
}

}  // namespace

double collective_seconds(const Links& links, int64_t num_gpus, Kind kind, int64_t bytes) {
  PARKA_REQUIRE(num_gpus > 1 && links.nodes >= 1 && links.nodes <= num_gpus);
  if (kind == Kind::kAllToAll) {
    const double to_one = static_cast<double>(bytes) / static_cast<double>(num_gpus);
    const int64_t in_a_node = num_gpus / links.nodes;
    const double near = to_one * static_cast<double>(in_a_node - 1),
                 far = to_one * static_cast<double>(num_gpus - in_a_node);
    return latency(links, num_gpus, kind) + near / links.link_bandwidth +
           (far > 0 ? far / links.network_bandwidth : 0);
  }
  double bandwidth = links.link_bandwidth;
  if (links.nodes > 1) {
    // A ring leaves a node once, and there are as many rings as it takes to use all of a node's network cards.
    const int64_t gpus_per_node = num_gpus / links.nodes;  // of the node with fewest
    const double out = links.network_bandwidth * static_cast<double>(gpus_per_node);
    bandwidth = std::min(bandwidth, out);
  }
  return latency(links, num_gpus, kind) + bytes_sent(num_gpus, kind, bytes) / bandwidth;
}

double compute_seconds(const RecordedStep& step, const WorkSeconds& seconds) {
  double sum = 0;
  for (const RecordedStep::Part& part : step.parts) {
    for (const double own : own_seconds(part, seconds)) sum += static_cast<double>(part.times) * own;
  }
  return sum;
}

StepPrediction predict_step(const RecordedStep& step, const WorkSeconds& seconds, const Links& links,
                            const Mesh& mesh) {
  PredictedStep predicted(links, mesh);
  for (const RecordedStep::Part& part : step.parts) {
    const std::vector<double> own = own_seconds(part, seconds);
    PredictedStep before = predicted;
    const int64_t times = std::min(part.times, kMostQueued);
    for (int64_t i = 0; i < times; ++i) {
      if (i + 1 == times) before = predicted;
      for (size_t k = 0; k < own.size(); ++k) predicted.queue(part.work[k], own[k]);
    }
    if (times < part.times) predicted.repeat_since(before, part.times - times);
  }
  return predicted.prediction();
}

void StreamTimeline::compute(double seconds) {
  PARKA_REQUIRE(seconds >= 0);
  // Collectives that are queued waited for nothing later than now: they run without a gap from here on.
  for (; running_ < collectives_.size(); ++running_) {
    const Collective& beside = collectives_[running_];
    const double time = std::max(0.0, beside.end - now_), done = time * (1 - beside.interference);
    if (done > seconds) break;
    now_ += time;
    slowed_ += time - done;
    seconds -= done;
  }
  const double speed = running_ < collectives_.size() ? 1 - collectives_[running_].interference : 1;
  now_ += seconds / speed;
  slowed_ += seconds / speed - seconds;
}

void StreamTimeline::collective(double seconds, double interference) {
  PARKA_REQUIRE(seconds >= 0 && interference >= 0 && interference < 1);
  communication_ += seconds;
  collectives_.push_back({std::max(now_, collectives_end()) + seconds, interference});
}

void StreamTimeline::wait(uint64_t number) {
  PARKA_REQUIRE(number <= collectives_.size());
  if (number == 0 || collectives_[number - 1].end <= now_) return;
  exposed_ += collectives_[number - 1].end - now_;
  now_ = collectives_[number - 1].end;
}

void StreamTimeline::follow_device() { loads_end_ = std::max(loads_end_, now_); }

void StreamTimeline::load(size_t slot, double seconds) {
  loads_end_ = std::max(loads_end_, saves_end_) + seconds;
  loaded_[slot] = loads_end_;
}

void StreamTimeline::wait_loaded(size_t slot) { wait_for_host(loaded_.at(slot)); }

void StreamTimeline::save(double seconds) { saves_end_ = std::max(saves_end_, now_) + seconds; }

void StreamTimeline::wait_saved() { wait_for_host(saves_end_); }

void StreamTimeline::repeat_since(const StreamTimeline& before, int64_t times) {
  const auto repeat = [&](double& value, double value_before) {
    value += static_cast<double>(times) * (value - value_before);
  };
  // The collectives of the last time are the only ones that later work can wait for, or run beside.
  const double later = static_cast<double>(times) * (collectives_end() - before.collectives_end());
  for (size_t i = before.collectives_.size(); i < collectives_.size(); ++i) collectives_[i].end += later;
  for (auto& [slot, end] : loaded_) {
    if (const auto found = before.loaded_.find(slot); found != before.loaded_.end()) repeat(end, found->second);
  }
  using Self = StreamTimeline;
  for (const auto time : {&Self::now_, &Self::slowed_, &Self::exposed_, &Self::communication_, &Self::loads_end_,
                          &Self::saves_end_, &Self::host_exposed_}) {
    repeat(this->*time, before.*time);
  }
}

void StreamTimeline::wait_for_host(double until) {
  if (until <= now_) return;
  host_exposed_ += until - now_;
  now_ = until;
}

std::set<std::string> StepMeasurement::one_kernel() const {
  std::set<std::string> names;
  for (const OpSummary& op : ops) {
    if (op.op == SwigluProjection::kName || op.op == RopeProjection::kName) names.insert(op.op);
  }
  return names;
}

StepMeasurement read_step_measurement(const std::string& path) {
  constexpr int64_t kLargestFile = int64_t{64} << 20;
  const nlohmann::json file = parse_json_text(read_text(path, kLargestFile), path, JsonComments::kRefused);
  StepMeasurement measured;
  measured.path = path;
  try {
    measured.device = file.at("device").get<std::string>();
    measured.ranks = file.contains("ranks") ? count(file.at("ranks"), "ranks", path) : 1;
    std::vector<double> steps;
    for (const nlohmann::json& seconds : file.at("step_seconds")) {
      steps.push_back(positive(seconds, "step_seconds", path));
    }
    if (steps.empty()) throw_bad_input("{}: step_seconds has no step: run `parka bench` again", path);
    measured.step_seconds = median(std::move(steps));
    measured.copy_bandwidth = positive(file.at("copy_bandwidth"), "copy_bandwidth", path);
    if (file.contains("waits")) measured.host_wait_seconds = host_wait_of(file.at("waits"), path);
    if (measured.host_wait_seconds >= measured.step_seconds) {
      throw_bad_input("{}: its step waits longer than it takes: run `parka bench` again", path);
    }
    for (const nlohmann::json& op : file.at("ops")) measured.ops.push_back(parse_op(op, path));
    measured.config = parse_config(file.at("config"), path);
  } catch (const nlohmann::json::exception& error) {
    throw_bad_input("{}: not a file that `parka bench --json` wrote ({}): run it again", path,
                    printable(error.what()));
  }
  if (!measured.config.divides_batch(measured.ranks)) {
    throw_bad_input("{}: {} ranks do not divide its batch: run `parka bench` again", path, measured.ranks);
  }
  return measured;
}

void require_same_speed(const StepMeasurement& measured, const Config& config, SpeedOf speed) {
  const std::vector<std::string> differences = speed_differences(measured.config, config, speed);
  if (differences.empty()) return;
  throw_bad_input(
      "{}: measured with another config: {}; measure this one with `parka bench`, or give the same --set",
      measured.path, fmt::join(differences, "; "));
}

WorkSeconds measured_work(const StepMeasurement& one) {
  if (one.ranks != 1) {
    throw_bad_input("{}: measured on {} GPUs, and a prediction starts from one: run `parka bench` without mpirun",
                    one.path, one.ranks);
  }
  const auto ops = std::make_shared<const MeasuredOps>(one);
  const WorkSeconds timed = {[ops](const RecordedOp& op) { return ops->seconds(op); }, one.copy_bandwidth};
  // Timing every op takes time, and between ops nothing is timed: all are scaled to the step without timing.
  const double own_seconds = one.step_seconds - one.host_wait_seconds;
  const double scale = own_seconds / compute_seconds(record_step(one.config, 1, one.one_kernel()), timed);
  return {[ops, scale](const RecordedOp& op) { return scale * ops->seconds(op); }, one.copy_bandwidth / scale};
}

StepPrediction predict_step_by(const StepMeasurement& one, const Config& config, const Links& links,
                               int64_t num_gpus) {
  WorkSeconds work = measured_work(one);
  require_same_speed(one, config, SpeedOf::kOneGpu);
  work.of_op = [of_op = work.of_op, share = share_of_rows(config)](const RecordedOp& op) {
    return (op.op.starts_with("grouped_") ? share : 1) * of_op(op);
  };
  const Mesh mesh = zero_of(config, 0, num_gpus).mesh;
  return predict_step(record_step(config, num_gpus, one.one_kernel()), work, links, mesh);
}

void require_measurement_of(const StepMeasurement& measured, const Config& config, int64_t num_gpus) {
  if (measured.ranks != num_gpus) {
    throw_bad_input("{}: measured on {} GPUs, the prediction is for {}: give --gpus {}", measured.path,
                    measured.ranks, num_gpus, measured.ranks);
  }
  require_same_speed(measured, config, SpeedOf::kRun);
}

}  // namespace parka
