#pragma once
#include <cstdint>
#include <exception>
#include <string>

#include "engine/checkpoint/checkpoint_saver.h"
#include "engine/training/training_run.h"

namespace parka {

// When and how a training run is saved: beside the training where there is memory for it, otherwise while the
// training waits. A save that fails is tried again, with the state of then; when that fails too, the run ends. All
// ranks of the run make the same calls after the same steps. No step may be unfinished in any of them but failed().
class RunSaver {
 public:
  // Uses `run` and `options` until it goes. With config.async off nothing is done beside the training.
  RunSaver(TrainingRun& run, Communicator& communicator, const CheckpointConfig& config, SaveOptions options);

  // Begins a save of the present state; waits for the one before. Throws Error(kCorrupted) where the state is not
  // sound, and the error of a save whose second try has failed.
  void save();
  // Whether a save has failed on this rank since the last call of another function. Ranks learn of it at different
  // steps: they agree on when to save() again.
  bool failed() const { return saver_.failed(); }
  // Returns when nothing is left to save and the newest save is good.
  void finish();

  // Seconds for which training has stood still for saving since the last call.
  double take_wait_seconds();
  // Of the newest save that was begun; -1: none.
  int64_t newest_step() const { return newest_step_; }

 private:
  void begin();
  bool can_stage();
  // Whether the save before has failed on any rank. Throws where no other try may follow.
  bool previous_failed();

  TrainingRun& run_;
  Communicator& communicator_;
  const bool async_;
  const std::function<void(const std::string&)> report_;
  CheckpointSaver saver_;
  bool is_second_try_ = false;
  int64_t newest_step_ = -1;
  double wait_seconds_ = 0;
  bool told_ = false;  // that there is too little memory
};

}  // namespace parka
