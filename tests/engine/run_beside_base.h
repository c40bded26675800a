#pragma once
#include <functional>
#include <string>

#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/inference_run.h"
#include "engine/training/training_run.h"
#include "tests/engine/run_bytes.h"
#include "tests/engine/step_config.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/thread_ranks.h"

// Runs that train something beside the frozen weights of another run: adapters, side networks.
namespace parka::test {

// Of the other run, in FOLDER/base, on random tokens.
inline Config base_config(const TemporaryFolder& folder, const std::string& recipe, int64_t stage = 0,
                          int64_t ranks = 1) {
  Config config = step_config(folder.path().string(), recipe, stage, /*is_llama=*/true, 1, ranks);
  write_tokens(config.data.train[0], 100 * kStepSequence);
  config.optimizer.lr = 3e-3;
  config.optimizer.schedule.kind = ScheduleKind::kConstant;
  config.checkpoint.folder = folder.path().string() + "/base";
  return config;
}

// Weights of this rank, frozen ones and their codes too, with the states.
inline TensorBytes bytes_of(const TrainingRun& run) {
  TensorBytes all;
  for (const NamedTensor& t : run.optimizer().state()) all[t.name] = bytes_of(t.view);
  const std::vector<ParameterInfo>& parameters = run.model().parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    if (!parameters[i].is_coded()) {
      all[name] = bytes_of(run.model().weights().own()[i]);
      continue;
    }
    for (const CodeTensor& codes : run.model().weights().code_tensors(static_cast<int>(i))) {
      all[name + std::string(codes.suffix)] = bytes_of(codes.view);
    }
  }
  return all;
}

inline LoadedCheckpoint save(TrainingRun& run, const std::string& folder) {
  save_checkpoint(folder, run.snapshot(), {});
  return load_checkpoint(list_checkpoints(folder).back().path);
}

// Another run goes on from the run's newest checkpoint to the same bits, and the checkpoint is evaluated as it is.
inline void check_goes_on(TrainingRun& run, const LoadedCheckpoint& checkpoint, const Config& config) {
  const auto device = make_cpu_device();
  TrainingRun restored(config, *device, alone());
  restored.restore(checkpoint);
  CHECK((bytes_of(restored) == bytes_of(run)));
  InferenceRun inference(*device, open_checkpoint(checkpoint.path()), config);
  CHECK(evaluate_loss(*device, inference.model(), restored.data(), 1, 8, alone(), {}).loss ==
        evaluate_loss(*device, restored.model(), restored.data(), 1, 8, alone(), {}).loss);
  for (int i = 0; i < 2; ++i) CHECK(run.step()->loss == restored.step()->loss);
  CHECK((bytes_of(restored) == bytes_of(run)));
}

// A run of a step, saved: what runs beside it start from.
inline LoadedCheckpoint make_base(const Config& config) {
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize();
  run.step();
  return save(run, config.checkpoint.folder);
}

// Two ranks begin with `base` and take three steps: their losses are the same at each ZeRO stage up to
// `last_stage`, with released gradients and without, and rise or fall.
inline void check_same_at_every_stage(const LoadedCheckpoint& base, int64_t last_stage,
                                      const std::function<Config(int64_t stage)>& config_of) {
  const auto losses = [&](int64_t stage, bool releases) {
    Config config = config_of(stage);
    config.optimizer.clip_norm = 0;
    config.optimizer.release_gradients = releases;
    config.reliability = {.replay_interval = 1, .state_interval = 1};
    std::vector<double> all;
    ThreadRanks(2).run([&](Communicator& communicator) {
      const auto device = make_cpu_device();
      TrainingRun run(config, *device, communicator);
      run.initialize_from(base);
      for (int i = 0; i < 3; ++i) {
        const std::optional<StepReport> report = run.step();
        PARKA_REQUIRE(report && report->applied);  // Catch2's own are not for several threads
        if (communicator.rank() == 0) all.push_back(report->loss);
      }
    });
    return all;
  };
  const std::vector<double> undivided = losses(0, false);
  CHECK(undivided.front() != undivided.back());
  for (int64_t stage = 0; stage <= last_stage; ++stage) {
    CAPTURE(stage);
    CHECK(losses(stage, false) == undivided);
    CHECK(losses(stage, true) == undivided);
  }
}

}  // namespace parka::test
