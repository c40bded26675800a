#include "bench/moment_error.h"

#include <cstring>
#include <map>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "engine/evaluation/inference_run.h"

// Reads the fp32 moments of a training run from its checkpoint, stores them in 8 bits in every combination of
// formats, and prints what that does to the update, as Markdown tables.
namespace {

using namespace parka;
using namespace parka::bench;

constexpr double kUnit = 1e-6;  // of the printed errors

// "blocks.3.qkv" and "qkv" of all other blocks are one kind.
std::string kind_of(const std::string& parameter) {
  if (!parameter.starts_with("blocks.")) return parameter;
  return parameter.substr(parameter.find('.', std::strlen("blocks.")) + 1);
}

std::vector<float> as_floats(const LoadedCheckpoint& checkpoint, const SafetensorsEntry& tensor, ByteSpan bytes) {
  if (tensor.dtype != DType::kF32) {
    throw_bad_input("{}: {} is {}: real moments are those of a run with optimizer.states=fp32", checkpoint.path(),
                    tensor.name, name_of(tensor.dtype));
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

struct Measured {
  std::map<std::string, UpdateErrors> kinds;
  MomentRanges first, second;
};

// By kind of parameter. Moments wait in memory only until the other one of their parameter was read.
Measured measure(Device& device, const LoadedCheckpoint& checkpoint, double eps) {
  constexpr std::string_view kFirst = ".exp_avg", kSecond = ".exp_avg_sq";
  Measured measured;
  std::map<std::string, std::vector<float>> waiting;
  for (const SafetensorsEntry& tensor : checkpoint.tensors()) {
    const bool is_second = tensor.name.ends_with(kSecond);
    if (!is_second && !tensor.name.ends_with(kFirst)) continue;
    const std::string parameter = tensor.name.substr(0, tensor.name.size() - (is_second ? kSecond : kFirst).size());
    std::vector<float> values = as_floats(checkpoint, tensor, checkpoint.read(tensor));
    const auto other = waiting.find(parameter);
    if (other == waiting.end()) {
      waiting.emplace(parameter, std::move(values));
      continue;
    }
    std::vector<float>&m = is_second ? other->second : values, &v = is_second ? values : other->second;
    measured.kinds[kind_of(parameter)].add(update_errors(device, m, v, eps));
    measured.first.add(m);
    measured.second.add(v);
    waiting.erase(other);
  }
  if (measured.kinds.empty()) throw_bad_input("{}: holds no moments of an optimizer", checkpoint.path());
  return measured;
}

// A table of value(format of m, format of v).
template <typename Value>
void print_formats(const Value& value) {
  fmt::print("| m \\ v |");
  for (const StoredFormat& second : kStoredFormats) fmt::print(" {} |", second.name);
  fmt::print("\n|---|---|---|---|---|---|---|\n");
  for (size_t i = 0; i < UpdateErrors::kFormats; ++i) {
    fmt::print("| {} |", kStoredFormats[i].name);
    for (size_t j = 0; j < UpdateErrors::kFormats; ++j) fmt::print(" {} |", value(i, j));
    fmt::print("\n");
  }
}

void print_kinds(const std::map<std::string, UpdateErrors>& kinds) {
  fmt::print(
      "| parameter | elements | mean u^2 | E4M3 | expanded | ratio | DE8 |\n|---|---|---|---|---|---|---|\n");
  for (const auto& [kind, errors] : kinds) {
    if (errors.counted == 0) continue;
    fmt::print("| {} | {} | {:.4f} | {:.1f} | {:.1f} | {:.2f} | {:.1f} |\n", kind, errors.counted,
               errors.mean_square(), errors.mse(kPlainE4M3, kPlainE4M3) / kUnit,
               errors.mse(kExpandedE4M3, kExpandedE4M3) / kUnit, errors.gain(), errors.mse(kDE8, kDE8) / kUnit);
  }
}

void print_ranges(const Measured& measured) {
  fmt::print(
      "\nGroups of 128: powers of two from the smallest to the largest magnitude, and the exponent that expands them. "
      "Median (5 to 95 %):\n\n| moment | groups | before | after | k |\n|---|---|---|---|---|\n");
  const auto cell = [](const std::vector<double>& values) {
    return fmt::format("{:.1f} ({:.1f} to {:.1f})", MomentRanges::quantile(values, 0.5),
                       MomentRanges::quantile(values, 0.05), MomentRanges::quantile(values, 0.95));
  };
  for (const bool is_second : {false, true}) {
    const MomentRanges& ranges = is_second ? measured.second : measured.first;
    fmt::print("| {} | {} | {} | {} | {} |\n", is_second ? "v" : "m", ranges.before.size(), cell(ranges.before),
               cell(ranges.after), cell(ranges.exponents));
  }
}

int print_all(const std::string& path, double eps) {
  const LoadedCheckpoint checkpoint = open_checkpoint(path);
  const auto device = make_cpu_device();
  Measured measured = measure(*device, checkpoint, eps);
  std::map<std::string, UpdateErrors>& kinds = measured.kinds;
  UpdateErrors all;
  for (const auto& [kind, errors] : kinds) all.add(errors);
  if (all.counted == 0) throw_bad_input("{}: all second moments are 0", checkpoint.path());
  fmt::print(
      "Mean of (u' - u)^2 in units of {:.0e}, u = m / (sqrt(v) + {:g}); step {}, {} elements, mean u^2 {:.4f}; "
      "left out, for v = 0: {}.\n\n",
      kUnit, eps, checkpoint.step(), all.counted, all.mean_square(), all.left_out);
  print_formats([&](size_t i, size_t j) { return fmt::format("{:.1f}", all.mse(i, j) / kUnit); });
  fmt::print("\nIts root, over that of {} for both:\n\n", kStoredFormats[kPlainE4M3].name);
  print_formats([&](size_t i, size_t j) {
    return fmt::format("{:.3f}", std::sqrt(all.mse(i, j) / all.mse(kPlainE4M3, kPlainE4M3)));
  });
  fmt::print("\nOther pairs:\n\n| formats | error |\n|---|---|\n");
  for (uint8_t pair = 0; pair < OtherPair::kCount; ++pair) {
    fmt::print("| {} | {:.1f} |\n", OtherPair::kNames[pair], all.mse(OtherPair::Which{pair}) / kUnit);
  }
  print_ranges(measured);
  fmt::print("\nBy kind of parameter, the same format for both; the ratio is of E4M3 to E4M3 expanded:\n\n");
  kinds["all"] = all;
  print_kinds(kinds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What 8-bit formats of Adam's moments do to the update, on the fp32 moments of a checkpoint");
  std::string path;
  double eps = 1e-8;
  app.add_option("checkpoint", path, "a checkpoint, or a run folder: its newest")->required();
  app.add_option("--eps", eps, "added to sqrt(v)")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    return print_all(path, eps);
  } catch (const Error& error) {
    fmt::print(stderr, "moment_error: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "moment_error: {}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
}
