#include "engine/planning/step_measurement.h"

#include <algorithm>
#include <cmath>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/training/training_run.h"
#include "model/formats.h"
#include "model/parameter_table.h"

namespace parka {
namespace {

// What an op takes that has next to nothing to do: a launch is not divided over ranks.
constexpr double kLaunchSeconds = 5e-6;

double positive(const nlohmann::json& value, const char* key, const std::string& path) {
  const double number = value.get<double>();
  if (!std::isfinite(number) || number <= 0) {
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

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

OpSummary parse_op(const nlohmann::json& json, const std::string& path) {
  OpSummary op;
  op.section = json.at("section").get<std::string>();
  op.op = json.at("op").get<std::string>();
  op.count = count(json.at("runs"), "runs", path);
  op.seconds = json.at("seconds").get<double>();  // a timer may not see an op that takes next to nothing
  if (!(op.seconds >= 0))
    throw_bad_input("{}: {} takes {} seconds: run `parka bench` again", path, op.op, op.seconds);
  return op;
}

// Ops of a section, of one kind or (empty) of all.
struct Part {
  double seconds = 0;
  int64_t launches = 0;
};
Part part_of(const StepMeasurement& measured, const std::string& section, const std::string& op = {}) {
  Part part;
  for (const OpSummary& summary : measured.ops) {
    if (summary.section != section || (!op.empty() && summary.op != op)) continue;
    part.seconds += summary.seconds;
    part.launches += summary.count;
  }
  return part;
}

// What is left where each launch has 1 / ranks as much to do.
double divided(const Part& part, int64_t ranks) {
  const double launches = std::min(part.seconds, static_cast<double>(part.launches) * kLaunchSeconds);
  return launches + (part.seconds - launches) / static_cast<double>(ranks);
}

int64_t linear_elements_per_block(const ParameterTable& table) {
  int64_t sum = 0;
  for (const int index : table.linear_weights(table.block_unit(0)))
    sum += table.all[static_cast<size_t>(index)].numel();
  return sum;
}

// Seconds of making the FP8 copies of weights: in a block's forward and backward, and once a step.
struct CopySeconds {
  double block_forward = 0, block_backward = 0, step = 0;
};
CopySeconds copy_seconds(const Config& config, const ParameterTable& table, const Zero& zero,
                         double copy_bandwidth) {
  if (config.precision.gemm == GemmPrecision::kCompute) return {};
  const Formats formats(config.precision);
  const double plain = size_of(formats.compute.dtype);
  // Bytes per element. Codes with one scale are moved; codes of blocks are made from the weight again.
  const double move = formats.has_tensor_scales() ? 2 : plain + 1;
  const WeightCopies copies = kept_copies(config.precision, zero);
  CopySeconds bytes;
  if (zero.shards_weights()) {
    const bool has_transposed = gathers_transposed(table, formats, copies, training_use(config.precision), zero);
    bytes = {0, has_transposed ? 0 : move, 0};
  } else if (copies == WeightCopies::kBoth) {
    bytes = {0, 0, plain + 2};
  } else if (copies == WeightCopies::kRows) {
    bytes = {0, move, plain + 1};
  } else {
    bytes = {plain + 1, plain + 1, 0};
  }
  const double of_block =
      static_cast<double>(linear_elements_per_block(table)) / (kQuantizeOfCopy * copy_bandwidth);
  return {bytes.block_forward * of_block, bytes.block_backward * of_block,
          bytes.step * of_block * static_cast<double>(config.model.num_layers)};
}

// Of clearing the gradients that no GEMM writes: those of norms, and of an embedding that is not the head.
double clear_gradients_seconds(const Config& config, const ParameterTable& table, double copy_bandwidth) {
  int64_t elements = 0;
  for (const ParameterInfo& p : table.all) {
    const bool is_cleared = p.role == ParameterRole::kNorm || p.role == ParameterRole::kEmbedding;
    elements += is_cleared ? p.numel() : 0;
  }
  return static_cast<double>(elements * size_of(config.optimizer.gradient)) / copy_bandwidth;
}

void refuse_differences(const StepMeasurement& measured, const std::vector<std::string>& differences) {
  if (differences.empty()) return;
  throw_bad_input(
      "{}: measured with another config: {}; measure this one with `parka bench`, or give the same --set",
      measured.path, fmt::join(differences, "; "));
}

}  // namespace

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
    for (const nlohmann::json& op : file.at("ops")) measured.ops.push_back(parse_op(op, path));
    measured.config = parse_config(file.at("config"), path);
  } catch (const nlohmann::json::exception& error) {
    throw_bad_input("{}: not a file that `parka bench --json` wrote ({}): run it again", path,
                    printable(error.what()));
  }
  const TrainingConfig& training = measured.config.training;
  // Not of their product, which may be too large for 64 bits.
  const int64_t micro_batches = training.global_batch_size / training.micro_batch_size;
  if (micro_batches % measured.ranks != 0) {
    throw_bad_input("{}: {} ranks do not divide its batch: run `parka bench` again", path, measured.ranks);
  }
  return measured;
}

ComputeSeconds compute_seconds(const StepMeasurement& one, const Config& config, int64_t num_gpus, double slowest) {
  if (one.ranks != 1) {
    throw_bad_input("{}: measured on {} GPUs, and a prediction starts from one: run `parka bench` without mpirun",
                    one.path, one.ranks);
  }
  refuse_differences(one, speed_differences(one.config, config, SpeedOf::kOneGpu));
  const ParameterTable table = make_parameter_table(config.model, config.optimizer.decay_embeddings);
  const Zero zero = zero_of(config.distributed, 0, num_gpus);
  const auto micro_batches = static_cast<double>(one.num_micro_batches());
  const double blocks = micro_batches * static_cast<double>(config.model.num_layers);

  ComputeSeconds compute;
  compute.copy_bandwidth = one.copy_bandwidth;
  compute.clear_gradients = clear_gradients_seconds(config, table, one.copy_bandwidth);
  // Timing every op takes time, and between ops nothing is timed: all are scaled to the step without timing.
  double timed = compute.clear_gradients;
  for (const OpSummary& op : one.ops) timed += op.seconds;
  const double scale = slowest * one.step_seconds / timed;
  const auto of_micro_batch = [&](const char* section, const char* op, double runs) {
    return scale * part_of(one, section, op).seconds / runs;
  };
  compute.embedding_forward = of_micro_batch("embedding", "embedding_forward", micro_batches);
  compute.embedding_backward = of_micro_batch("embedding", "embedding_backward", micro_batches);
  compute.head = of_micro_batch("head", "", micro_batches);
  compute.block_forward = of_micro_batch("block forward", "", blocks);
  compute.block_backward = of_micro_batch("block backward", "", blocks);
  compute.clear_gradients *= scale;

  const int64_t state_ranks = zero.shards_states() ? zero.shard.size : 1;
  const Part norm = part_of(one, "optimizer", "sum_of_squares");
  const Part quantize = part_of(one, "optimizer", "quantize");
  Part update = part_of(one, "optimizer");
  update.seconds -= norm.seconds + quantize.seconds;
  update.launches -= norm.launches + quantize.launches;
  compute.gradient_norm = scale * divided(norm, state_ranks);
  compute.update = scale * divided(update, state_ranks);

  // From copies as they were made when this was measured to copies as they are made here.
  const CopySeconds before = copy_seconds(one.config, table, {}, one.copy_bandwidth),
                    after = copy_seconds(config, table, zero, one.copy_bandwidth);
  const auto changed = [](double seconds, double less, double more) {
    return std::max(0.0, seconds - less + more);
  };
  compute.block_forward = changed(compute.block_forward, before.block_forward, after.block_forward);
  compute.block_backward = changed(compute.block_backward, before.block_backward, after.block_backward);
  compute.quantize_weights = after.step == 0 ? 0.0 : scale * changed(quantize.seconds, before.step, after.step);
  return compute;
}

void require_measurement_of(const StepMeasurement& measured, const Config& config, int64_t num_gpus) {
  if (measured.ranks != num_gpus) {
    throw_bad_input("{}: measured on {} GPUs, the prediction is for {}: give --gpus {}", measured.path,
                    measured.ranks, num_gpus, measured.ranks);
  }
  refuse_differences(measured, speed_differences(measured.config, config, SpeedOf::kRun));
}

}  // namespace parka
