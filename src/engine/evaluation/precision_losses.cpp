#include "engine/evaluation/precision_losses.h"

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/inference_run.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

// Of one process with all weights on its device, and without what training adds beside them.
Config evaluating(Config config) {
  config.distributed = {};
  config.finetune = {};
  config.optimizer.frozen.clear();
  config.precision.offload_weights = false;
  return config;
}

}  // namespace

PrecisionLosses::PrecisionLosses(Device& device, const Config& config)
    : device_(device),
      config_(evaluating(config)),
      checkpoint_(open_checkpoint(config.checkpoint.init_from)),
      files_(open_token_files(config.data.eval.empty() ? config.data.train : config.data.eval, config)) {
  if (!has_base(checkpoint_)) return;
  throw_bad_input("{}: has weights beside those of another checkpoint; `parka export` it and import the result",
                  checkpoint_.path());
}

double PrecisionLosses::of(const PrecisionConfig& precision, int64_t num_sequences) const {
  Config config = config_;
  config.precision = precision;
  config.precision.offload_weights = false;
  config.precision.eval = EvalNumerics::kSame;
  InferenceRun run(device_, checkpoint_, config);
  const EvaluationResult result = evaluate_loss(device_, run.model(), files_, config.training.micro_batch_size,
                                                num_sequences, *make_single_communicator());
  check_evaluation(checkpoint_.path(), result);
  return result.loss;
}

std::optional<LossesOfStart> losses_of_start(Device& device, const Config& config) {
  constexpr double kMostSeconds = 10;  // of one of two evaluations
  constexpr int64_t kMostBatches = 64;
  if (config.checkpoint.init_from.empty() || !config.precision.has_fp8()) return std::nullopt;
  const LoadedCheckpoint checkpoint = open_checkpoint(config.checkpoint.init_from);
  if (has_base(checkpoint) || config_of(checkpoint).precision.has_fp8()) return std::nullopt;
  const PrecisionLosses losses(device, config);
  const int64_t batch = config.training.micro_batch_size;
  const auto begun = std::chrono::steady_clock::now();
  losses.of(config.precision, batch);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  if (seconds > 2 * kMostSeconds) return std::nullopt;
  const auto batches = static_cast<int64_t>(std::clamp(kMostSeconds / seconds, 1.0, double{kMostBatches}));
  const int64_t sequences = std::min(batch * batches, losses.num_sequences());
  return LossesOfStart{losses.of(without_fp8(config.precision), sequences), losses.of(config.precision, sequences),
                       sequences};
}

}  // namespace parka
