#include <cmath>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/restored_model.h"
#include "engine/evaluation/inference_run.h"
#include "model/precision_recipe.h"

// Prints how far the residual stream is from that of bf16 after every block, for several ways of scaling: figure
// 4a of COAT's paper (arXiv 2410.19313), as a Markdown table.
namespace {

using namespace parka;
using namespace parka::bench;

using Streams = std::vector<std::vector<float>>;  // after each block, [T * d]

// Copies what a block leaves: the stream, and the branch that is still to be added to it.
class StreamReader : public UnitHooks {
 public:
  StreamReader(const RestoredModel& model, bool keeps_norm_inputs)
      : model_(model), keeps_norm_inputs_(keeps_norm_inputs) {}

  void before_forward(Device& device, int unit) override {
    if (unit < 2) return;  // of the embedding, and of the first block: nothing is after a block
    const std::string kept = block_prefix(kDecoder, unit - 2) + "ffn_norm.input";
    std::vector<float> sum = as_floats(device, tensor(keeps_norm_inputs_ ? kept : "residual"));
    const std::vector<float> branch = as_floats(device, tensor("branch"));
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += branch[i];
    streams.push_back(std::move(sum));
  }
  void before_backward(Device&, int) override {}
  void after_backward(Device&, int) override {}

  Streams streams;

 private:
  TensorView tensor(const std::string& name) const {
    const TensorView found = model_.tensor(name);
    PARKA_REQUIRE(!found.empty());
    return found;
  }

  const RestoredModel& model_;
  bool keeps_norm_inputs_;
};

struct Way {
  const char* name;
  PrecisionConfig precision;
};

std::vector<Way> ways() {
  PrecisionConfig kept_only = precision_recipe(Recipe::kCoatActivation), coat = kept_only;
  kept_only.gemm = GemmPrecision::kCompute;
  PrecisionConfig coat_32 = coat;
  coat_32.group_size = 32;
  return {{"GEMMs per tensor (`fp8_linear`)", precision_recipe(Recipe::kFp8Linear)},
          {"GEMMs 1x128 and 128x128 (`fp8_block`)", precision_recipe(Recipe::kFp8Block)},
          {"norm inputs, up, gate and silu 1x16, GEMMs in bf16", kept_only},
          {"both: per tensor and 1x16 (`coat`)", coat},
          {"the same with 1x32", coat_32},
          {"`parka`", precision_recipe(Recipe::kParka)}};
}

Streams streams_with(Device& device, const LoadedCheckpoint& checkpoint, Config config,
                     const PrecisionConfig& precision) {
  config.precision = precision;
  RestoredModel model(device, checkpoint, config);
  StreamReader reader(model, precision.norm_input == Storage::kCompute);
  model.run_batch(&reader);
  return std::move(reader.streams);
}

// rms of a - b over that of b.
double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0, of_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    squares += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    of_b += double{b[i]} * b[i];
  }
  return std::sqrt(squares / of_b);
}

void print_all(const std::string& path) {
  const auto device = make_cpu_device();
  const LoadedCheckpoint checkpoint = open_checkpoint(path);
  const Config config = config_of(checkpoint);
  if (config.precision.compute != DType::kBF16 || config.model.norm_placement != NormPlacement::kBefore) {
    throw_bad_input("{}: needs a model in bf16 with model.norm_placement=before", checkpoint.path());
  }
  const Streams exact = streams_with(*device, checkpoint, config, precision_recipe(Recipe::kBf16));
  fmt::print(
      "rms of the residual stream's difference from bf16 over its own rms after each block, in %; step {}.\n\n",
      checkpoint.step());
  fmt::print("| what is FP8 |");
  for (size_t l = 1; l <= exact.size(); ++l) fmt::print(" {} |", l);
  fmt::print("\n|---|");
  for (size_t l = 1; l <= exact.size(); ++l) fmt::print("---|");
  fmt::print("\n");
  for (const Way& way : ways()) {
    const Streams coded = streams_with(*device, checkpoint, config, way.precision);
    fmt::print("| {} |", way.name);
    for (size_t l = 0; l < coded.size(); ++l) fmt::print(" {:.2f} |", 100 * relative_distance(coded[l], exact[l]));
    fmt::print("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("How far FP8 takes the residual stream from that of bf16, block by block");
  std::string path;
  app.add_option("checkpoint", path, "a checkpoint, or a run folder: its newest")->required();
  CLI11_PARSE(app, argc, argv);
  try {
    print_all(path);
  } catch (const Error& error) {
    fmt::print(stderr, "forward_error: {}\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "forward_error: {}\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
  return 0;
}
