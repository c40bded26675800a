#include "bench/quantization_error.h"

#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/device/device.h"

// Prints what FP8 costs a stored moment, plain and with range expansion, as a Markdown table or as JSON lines.
namespace {

using namespace parka;
using namespace parka::bench;

constexpr int64_t kNumGroups = 4000;

struct Row {
  const GroupContent& content;
  QuantizationError plain, expanded;
};

void print_markdown_row(const Row& row) {
  fmt::print("| {} | {:.2f} / {:.2f} % | {:.1f} / {:.1f} % | {:.1e} / {:.1e} |\n", row.content.name,
             100 * row.plain.rms_relative, 100 * row.expanded.rms_relative, 100 * row.plain.max_relative,
             100 * row.expanded.max_relative, row.plain.normalised_mse, row.expanded.normalised_mse);
}

std::string json_of(const QuantizationError& error) {
  return fmt::format(R"({{"rms_relative": {:.6g}, "max_relative": {:.6g}, "normalised_mse": {:.6g}}})",
                     error.rms_relative, error.max_relative, error.normalised_mse);
}

void print_json_row(const Row& row) {
  fmt::print(R"({{"content": "{}", "groups": {}, "plain": {}, "expanded": {}}})"
             "\n",
             row.content.name, kNumGroups, json_of(row.plain), json_of(row.expanded));
}

int print_all(bool json) {
  const auto device = make_cpu_device();
  if (!json) {
    fmt::print("Stored as a first moment in E4M3, in groups of {}; each cell is plain / with range expansion.\n\n",
               kMomentGroup);
    fmt::print("| group content | rms relative error | max relative error | normalised MSE |\n");
    fmt::print("|---|---|---|---|\n");
  }
  for (const GroupContent& content : all_group_contents()) {
    const Row row{content, quantization_error(*device, content, false, kNumGroups),
                  quantization_error(*device, content, true, kNumGroups)};
    json ? print_json_row(row) : print_markdown_row(row);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = argc == 2 && std::strcmp(argv[1], "json") == 0;
  const bool markdown = argc == 1 || (argc == 2 && std::strcmp(argv[1], "markdown") == 0);
  if (!json && !markdown) {
    fmt::print(stderr, "usage: quantization_error [markdown|json]\n");
    return static_cast<int>(ExitCode::kBadInput);
  }
  return print_all(json);
}
