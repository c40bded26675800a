#include "engine/planning/step_model.h"

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// What `parka bench --json` writes.
FUZZ_TARGET(step_measurement) {
  test::write_file(folder() / "bench.json", std::string(input));
  StepMeasurement measured;
  if (!accepts([&] { measured = read_step_measurement(folder() / "bench.json"); })) return;
  require(measured.ranks >= 1 && measured.num_micro_batches() >= 1, "a step without micro-batches");
  require(measured.step_seconds > 0 && measured.tokens_per_second_per_gpu() > 0, "a step that takes no time");
  constexpr int64_t kMostLayers = 16;  // what more have takes time, and nothing that fewer have not
  if (measured.config.model.num_layers > kMostLayers) return;
  constexpr int64_t kMostMicroBatches = 100;  // `parka plan` takes more, and no more than 16384
  if (measured.ranks * measured.num_micro_batches() > kMostMicroBatches) return;
  accepts([&] { predict_step_by(measured, measured.config, Links{}, 1); });
  accepts([&] { require_measurement_of(measured, measured.config, 1); });
}
