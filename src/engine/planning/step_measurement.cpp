#include "engine/planning/step_measurement.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <string_view>
#include <tuple>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/median.h"
#include "engine/config/distributed_config.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/step/parameter_exchange.h"
#include "engine/step/recorded_step.h"
#include "kernels/device/step_section_names.h"
#include "kernels/ops/attention/rope_projection.h"
#include "kernels/ops/swiglu/swiglu_projection.h"
#include "optim/state_stream.h"

namespace parka {
namespace {

// What an op takes that has next to nothing to do: a launch is not divided over ranks.
constexpr double kLaunchSeconds = 5e-6;
// What quantizing or transposing a weight reaches of copy bandwidth within a step: 75 to 88 % were measured.
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

// What an op has to do: some do next to nothing.
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

// That a step waited for what passes through a HostStream. Waits for other copies are part of the work between
// them.
double host_wait_of(const nlohmann::json& waits, const std::string& path) {
  constexpr std::string_view kWaits[] = {StateStream::kLoadWait, StateStream::kSaveWait,
                                         ParameterExchange::kLoadWait, ParameterExchange::kSaveWait};
  double sum = 0;
  for (const nlohmann::json& wait : waits) {
    const std::string what = wait.at("for").get<std::string>();
    if (std::find(std::begin(kWaits), std::end(kWaits), what) != std::end(kWaits))
      sum += amount(wait, "seconds", path);
  }
  return sum;
}

// What ops take by a measurement.
class MeasuredOps {
 public:
  explicit MeasuredOps(const StepMeasurement& one) : copy_bandwidth_(one.copy_bandwidth) {
    for (const OpSummary& op : one.ops) {
      for (const Key& key : keys_of(op.section, op.op, op.cost)) means_[key].add(op);
    }
  }

  // As long as the ops measured that are most like it, but for what it has more or less to do. Without any it is
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

  // From the most to the least like: of the same shape, of the same but for what becomes of the output, of the
  // section, of any.
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

}  // namespace

void require_whole_micro_batches(const Config& config, int64_t num_gpus) {
  if (config.divides_batch(num_gpus)) return;
  throw_bad_input(
      "training.global_batch_size {} is not a positive multiple of training.micro_batch_size {} x {} GPUs{}; "
      "change one of them",
      config.training.global_batch_size, config.training.micro_batch_size, num_gpus, divided_by_context(config));
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

WorkSeconds measured_work(const StepMeasurement& one, double slowest) {
  if (one.ranks != 1) {
    throw_bad_input("{}: measured on {} GPUs, and a prediction starts from one: run `parka bench` without mpirun",
                    one.path, one.ranks);
  }
  const auto ops = std::make_shared<const MeasuredOps>(one);
  const WorkSeconds timed = {[ops](const RecordedOp& op) { return ops->seconds(op); }, one.copy_bandwidth};
  // Timing every op takes time, and between ops nothing is timed: all are scaled to the step without timing.
  const double own_seconds = one.step_seconds - one.host_wait_seconds;
  const double scale = slowest * own_seconds / compute_seconds(record_step(one.config, 1, one.one_kernel()), timed);
  return {[ops, scale](const RecordedOp& op) { return scale * ops->seconds(op); }, one.copy_bandwidth / scale};
}

std::vector<StepAction> step_actions_by(const StepMeasurement& one, const Config& config, int64_t num_gpus,
                                        double slowest) {
  const WorkSeconds work = measured_work(one, slowest);
  require_same_speed(one, config, SpeedOf::kOneGpu);
  return step_actions(record_step(config, num_gpus, one.one_kernel()), work);
}

void require_measurement_of(const StepMeasurement& measured, const Config& config, int64_t num_gpus) {
  if (measured.ranks != num_gpus) {
    throw_bad_input("{}: measured on {} GPUs, the prediction is for {}: give --gpus {}", measured.path,
                    measured.ranks, num_gpus, measured.ranks);
  }
  require_same_speed(measured, config, SpeedOf::kRun);
}

}  // namespace parka
