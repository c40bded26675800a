#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "engine/commands.h"
#include "engine/device_setup.h"
#include "engine/evaluation.h"
#include "engine/inference_run.h"

namespace parka {

int run_eval(const EvalOptions& options) {
  const LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint);
  std::vector<std::string> overrides = options.overrides;
  if (!options.data.empty()) overrides.push_back("data.eval=" + nlohmann::json(options.data).dump());
  // As many sequences at a time as training had; the loss does not depend on it beyond rounding.
  const Config config = config_of(checkpoint, overrides);
  const std::unique_ptr<Device> device = make_device(config);
  InferenceRun run(*device, checkpoint, config);
  const DataConfig& data = run.config().data;
  if (data.eval.empty())
    throw_bad_input("{}: its config names no held-out files; give some with --data", checkpoint.path());
  const TokenFiles files(data.eval, data.token_dtype, data.sequence_length, run.config().model.vocab_size);
  const std::unique_ptr<Communicator> alone = make_single_communicator();
  const EvaluationResult result =
      evaluate_loss(*device, run.model(), files, config.training.micro_batch_size, options.max_sequences, *alone);
  if (options.json) {
    const nlohmann::ordered_json line = {{"checkpoint", checkpoint.path()},
                                         {"step", checkpoint.step()},
                                         {"data", data.eval},
                                         {"loss", result.loss},
                                         {"perplexity", std::exp(result.loss)},
                                         {"num_targets", result.num_targets}};
    std::printf("%s\n", line.dump().c_str());
  } else {
    std::printf("%s\nloss        %.6f nats/token\nperplexity  %.4f\ntargets     %lld in %lld sequences\n",
                checkpoint.path().c_str(), result.loss, std::exp(result.loss),
                static_cast<long long>(result.num_targets), static_cast<long long>(result.num_sequences));
  }
  return 0;
}

}  // namespace parka
