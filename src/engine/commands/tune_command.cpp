#include <cstdio>

#include "core/error.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/files/gemm_tuning_file.h"
#include "engine/products/product_scratch.h"
#include "engine/step/recorded_step.h"

namespace parka {

// The products are those of a step with two micro-batches: a weight gradient is written by the first and added to
// by the second, which are two products. Where gradients are released it has one. Ranks that share sequences have
// products of a part of the tokens each; what else ranks divide changes no product.
int run_tune(const TuneOptions& options) {
  Config config = load_config(options.config_path, options.overrides);
  check_output(options.output, {config_file(options.config_path)});
  if (num_cuda_devices() == 0) {
    throw_bad_input(
        "parka tune times algorithms on a GPU, and {}; run it on the machine that trains, with a build that has CUDA",
        cuda_version().empty() ? "this parka was built without CUDA" : "no GPU is visible here");
  }
  config.device.kind = DeviceChoice::kCuda;
  config.training.global_batch_size =
      (config.optimizer.release_gradients ? 1 : 2) * config.training.micro_batch_size;
  const int64_t num_ranks = config.distributed.context_parallel;
  if (num_ranks > 1) config.distributed = {.context_parallel = num_ranks};
  const std::unique_ptr<Device> device = make_untuned_device(config);
  const std::vector<GemmChoice> choices =
      tune_products(*device, record_products(config, num_ranks),
                    {.max_candidates = static_cast<int>(options.candidates), .budget_seconds = options.seconds});
  std::printf("%-72s %12s %12s %8s\n", "GEMM, M x N x K", "default us", "chosen us", "gain");
  for (const GemmChoice& choice : choices) {
    std::printf("%-72s %12.1f %12.1f %7.1f%%\n", choice.gemm.c_str(), choice.default_microseconds,
                choice.microseconds, 100 * (choice.default_microseconds / choice.microseconds - 1));
  }
  write_gemm_tuning(options.output, choices, *device);
  std::printf("wrote %s; use it with device.gemm_tuning=%s\n", options.output.c_str(), options.output.c_str());
  return 0;
}

}  // namespace parka
