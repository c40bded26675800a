#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "comm/launch/launch.h"
#include "core/error.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/commands/version.h"
#include "engine/config/config_io.h"
#include "engine/config/given_keys.h"
#include "engine/files/file_io.h"
#include "engine/planning/bench.h"
#include "engine/products/product_power.h"
#include "engine/step/recorded_step.h"
#include "kernels/device/step_section_names.h"

namespace parka {
namespace {

// The rate that an op is judged by: FLOP/s for matrix products and attention, bytes per second for the others.
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
      std::printf(" %7.1f%%\n", 100 * rate / result.ceilings.copy_bandwidth);
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

std::string in_megahertz(const std::optional<double>& clock) {
  return clock ? fmt::format("{:.0f} MHz", 1e-6 * *clock) : "not measured";
}

// Of all ranks; the limit and the clock are those of rank 0's card.
void print_power(const BenchResult& result) {
  const std::optional<double> watts = result.watts(), joules = result.joules_per_token();
  if (!watts || !joules) {
    std::printf("power           not measured: %s\n", result.power_missing.c_str());
    return;
  }
  const RankPower& first = result.power.front();
  const std::string limit = first.limit_watts ? fmt::format(" of {:.0f} W", *first.limit_watts) : " W";
  std::printf("power           %9.1f%s%s, SM clock %s\n", *watts / result.ranks, limit.c_str(),
              result.ranks == 1 ? "" : " on average of ranks", in_megahertz(first.use.clock).c_str());
  std::printf("energy          %9.3f mJ/token%s\n", 1e3 * *joules, result.ranks == 1 ? "" : ", all ranks together");
}

void print_products(const std::vector<ProductPower>& products, const std::optional<double>& limit) {
  std::printf("\n%-24s %-26s %-6s %-5s %4s %10s %8s %7s %5s %9s %9s\n", "matrix product, M x N x K", "formats",
              "layout", "order", "used", "us", "TFLOP/s", "W", "limit", "mJ", "SM clock");
  double share = 0;
  for (const ProductPower& product : products) {
    share += product.flop_share;
    const std::string shape =
        fmt::format("{} x {} x {}", product.shape.rows, product.shape.cols, product.shape.depth);
    for (const MeasuredWay& way : product.ways) {
      std::printf("%-24s %-26s %-6s %-5s %4s %10.1f %8.1f", shape.c_str(), way.way.formats.c_str(),
                  way.way.layout.c_str(), way.way.swapped ? "b a" : "a b", way.way.is_used ? "*" : "",
                  1e6 * way.seconds, 1e-12 * way.flops());
      if (way.use.watts) {
        const std::string of_limit = limit ? fmt::format("{:.0f} %", 100 * *way.use.watts / *limit) : "";
        std::printf(" %7.1f %5s %9.3f %9s\n", *way.use.watts, of_limit.c_str(), 1e3 * *way.joules(),
                    in_megahertz(way.use.clock).c_str());
      } else {
        std::printf(" not measured\n");
      }
    }
  }
  std::printf("%zu shapes, %.1f %% of the FLOP of a step's products; *: as the config has it\n", products.size(),
              100 * share);
}

void print_step(const BenchResult& result, bool roofline) {
  const auto [shortest, longest] = std::minmax_element(result.step_seconds.begin(), result.step_seconds.end());
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
    const auto [least, most] = std::minmax_element(result.op_seconds.begin(), result.op_seconds.end());
    std::printf("of ranks        %9.2f to %.2f ms; faster ranks wait for the slowest\n", 1e3 * *least, 1e3 * *most);
  }
  for (const OpSummary& wait : result.waits) {
    std::printf("waits           %9.2f ms in %s for %s, %lld of them\n", 1e3 * wait.seconds,
                std::string(name_of(wait.section)).c_str(), wait.cost.shape.c_str(),
                static_cast<long long>(wait.count));
  }
  print_power(result);
  std::printf("copy            %9.1f GB/s, read and written\n", 1e-9 * result.ceilings.copy_bandwidth);
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

nlohmann::ordered_json or_null(const std::optional<double>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

nlohmann::ordered_json power_json(const BenchResult& result) {
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  for (const RankPower& rank : result.power) {
    ranks.push_back({{"watts", or_null(rank.use.watts)},
                     {"limit_watts", or_null(rank.limit_watts)},
                     {"sm_clock", or_null(rank.use.clock)}});
  }
  nlohmann::ordered_json json = {{"joules_per_token", or_null(result.joules_per_token())},
                                 {"watts", or_null(result.watts())},
                                 {"ranks", std::move(ranks)}};
  if (!result.power_missing.empty()) json["missing"] = result.power_missing;
  return json;
}

nlohmann::ordered_json products_json(const std::vector<ProductPower>& products) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const ProductPower& product : products) {
    for (const MeasuredWay& way : product.ways) {
      lines.push_back({{"rows", product.shape.rows},
                       {"cols", product.shape.cols},
                       {"depth", product.shape.depth},
                       {"flop_share", product.flop_share},
                       {"formats", way.way.formats},
                       {"layout", way.way.layout},
                       {"swapped", way.way.swapped},
                       {"used", way.way.is_used},
                       {"seconds", way.seconds},
                       {"flops", way.flops()},
                       {"watts", or_null(way.use.watts)},
                       {"joules", or_null(way.joules())},
                       {"sm_clock", or_null(way.use.clock)}});
    }
  }
  return lines;
}

nlohmann::ordered_json result_json(const BenchResult& result, const Config& config, bool roofline) {
  nlohmann::ordered_json ops = nlohmann::ordered_json::array();
  for (const OpSummary& op : result.ops) {
    nlohmann::ordered_json line = {{"section", name_of(op.section)},
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
  nlohmann::ordered_json json = {{"device", result.device},
                                 {"ranks", result.ranks},
                                 {"tokens_per_step", result.tokens_per_step},
                                 {"step_seconds", result.step_seconds},
                                 {"tokens_per_second", result.tokens_per_second()},
                                 {"sequences_per_second", result.sequences_per_second()},
                                 {"model_flops", flops},
                                 {"queue_seconds", result.queue_seconds},
                                 {"timed_step_seconds", result.timed_step_seconds},
                                 {"op_seconds_by_rank", result.op_seconds},
                                 {"copy_bandwidth", result.ceilings.copy_bandwidth},
                                 {"planned_bytes", result.planned_bytes},
                                 {"context_bytes", result.context_bytes},
                                 {"used_bytes", result.used_bytes},
                                 {"planned_host_bytes", result.planned_host_bytes},
                                 {"resident_host_bytes", result.resident_host_bytes}};
  if (result.speed.peak_flops > 0) json["mfu"] = result.speed.utilization(flops, 1);
  if (roofline) json["floor_seconds"] = result.floor_seconds();
  json["power"] = power_json(result);
  json["ops"] = std::move(ops);
  json["waits"] = nlohmann::ordered_json::array();
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
    if (options.power && launch.size() > 1) throw_bad_input("--power measures products on one GPU: start one rank");
    if (launch.rank() == 0) check_output(options.json_path, {config_file(options.config_path)});
    const int gpu = launch.agree_on_gpu(wants_gpu(given, options.started));
    const std::unique_ptr<Device> device = make_device(given, std::max(0, gpu));
    check_memory(given, GivenConfig::read(options.config_path, options.overrides), *device, launch.size());
    const Config config = use_found_tuning(given, options.config_path, *device, launch.size());
    const std::unique_ptr<Communicator> communicator = launch.make_communicator(*device);
    heartbeat("benchmark");
    const PowerSource power = find_power_counter(*device);
    const BenchResult result =
        run_benchmark(config, *device, *communicator, power, options.steps, options.roofline);
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
    nlohmann::ordered_json json = result_json(result, config, options.roofline);
    if (options.power) {
      const std::vector<ProductPower> products =
          measure_product_power(*device, power.counter.get(), record_products(config, 1), options.power_seconds);
      print_products(products, result.power.front().limit_watts);
      json["products"] = products_json(products);
    }
    if (!options.json_path.empty()) write_output(options.json_path, json.dump(2) + "\n");
    return 0;
  });
}

}  // namespace parka
