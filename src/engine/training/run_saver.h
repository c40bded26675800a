#pragma once
#include <cstdint>
#include <exception>
#include <string>

#include "engine/checkpoint/checkpoint_saver.h"
#include "engine/training/training_run.h"

namespace parka {

// Decides when and how a training run is saved: asynchronously if there is memory for it, otherwise while training
// waits. A failed save is tried again with the state of that moment; if that fails too, the run ends. All ranks of
// the run make the same calls after the same steps. No step may be unfinished in any call except failed().
class RunSaver {
 public:
  // `run` and `options` must outlive it. With config.async off, training waits for every save.
  RunSaver(TrainingRun& run, Communicator& communicator, const CheckpointConfig& config, SaveOptions options);

  // From here on memory to save asynchronously is made ready; otherwise the first save does that, and waits for it.
  // Only once the run has its weights: of a run beside a base less is saved.
  void prepare();
  // Begins a save of the current state; waits for the previous one. Throws Error(kCorrupted) if the state is
  // corrupted, and the error of a save whose second try has failed.
  void save();
  // Whether a save has failed on this rank since the last call of another function. Ranks see this at different
  // steps, so they must agree on when to save() again.
  bool failed() const { return saver_.failed(); }
  // Waits until nothing is left to save and the newest save is good.
  void finish();

  // Whether saves from here on remove no older checkpoint, however many there are: what is saved may be of no use.
  void keep_older(bool keeps) { keeps_older_ = keeps; }
  // The run goes on from the checkpoint of this step, beside which there may be older ones that were kept so.
  void continue_from(int64_t step) { kept_beside_ = step; }
  // The newest save is of use, also where it is tried again: removes the older ones that were kept beside it.
  void remove_older();

  // Seconds for which training has waited for saves since the last call.
  double take_wait_seconds();
  // Of the newest save that was begun; -1: none.
  int64_t newest_step() const { return newest_step_; }

 private:
  void begin();
  bool can_stage();
  bool is_so_on_any_rank(bool here);
  // Whether a save has failed on any.
  bool wait_for_all_ranks();
  void save_directly(const CheckpointContents& contents);
  // Whether the previous save has failed on any rank. Throws if it may not be tried again.
  bool previous_failed();

  TrainingRun& run_;
  Communicator& communicator_;
  const bool async_;
  const std::function<void(const std::string&)> report_;
  CheckpointSaver saver_;
  bool is_second_try_ = false, keeps_older_ = false;
  int64_t newest_step_ = -1;
  int64_t kept_beside_ = -1;  // the checkpoint beside which older ones are kept; -1: none
  double wait_seconds_ = 0;
  bool told_ = false;  // that there is too little memory
};

}  // namespace parka
