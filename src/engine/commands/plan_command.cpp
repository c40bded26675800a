#include <algorithm>
#include <cstdio>
#include <optional>

#include "core/error.h"
#include "core/tensor.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_checks.h"
#include "engine/config/config_io.h"
#include "engine/planning/card_speed.h"
#include "engine/planning/memory_advice.h"
#include "engine/planning/step_model.h"
#include "engine/training/progress.h"
#include "engine/training/speed.h"
#include "model/parameter_table.h"

namespace parka {
namespace {

double gb(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

// A line of the table; on several GPUs with what one GPU alone would hold, which may be nothing.
void print_line(const GpuPlan::Line& line, int64_t num_gpus, int64_t in_use) {
  std::printf("%-30s", line.category.c_str());
  if (num_gpus > 1 && line.unsharded_bytes == 0) std::printf(" %12s", "-");
  if (num_gpus > 1 && line.unsharded_bytes > 0) std::printf(" %9.3f GB", gb(line.unsharded_bytes));
  std::printf(" %9.3f GB %7.1f %%\n", gb(line.bytes),
              100 * static_cast<double>(line.bytes) / static_cast<double>(in_use));
}

void print_table(const Config& config, const GpuPlan& plan, int64_t num_gpus) {
  constexpr int64_t kPrintsAsZero = 500'000;
  const std::string where = num_gpus == 1 ? "1 GPU"
                                          : fmt::format("each of {} GPUs{}, ZeRO stage {}", num_gpus,
                                                        sharing_ranks(config), config.distributed.zero_stage);
  fmt::print("recipe {}, {} x {} tokens on {}\n", name_of(config.precision.recipe),
             config.training.micro_batch_size, config.data.sequence_length, where);
  if (config.model.moe.exists()) fmt::print("{}\n", parameters_text(make_parameter_table(config.model, false)));
  if (num_gpus > 1) std::printf("%-30s %12s %12s %9s\n", "", "one alone", "each", "share");
  GpuPlan::Line other{"other", 0, 0}, planned{"planned", 0, 0};
  const GpuPlan::Line context{"CUDA context and libraries", context_bytes(1), context_bytes(num_gpus)};
  const int64_t in_use = plan.total_bytes + context.bytes;
  for (const GpuPlan::Line& line : plan.lines) {
    planned.unsharded_bytes += line.unsharded_bytes;
    planned.bytes += line.bytes;
    const bool small = std::max(line.unsharded_bytes, line.bytes) < kPrintsAsZero;
    if (!small) print_line(line, num_gpus, in_use);
    if (small) other.unsharded_bytes += line.unsharded_bytes;
    if (small) other.bytes += line.bytes;
  }
  if (std::max(other.unsharded_bytes, other.bytes) >= kPrintsAsZero) print_line(other, num_gpus, in_use);
  print_line(planned, num_gpus, in_use);
  print_line(context, num_gpus, in_use);
  print_line({"in use on the GPU", planned.unsharded_bytes + context.unsharded_bytes, in_use}, num_gpus, in_use);
  for (const MemoryPlan::CategoryTotal& line : plan.host_lines) {
    fmt::print("in host memory, for each GPU: {:.3f} GB pinned for {}\n", gb(line.bytes), line.category);
  }
  if (plan.host_bytes > 0) {
    std::printf("in host memory, for each GPU: %.3f GB for what %lld blocks keep for backward\n",
                gb(plan.host_bytes), static_cast<long long>(config.precision.offload_blocks));
  }
  if (plan.staging_bytes > 0) {
    std::printf("in host memory, for each GPU: %.3f GB pinned, to save beside the training (checkpoint.async)\n",
                gb(plan.staging_bytes));
  }
  std::printf("kept for backward: %.1f bytes per token and block (%.2f x 2 x d_model)\n",
              plan.saved_bytes_per_token_layer,
              plan.saved_bytes_per_token_layer / (2.0 * static_cast<double>(config.model.d_model)));
}

// The changes that make a run fit that does not.
struct Advice {
  std::optional<MemoryAdvice> here;       // on as many GPUs
  std::optional<MemoryAdvice> more_gpus;  // as it is; where no changes are enough here, with changes
};

Advice advice_for(const PlanOptions& options) {
  const GivenConfig given = GivenConfig::read(options.config_path, options.overrides);
  const auto gpu_bytes = static_cast<int64_t>(options.memory_limit_gb * 1e9);
  Advice advice;
  const auto limit_on = [&](int64_t gpus) { return MemoryBytes{.gpu = gpu_bytes - context_bytes(gpus)}; };
  advice.here = cheapest_changes(given, options.num_gpus, limit_on(options.num_gpus));
  advice.more_gpus =
      fewest_gpus(given, options.num_gpus, limit_on, advice.here ? MoreGpus::kWithStages : MoreGpus::kWithChanges);
  return advice;
}

double in_use_gb(const MemoryAdvice& advice) { return gb(advice.planned.gpu + context_bytes(advice.num_gpus)); }

void print_advice(const Advice& advice, const Config& config, int64_t num_gpus) {
  if (advice.here) {
    std::printf("It fits with these changes, the cheapest (%.3f GB in use):\n", in_use_gb(*advice.here));
    for (const MemoryChange& change : advice.here->changes) {
      std::printf("    --set %-36s  # %s\n", change.override.c_str(), change.cost.c_str());
    }
  } else {
    std::printf("No change of batch, precision or sharding makes it fit.\n");
  }
  if (advice.more_gpus) {
    const std::string arguments = advice.more_gpus->arguments();
    std::printf("%s %lld GPUs: --gpus %lld%s%s (%.3f GB in use on each)\n",
                advice.here ? "As it is, it fits on" : "The fewest that it fits on are",
                static_cast<long long>(advice.more_gpus->num_gpus),
                static_cast<long long>(advice.more_gpus->num_gpus), arguments.empty() ? "" : " ", arguments.c_str(),
                in_use_gb(*advice.more_gpus));
  } else if (!advice.here) {
    fmt::print("More GPUs do not, either: {}.\n", advice_without_gpus(config, num_gpus));
  }
}

ordered_json advice_json(const MemoryAdvice& advice) {
  return {{"gpus", advice.num_gpus}, {"changes", advice.overrides()}, {"total_bytes", advice.planned.gpu}};
}

void write_config(const PlanOptions& options, const Config& config, const Advice& advice) {
  if (!advice.here) {
    throw_bad_input("{}: no change makes it fit into {:.1f} GB, so {} is not written: {}", options.config_path,
                    options.memory_limit_gb, options.write_path,
                    advice.more_gpus ? fmt::format("use more GPUs (--gpus {})", advice.more_gpus->num_gpus)
                                     : advice_without_gpus(config, options.num_gpus));
  }
  std::vector<std::string> overrides = options.overrides;
  for (const std::string& override : advice.here->overrides()) overrides.push_back(override);
  write_given_keys(options.write_path, options.config_path, overrides);
}

// The expected times of a step of the run, beside what was measured.
struct StepPlan {
  Links links;
  StepMeasurement one;
  StepPrediction prediction;
  int64_t num_gpus = 1, num_micro_batches = 1;
  double tokens_per_step = 0;
  double flop = 1;                          // of a token, over those of the measured model's
  std::optional<StepMeasurement> measured;  // of this very run

  double tokens_per_second_per_gpu() const {
    return tokens_per_step / prediction.seconds / static_cast<double>(num_gpus);
  }
  double efficiency() const { return flop * tokens_per_second_per_gpu() / one.tokens_per_second_per_gpu(); }
  double error() const { return prediction.seconds / measured->step_seconds - 1; }
};

// For GPUs whose memory has so many bytes per second, read and written.
Links links_of(const PlanOptions& options, double memory_bandwidth) {
  Links links;
  links.nodes = options.nodes > 0 ? options.nodes : ceil_div(options.num_gpus, kGpusPerNode);
  if (options.nodes <= 0 && options.num_gpus > kGpusPerNode && options.num_gpus % kGpusPerNode != 0) {
    throw_bad_input("command line: --gpus {} is no number of whole nodes of {} GPUs; give --nodes",
                    options.num_gpus, kGpusPerNode);
  }
  if (options.num_gpus % links.nodes != 0) {
    throw_bad_input("command line: --gpus {} is not a multiple of --nodes {}; change one of them", options.num_gpus,
                    links.nodes);
  }
  links.link_bandwidth = 1e9 * options.link_bandwidth;
  links.network_bandwidth = 1e9 * options.network_bandwidth;
  // docs/scaling.md says where these come from.
  links.start_latency = 14e-6;
  links.link_latency = 1.9e-6;
  links.network_latency = 4e-6;
  links.interference = 1.4;
  links.memory_bandwidth = memory_bandwidth;
  links.host_bandwidth = 1e9 * options.host_bandwidth;
  return links;
}

double flop_per_token(const Config& config) {
  return speed_of(config, make_parameter_table(config.model, false), "").flop_per_token;
}

StepPlan plan_step(const Config& config, const PlanOptions& options) {
  require_whole_micro_batches(config, options.num_gpus);
  StepPlan plan;
  plan.one = read_step_measurement(options.measured_path);
  plan.links = links_of(options, plan.one.copy_bandwidth);
  plan.num_gpus = options.num_gpus;
  plan.num_micro_batches = config.micro_batches_per_step(options.num_gpus);
  plan.tokens_per_step = static_cast<double>(config.training.global_batch_size * config.data.sequence_length);
  plan.prediction = predict_step_by(plan.one, config, plan.links, options.num_gpus);
  plan.flop = flop_per_token(config) / flop_per_token(plan.one.config);
  if (!options.compare_path.empty()) {
    plan.measured = read_step_measurement(options.compare_path);
    require_measurement_of(*plan.measured, config, options.num_gpus);
  }
  return plan;
}

bool moves_states(const StepPrediction& step) { return step.host_bytes_in + step.host_bytes_out > 0; }

void print_step(const StepPlan& plan) {
  const StepPrediction& step = plan.prediction;
  std::printf("\nmeasured on one %s: %.2f ms for %lld micro-batch%s, %.0f tok/s\n", plan.one.device.c_str(),
              1e3 * plan.one.step_seconds, static_cast<long long>(plan.one.num_micro_batches()),
              plan.one.num_micro_batches() == 1 ? "" : "es", plan.one.tokens_per_second_per_gpu());
  std::printf("expected on %lld GPU%s in %lld node%s, %lld micro-batch%s each:\n",
              static_cast<long long>(plan.num_gpus), plan.num_gpus == 1 ? "" : "s",
              static_cast<long long>(plan.links.nodes), plan.links.nodes == 1 ? "" : "s",
              static_cast<long long>(plan.num_micro_batches), plan.num_micro_batches == 1 ? "" : "es");
  std::printf("%-18s %9.2f ms\n", "own work", 1e3 * step.compute_seconds);
  std::printf("%-18s %9.2f ms slowdown by communication beside it\n", "", 1e3 * step.slowed_seconds);
  std::printf("%-18s %9.2f ms waiting for communication\n", "", 1e3 * step.exposed_seconds);
  if (moves_states(step)) {
    std::printf("%-18s %9.2f ms waiting for copies from and to host memory\n", "", 1e3 * step.host_exposed_seconds);
  }
  std::printf("%-18s %9.2f ms\n", "step", 1e3 * step.seconds);
  std::printf("%-18s %9.2f ms, %.1f %% of it hidden, %.2f GB sent by each GPU\n", "communication",
              1e3 * step.communication_seconds, 100 * step.hidden_fraction(), 1e-9 * step.communicated_bytes);
  if (moves_states(step)) {
    std::printf("%-18s %9.2f GB in, %.2f GB out of each GPU: waiting for it is %.1f %% of the step\n",
                "host memory", 1e-9 * step.host_bytes_in, 1e-9 * step.host_bytes_out,
                100 * step.host_exposed_seconds / step.seconds);
  }
  std::printf("%-18s %9.0f tok/s per GPU, %.0f in total\n", "speed", plan.tokens_per_second_per_gpu(),
              plan.tokens_per_second_per_gpu() * static_cast<double>(plan.num_gpus));
  std::printf("%-18s %9.1f %% of the measured GPU's speed\n", "efficiency", 100 * plan.efficiency());
  if (!plan.measured) return;
  std::printf("%-18s %9.2f ms in %s: the prediction is %+.1f %% off\n", "measured",
              1e3 * plan.measured->step_seconds, plan.measured->path.c_str(), 100 * plan.error());
}

ordered_json step_json(const StepPlan& plan) {
  const StepPrediction& step = plan.prediction;
  ordered_json json = {{"nodes", plan.links.nodes},
                       {"micro_batches", plan.num_micro_batches},
                       {"seconds", step.seconds},
                       {"compute_seconds", step.compute_seconds},
                       {"slowed_seconds", step.slowed_seconds},
                       {"exposed_seconds", step.exposed_seconds},
                       {"communication_seconds", step.communication_seconds},
                       {"hidden_fraction", step.hidden_fraction()},
                       {"communicated_bytes", step.communicated_bytes},
                       {"tokens_per_second_per_gpu", plan.tokens_per_second_per_gpu()},
                       {"tokens_per_second", plan.tokens_per_second_per_gpu() * static_cast<double>(plan.num_gpus)},
                       {"efficiency", plan.efficiency()}};
  if (moves_states(step)) {
    json["host_exposed_seconds"] = step.host_exposed_seconds;
    json["host_bytes_in"] = step.host_bytes_in;
    json["host_bytes_out"] = step.host_bytes_out;
  }
  if (plan.measured) {
    json["measured_seconds"] = plan.measured->step_seconds;
    json["error"] = plan.error();
  }
  return json;
}

// Tokens per second on the named card, and the hours of the run.
struct CardPlan {
  CardSpeed speed;
  double flop_per_token = 0, tokens = 0, hours = 0;
};

CardPlan plan_on_card(const Config& config, const PlanOptions& options) {
  CardPlan plan;
  plan.flop_per_token = flop_per_token(config);
  plan.speed = card_speed(options.card, config, plan.flop_per_token);
  plan.tokens =
      static_cast<double>(config.training.steps * config.training.global_batch_size * config.data.sequence_length);
  const double speed = plan.speed.tokens_per_second * static_cast<double>(options.num_gpus);
  plan.hours = speed > 0 ? plan.tokens / speed / 3600 : 0;
  return plan;
}

void print_card(const CardPlan& plan, const PlanOptions& options) {
  if (plan.speed.tokens_per_second == 0) {
    fmt::print("speed on {}: unknown; {}; `parka bench` measures it there\n", options.card, plan.speed.source);
    return;
  }
  fmt::print(
      "speed on {}: {} tok/s ({}){}; {:.3g} h for {} tokens\n", options.card,
      format_count(plan.speed.tokens_per_second), plan.speed.source,
      options.num_gpus == 1 ? "" : fmt::format(" on each of {} GPUs, without what they exchange", options.num_gpus),
      plan.hours, format_count(plan.tokens));
}

void print_plan_json(const GpuPlan& plan, const Config& config, const PlanOptions& options, const Advice& advice,
                     const std::optional<StepPlan>& step, const std::optional<CardPlan>& card) {
  const bool fits = advice.here && advice.here->changes.empty();
  ordered_json json = {{"gpus", options.num_gpus},
                       {"micro_batch_size", config.training.micro_batch_size},
                       {"total_bytes", plan.total_bytes},
                       {"context_bytes", context_bytes(options.num_gpus)},
                       {"fits", fits},
                       {"divides_batch", config.divides_batch(options.num_gpus)}};
  for (const GpuPlan::Line& line : plan.lines) json["bytes"][line.category] = line.bytes;
  for (const MemoryPlan::CategoryTotal& line : plan.host_lines) {
    json["bytes_in_host_memory"][line.category] = line.bytes;
  }
  if (plan.host_bytes > 0) json["host_bytes"] = plan.host_bytes;
  if (plan.staging_bytes > 0) json["staging_bytes"] = plan.staging_bytes;
  json["saved_bytes_per_token_layer"] = plan.saved_bytes_per_token_layer;
  if (!fits && advice.here) json["fits_with"] = advice_json(*advice.here);
  if (advice.more_gpus) json["fits_on"] = advice_json(*advice.more_gpus);
  if (step) json["step"] = step_json(*step);
  if (card) {
    json["card"] = {{"flop_per_token", card->flop_per_token},
                    {"tokens_per_second_per_gpu", card->speed.tokens_per_second},
                    {"source", card->speed.source},
                    {"hours", card->hours}};
  }
  std::printf("%s\n", json.dump(2).c_str());
}

}  // namespace

int run_plan(const PlanOptions& given) {
  PlanOptions options = given;
  if (!options.card.empty()) options.memory_limit_gb = card_memory_gb(options.card);
  require_config_writable(options.write_path, options.config_path);
  const Config config = load_config(options.config_path, options.overrides);
  if (config.device.kind != DeviceChoice::kCpu) check_head_dims(config, DeviceKind::kCuda);
  std::optional<StepPlan> step;
  if (!options.measured_path.empty()) step = plan_step(config, options);
  std::optional<CardPlan> card;
  if (!options.card.empty()) card = plan_on_card(config, options);
  const GpuPlan plan = plan_for_gpus(config, options.num_gpus);
  const int64_t limit = static_cast<int64_t>(options.memory_limit_gb * 1e9) - context_bytes(options.num_gpus);
  const bool fits = plan.total_bytes <= limit;
  const Advice advice = fits ? Advice{.here = MemoryAdvice{}, .more_gpus = {}} : advice_for(options);
  if (options.json) {
    print_plan_json(plan, config, options, advice, step, card);
  } else {
    const std::string why = indivisible_batch(config, options.num_gpus);
    if (!why.empty()) fmt::print("This batch cannot be divided: {}\n", why);
    print_table(config, plan, options.num_gpus);
    std::printf("%s into %.1f GB.\n", fits ? "Fits" : "Does not fit", options.memory_limit_gb);
    if (!fits) print_advice(advice, config, options.num_gpus);
    if (card) print_card(*card, options);
    if (step) print_step(*step);
  }
  if (options.write_path.empty()) return 0;
  write_config(options, config, advice);
  if (!options.json) std::printf("wrote %s\n", options.write_path.c_str());
  return 0;
}

}  // namespace parka
