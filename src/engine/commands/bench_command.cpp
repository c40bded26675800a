#include <algorithm>
#include <cstdio>
#include <map>
#include <string>

#include "comm/launch/launch.h"
#include "core/error.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/planning/bench.h"
#include "kernels/device/recording_device.h"

namespace parka {
namespace {

// The rate that an op is judged by: FLOP/s for GEMMs and attention, bytes per second for the others.
bool is_matrix_bound(const OpSummary& op) { return op.cost.flop > 0; }
double rate_of(const OpSummary& op) {
  const double work = is_matrix_bound(op) ? op.cost.flop : op.cost.bytes;
  return work * static_cast<double>(op.count) / op.seconds;
}

void print_ops(const BenchResult& result, bool roofline) {
  std::printf("%-15s %-19s %-46s %6s %9s %6s %17s %s\n", "section", "op", "shape", "runs", "ms", "share",
              "achieved", roofline ? "of floor" : "of copy");
  for (const OpSummary& op : result.ops) {
    const double rate = rate_of(op);
    std::printf("%-15s %-19s %-46s %6lld %9.3f %5.1f%% ", std::string(name_of(op.section)).c_str(), op.op.c_str(),
                op.cost.shape.c_str(), static_cast<long long>(op.count), 1e3 * op.seconds,
                100 * op.seconds / result.own_op_seconds());
    if (is_matrix_bound(op)) {
      std::printf("%9.1f TFLOP/s", 1e-12 * rate);
    } else {
      std::printf("%9.1f GB/s   ", 1e-9 * rate);
    }
    if (roofline && op.floor_seconds > 0) {
      std::printf(" %7.1f%%\n", 100 * op.floor_seconds / op.seconds);
    } else if (roofline || is_matrix_bound(op)) {
      std::printf("        -\n");
    } else {
      std::printf(" %7.1f%%\n", 100 * rate / result.copy_bandwidth);
    }
  }
}

void print_sections(const BenchResult& result) {
  std::map<std::string, double> seconds;
  for (const OpSummary& op : result.ops) seconds[std::string(name_of(op.section))] += op.seconds;
  std::printf("\n");
  for (const auto& [section, of_section] : seconds) {
    std::printf("%-15s %9.3f ms", section.c_str(), 1e3 * of_section);
    if (section.starts_with("block")) {
      std::printf("   %.3f ms per block", 1e3 * of_section / static_cast<double>(result.blocks_per_step));
    }
    std::printf("\n");
  }
}

void print_step(const BenchResult& result, bool roofline) {
  const auto [shortest, longest] = std::ranges::minmax_element(result.step_seconds);
  const double median = result.median_step_seconds(),
               flops = result.tokens_per_second_per_rank() * result.speed.flop_per_token;
  std::printf("\n%s, %d rank%s\n", result.device.c_str(), result.ranks, result.ranks == 1 ? "" : "s");
  std::printf("step            %9.2f ms (%.2f to %.2f in %zu step%s), %lld tokens\n", 1e3 * median, 1e3 * *shortest,
              1e3 * *longest, result.step_seconds.size(), result.step_seconds.size() == 1 ? "" : "s",
              static_cast<long long>(result.tokens_per_step));
  std::printf("speed           %9.0f tok/s, %.1f TFLOP/s at FLOP/token = %s%s\n",
              result.tokens_per_second_per_rank(), 1e-12 * flops, result.speed.formula,
              result.ranks == 1 ? "" : ", per rank");
  if (result.images_per_sequence > 0) {
    std::printf("sequences       %9.2f per s%s, each with %lld blank image%s\n",
                result.sequences_per_second() / result.ranks, result.ranks == 1 ? "" : " and rank",
                static_cast<long long>(result.images_per_sequence), result.images_per_sequence == 1 ? "" : "s");
  }
  if (result.speed.peak_flops > 0) {
    std::printf("MFU             %9.1f %% of %.0f TFLOP/s\n", 100 * result.speed.utilization(flops, 1),
                1e-12 * result.speed.peak_flops);
  }
  std::printf("host            %9.2f ms to queue a step\n", 1e3 * result.queue_seconds);
  const double of_ops = result.own_op_seconds();
  std::printf("ops             %9.2f ms of a step with every op timed, %.1f %% of its %.2f ms\n", 1e3 * of_ops,
              100 * of_ops / result.timed_step_seconds, 1e3 * result.timed_step_seconds);
  if (result.ranks > 1) {
    const auto [least, most] = std::ranges::minmax_element(result.op_seconds);
    std::printf("of ranks        %9.2f to %.2f ms; faster ranks wait for the slowest\n", 1e3 * *least, 1e3 * *most);
  }
  for (const OpSummary& wait : result.waits) {
    std::printf("waits           %9.2f ms in %s for %s, %lld of them\n", 1e3 * wait.seconds,
                std::string(name_of(wait.section)).c_str(), wait.cost.shape.c_str(),
                static_cast<long long>(wait.count));
  }
  std::printf("copy            %9.1f GB/s, read and written\n", 1e-9 * result.copy_bandwidth);
  std::printf("memory          %9.3f GB planned", 1e-9 * static_cast<double>(result.planned_bytes));
  if (result.used_bytes > 0) std::printf(", %.3f GB in use", 1e-9 * static_cast<double>(result.used_bytes));
  std::printf("\n");
  if (result.planned_host_bytes > 0) {
    std::printf("host memory     %9.3f GB planned, %.3f GB resident\n",
                1e-9 * static_cast<double>(result.planned_host_bytes),
                1e-9 * static_cast<double>(result.resident_host_bytes));
  }
  if (roofline) {
    std::printf("floor           %9.2f ms, %.1f %% of the step\n", 1e3 * result.floor_seconds(),
                100 * result.floor_seconds() / median);
  }
}

ordered_json result_json(const BenchResult& result, const Config& config, bool roofline) {
  ordered_json ops = ordered_json::array();
  for (const OpSummary& op : result.ops) {
    ordered_json line = {{"section", name_of(op.section)},
                         {"op", op.op},
                         {"shape", op.cost.shape},
                         {"runs", op.count},
                         {"seconds", op.seconds},
                         {"bytes", op.cost.bytes},
                         {"flop", op.cost.flop}};
    if (roofline) line["floor_seconds"] = op.floor_seconds;
    ops.push_back(std::move(line));
  }
  const double flops = result.tokens_per_second_per_rank() * result.speed.flop_per_token;
  ordered_json json = {{"device", result.device},
                       {"ranks", result.ranks},
                       {"tokens_per_step", result.tokens_per_step},
                       {"step_seconds", result.step_seconds},
                       {"tokens_per_second", result.tokens_per_second()},
                       {"sequences_per_second", result.sequences_per_second()},
                       {"model_flops", flops},
                       {"queue_seconds", result.queue_seconds},
                       {"timed_step_seconds", result.timed_step_seconds},
                       {"op_seconds_by_rank", result.op_seconds},
                       {"copy_bandwidth", result.copy_bandwidth},
                       {"planned_bytes", result.planned_bytes},
                       {"context_bytes", result.context_bytes},
                       {"used_bytes", result.used_bytes},
                       {"planned_host_bytes", result.planned_host_bytes},
                       {"resident_host_bytes", result.resident_host_bytes}};
  if (result.speed.peak_flops > 0) json["mfu"] = result.speed.utilization(flops, 1);
  if (roofline) json["floor_seconds"] = result.floor_seconds();
  json["ops"] = std::move(ops);
  json["waits"] = ordered_json::array();
  for (const OpSummary& wait : result.waits) {
    json["waits"].push_back({{"section", name_of(wait.section)},
                             {"for", wait.cost.shape},
                             {"count", wait.count},
                             {"seconds", wait.seconds}});
  }
  Config measured = config;
  measured.data.documents = result.documents;
  json["config"] = to_json(measured);
  return json;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const LaunchOptions starts = launch_options(options.config_path, options.overrides, options.started);
  return run_launched(starts, [&](Launch& launch) {
    if (launch.rank() != 0) log_from(LogLevel::kWarning);
    const Config given = load_config(options.config_path, options.overrides);
    launch.require_same("the config", to_lines(given), "start all ranks with the same config and --set");
    if (launch.rank() == 0) check_output(options.json_path, {config_file(options.config_path)});
    const int gpu = launch.agree_on_gpu(wants_gpu(given, options.started));
    const std::unique_ptr<Device> device = make_device(given, std::max(0, gpu));
    check_memory(given, GivenConfig::read(options.config_path, options.overrides), *device, launch.size());
    const Config config = use_found_tuning(given, options.config_path, *device, launch.size());
    const std::unique_ptr<Communicator> communicator = launch.make_communicator(*device);
    heartbeat("benchmark");
    const BenchResult result = run_benchmark(config, *device, *communicator, options.steps, options.roofline);
    if (launch.rank() != 0) return 0;
    if (result.documents != config.data.documents) {
      log_warning(
          "data.documents = separate was measured as joined: synthetic tokens have documents only where "
          "data.document_start or document_end marks them");
    }
    print_ops(result, options.roofline);
    print_sections(result);
    print_step(result, options.roofline);
    if (device->kind() == DeviceKind::kCuda) {
      std::printf("GEMM algorithms %s\n", config.device.gemm_tuning_is_off() ? "cuBLASLt's first choices"
                                                                             : config.device.gemm_tuning.c_str());
    }
    if (!options.json_path.empty()) {
      write_output(options.json_path, result_json(result, config, options.roofline).dump(2) + "\n");
    }
    return 0;
  });
}

}  // namespace parka
