#include "bench/activation_error.h"

#include <array>
#include <cstring>
#include <map>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/restored_model.h"
#include "engine/evaluation/inference_run.h"

// Prints what E4M3 costs activations in groups of 16 to 128 and with one scale for all, as a Markdown table: of
// random numbers and, given a checkpoint, of what the model keeps for backward on a batch of its training data.
namespace {

using namespace parka;
using namespace parka::bench;

constexpr std::array<int64_t, 5> kGroups = {16, 32, 64, 128, 0};  // 0: one scale for the matrix

using ErrorsByGroup = std::array<CodeErrors, kGroups.size()>;

void add_errors(Device& device, const TensorView& x, ErrorsByGroup& errors) {
  for (size_t i = 0; i < kGroups.size(); ++i) add_code_errors(device, x, kGroups[i], errors[i]);
}

void print_row(const std::string& name, const ErrorsByGroup& errors) {
  fmt::print("| {} |", name);
  for (const CodeErrors& e : errors)
    fmt::print(" {:.2f} / {:.2f} |", 100 * e.rms_relative(), 100 * e.normalised_rms());
  fmt::print("\n");
}

void print_random_contents(Device& device) {
  constexpr int64_t kRows = 2048, kCols = 1024;
  for (const ActivationContent& content : kActivationContents) {
    std::vector<float> values = activation_content(content, kRows * kCols);
    ErrorsByGroup errors;
    add_errors(device, {values.data(), DType::kF32, {kRows, kCols}}, errors);
    print_row(content.name, errors);
  }
}

// Of plain activations that backward reads, which keep their memory until the next step, by name without
// "blocks.N.".
std::map<std::string, ErrorsByGroup> errors_of_kept(Device& device, const RestoredModel& model) {
  std::map<std::string, ErrorsByGroup> kinds;
  for (size_t i = 0; i < model.entries().size(); ++i) {
    const MemoryPlan::Entry& entry = model.entries()[i];
    const bool is_plain = entry.dtype == DType::kBF16 || entry.dtype == DType::kF32;
    const bool is_block = entry.category == "saved activations" && entry.name.starts_with("blocks.");
    if (!is_block || !is_plain || entry.shape.size() != 2) continue;
    const std::string kind = entry.name.substr(entry.name.find('.', std::strlen("blocks.")) + 1);
    add_errors(device, model.tensor(i), kinds[kind]);
  }
  return kinds;
}

void print_checkpoint(Device& device, const std::string& path) {
  const LoadedCheckpoint checkpoint = open_checkpoint(path);
  Config config = config_of(checkpoint);
  config.precision.offload_weights = false;  // no hooks copy them
  RestoredModel model(device, checkpoint, config);
  model.run_batch();
  const auto kinds = errors_of_kept(device, model);
  if (kinds.empty()) {
    throw_bad_input("{}: keeps no plain activations: train with precision.recipe=bf16", checkpoint.path());
  }
  for (const auto& [kind, errors] : kinds) print_row(kind, errors);
}

void print_all(const std::string& path) {
  const auto device = make_cpu_device();
  fmt::print("E4M3; each cell is the rms of (stored - x) / x, and the rms of stored - x over that of x, in %.\n\n");
  fmt::print("| content |");
  for (int64_t group : kGroups) fmt::print(" {} |", group == 0 ? "tensor" : fmt::format("1x{}", group));
  fmt::print("\n|---|---|---|---|---|---|\n");
  print_random_contents(*device);
  if (!path.empty()) print_checkpoint(*device, path);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What E4M3 costs activations, by the size of the groups that share a scale");
  std::string path;
  app.add_option("checkpoint", path, "a checkpoint, or a run folder: activations of its model, too");
  CLI11_PARSE(app, argc, argv);
  try {
    print_all(path);
  } catch (const Error& error) {
    fmt::print(stderr, "activation_error: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "activation_error: {}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
  return 0;
}
