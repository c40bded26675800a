#pragma once
#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_files.h"
#include "engine/checkpoint/checkpoint_layout.h"

// How ranks that save a checkpoint together coordinate: only through two folders in its draft (step_<N>.tmp).
//   attempt_<id>/          Rank 0 creates it to begin the save. All write their files into it. Rank 0 adds the
//                          manifest and renames it to step_<N>, which ends the save.
//   attempt_<id>.ranks/
//     rank_0003.done       Rank 3 has written and synced its files: their names, sizes and checksums.
//     rank_0003.failed     Rank 3 has given up, because of its own error or another rank's: the error.
// An id is used once, so a rank of an earlier save writes only into folders that no longer exist.
namespace parka {

class SaveBarrier {
 public:
  // `final_path` is the step's folder and `draft` its draft, in run folder `folder`. A waiting rank also calls
  // options.check_folder and is_given_up.
  SaveBarrier(const SaveOptions& options, ObservedFiles& files, std::string folder, std::string final_path,
              std::string draft);

  // The folder in which the files of the checkpoint are written.
  const std::string& attempt_path() const { return attempt_path_; }

  // Throws the error of a failed rank, if there is one, and Error(kIo) if rank 0 has given up the save.
  void check();

  // Rank 0: begins the save. The draft's folder exists and is empty.
  void open();
  // Rank 0: waits for the files of all ranks, and returns them by rank.
  std::vector<Manifest::File> wait_for_files();
  // Rank 0, after leave_failure(): gives the others time to read the error.
  void wait_until_others_left() noexcept;

  // The part of the other ranks.
  void wait_until_open();
  // Returns when the checkpoint is complete and durable.
  void wait_until_complete();

  // All ranks: reports which files this rank has written.
  void leave_files(const std::vector<Manifest::File>& files);
  // All ranks: tells the others, as far as the file system allows, that this rank gives up. `error` is this rank's
  // error; if check() has thrown, the others get that error instead.
  void leave_failure(const std::string& message, ExitCode code) noexcept;

 private:
  std::string path_of(int rank, std::string_view state) const;
  void check_failures(const std::vector<std::string>& names);
  [[noreturn]] void throw_given_up();
  [[noreturn]] void throw_missing();
  bool is_attempt_there() const;
  bool is_complete() const;
  void check_folder() const;
  // Calls `finished` until it returns true. Returns false after more than `patience`.
  bool poll(std::chrono::milliseconds patience, const std::function<bool()>& finished) const;

  const SaveGroup& group_;
  const std::function<void()>& check_folder_;
  const std::function<bool()>& is_given_up_;
  ObservedFiles& files_;
  const std::string folder_, final_path_, draft_;
  const std::string attempt_name_, attempt_path_, ranks_path_;
  const std::chrono::milliseconds farewell_;  // how long the others have to notice a failure
  std::optional<Error> failure_of_other_;
};

}  // namespace parka
