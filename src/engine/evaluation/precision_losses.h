#pragma once
#include <cstdint>
#include <optional>

#include "data/token_files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "kernels/device/device.h"

namespace parka {

// The weights of checkpoint.init_from evaluated on the same sequences in one precision after the other: those of
// data.eval, or of data.train where there are none.
class PrecisionLosses {
 public:
  // `config` is a run's. Throws Error(kBadInput) for weights of another model, and for what was trained beside
  // others.
  PrecisionLosses(Device& device, const Config& config);

  // The mean loss in nats over so many sequences, spread evenly over the files; 0: all of them.
  double of(const PrecisionConfig& precision, int64_t num_sequences) const;
  int64_t num_sequences() const { return files_.num_sequences(); }

 private:
  Device& device_;
  Config config_;
  LoadedCheckpoint checkpoint_;
  TokenFiles files_;
};

// Where a run begins with weights that were not trained in FP8, and computes in FP8: the losses with and without,
// of as many sequences as take half a minute or less. Nothing where one micro-batch takes longer.
struct LossesOfStart {
  double plain = 0, fp8 = 0;
  int64_t num_sequences = 0;
};
std::optional<LossesOfStart> losses_of_start(Device& device, const Config& config);

}  // namespace parka
