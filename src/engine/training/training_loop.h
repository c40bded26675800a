#pragma once
#include <string>

#include "comm/launch/launch.h"
#include "engine/config/config.h"
#include "engine/training/run_lock.h"
#include "engine/training/run_records.h"
#include "kernels/device/device.h"

namespace parka {

// The arguments of `parka train` beside the config, and what it has found out by the time that training begins.
struct TrainingStart {
  RunRecords::Clock::time_point begun;  // when the program was
  std::string config_file;              // that the command line names
  bool must_be_new = false;             // refuse to start where checkpoints exist
  bool convert_states = false;          // resume with other formats of masters and moments
  std::string place;                    // how messages name this rank
  std::string gemm_line;                // what the log says of the algorithms of matrix products; empty: nothing
  ordered_json facts;                   // of the record that begins a start
};

// Trains one rank of the run in config.checkpoint.folder, whose lock it has, from where it stands to
// training.steps. Rank 0 alone writes the run's log, metrics and config; checkpoints are written and read by all
// ranks. Returns the exit code: kStopped where a signal has asked to stop, and the run has more to do.
int train(const Config& config, const TrainingStart& start, Launch& launch, const RunLock& lock, Device& device,
          Communicator& communicator);

// config.json of the run folder.
std::string resolved_text(const Config& config);

}  // namespace parka
