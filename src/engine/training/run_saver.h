#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/checkpoint/checkpoint.h"
#include "engine/training/training_run.h"

namespace parka {

// Decides when and how a training run is saved: by a thread beside the training if there is memory for it,
// otherwise while training waits. A failed save is tried again with the state of that moment; if that fails too,
// the run ends. All ranks of the run make the same calls after the same steps. No step may be unfinished in any
// call except failed(). Observer and report of the options are called from the thread.
class RunSaver {
 public:
  // `run` must outlive it. With config.async off, training waits for every save. Throws Error(kBadInput) where the
  // system allows no further thread.
  RunSaver(TrainingRun& run, Communicator& communicator, const CheckpointConfig& config, SaveOptions options);
  // Waits for the present save. An error that nobody has seen yet goes to options.report.
  ~RunSaver();
  RunSaver& operator=(RunSaver&&) = delete;

  // From here on memory to save asynchronously is made ready; otherwise the first save does that, and waits for it.
  // Only once the run has its weights: of a run beside a base less is saved.
  void prepare();
  // Begins a save of the current state; waits for the previous one. Throws Error(kCorrupted) if the state is
  // corrupted, and the error of a save whose second try has failed.
  void save();
  // True if a save has failed on this rank since the last call of another function. Ranks see this at different
  // steps, so they must agree on when to save() again.
  bool failed() const;
  // Waits until nothing is left to save and the newest save is good.
  void finish();

  // If true, saves from here on keep all older checkpoints, because the new one may be bad.
  void keep_older(bool keeps) { keeps_older_ = keeps; }
  // The run goes on from the checkpoint of this step, beside which there may be older ones that were kept so.
  void continue_from(int64_t step) { kept_beside_ = step; }
  // The newest save is of use, also where it is tried again: removes the older ones that were kept beside it, once
  // nothing is left to save. An error of that is kept like one of a save.
  void remove_older();

  // Seconds for which training has waited for saves since the last call.
  double take_wait_seconds();
  // The step of the newest save that was begun; -1: none.
  int64_t newest_step() const { return newest_step_; }

 private:
  void begin();
  bool can_stage();
  bool is_so_on_any_rank(bool here);
  // Returns true if nothing is left to save after so long at most.
  bool wait_for(std::chrono::milliseconds patience);
  // Returns true if a save has failed on any rank.
  bool wait_for_all_ranks();
  // Returns true if the previous save has failed on any rank. Throws if it may not be tried again.
  bool previous_failed();
  void save_here(const CheckpointContents& contents);
  // Returns the error, if there is one.
  std::exception_ptr try_to_save(const CheckpointContents& contents, SaveOptions options);
  void work();

  TrainingRun& run_;
  Communicator& communicator_;
  const std::string folder_;
  const bool async_;
  std::atomic<bool> is_given_up_ = false;  // the present save: it waits for other ranks, one of which has failed
  const SaveOptions options_;              // of the thread
  bool is_second_try_ = false, keeps_older_ = false;
  int64_t newest_step_ = -1;
  int64_t kept_beside_ = -1;  // the checkpoint beside which older ones are kept; -1: none
  double wait_seconds_ = 0;
  bool told_ = false;      // that there is too little memory
  int64_t num_saves_ = 0;  // begun; the same on all ranks

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::optional<CheckpointContents> next_;  // handed over, not yet taken by the thread
  std::optional<int64_t> newest_good_;      // the step beside which to remove older checkpoints, likewise
  bool is_working_ = false, stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace parka
