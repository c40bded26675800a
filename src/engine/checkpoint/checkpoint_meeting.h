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

// How ranks that save a checkpoint together agree: through two folders in its draft (step_<N>.tmp), and nothing
// else.
//   attempt_<id>/             rank 0 makes it, and so lets the save begin; all write their files into it; rank 0
//   adds
//                             the manifest and gives it the name step_<N>, and so ends the save
//   attempt_<id>.ranks/
//     rank_0003.done          rank 3 has written and synced its files; their names, sizes and checksums
//     rank_0003.failed        rank 3 has given up, because of an error of its own or of another rank; which
// Since the id is used once, whatever a rank of an earlier save still does goes into folders that are not there any
// more.
namespace parka {

class SaveMeeting {
 public:
  // `final_path` is the step's folder and `draft` its draft, in run folder `folder`. While a rank waits it also
  // asks options.check_folder.
  SaveMeeting(const SaveOptions& options, ObservedFiles& files, std::string folder, std::string final_path,
              std::string draft);

  // Where the files of the checkpoint are written.
  const std::string& attempt_path() const { return attempt_path_; }

  // Throws the error of a rank that failed, if one did, and Error(kIo) when rank 0 has given the save up.
  void check();

  // Of rank 0: lets the save begin. The draft's folder is there and empty.
  void open();
  // Of rank 0: the files that all ranks have left, by rank.
  std::vector<Manifest::File> wait_for_files();
  // Of rank 0, after leave_failure(): gives the others the time to read why, as long as they are expected to need.
  void wait_until_others_left() noexcept;

  // Of the other ranks.
  void wait_until_open();
  // Returns when the checkpoint is complete and durable.
  void wait_until_complete();

  // Of all ranks: says which files this one has written.
  void leave_files(const std::vector<Manifest::File>& files);
  // Of all ranks: tells the others that this one gives up, as far as the file system lets it. `error` is what this
  // rank met with, unless check() has thrown: then the others get to know what that was.
  void leave_failure(const std::string& message, ExitCode code) noexcept;

 private:
  std::string path_of(int rank, std::string_view state) const;
  void check_failures(const std::vector<std::string>& names);
  [[noreturn]] void throw_given_up();
  [[noreturn]] void throw_missing();
  bool is_attempt_there() const;
  bool is_complete() const;
  void check_folder() const;
  // Calls `finished` until it says so. False after more than `patience`.
  bool poll(std::chrono::milliseconds patience, const std::function<bool()>& finished) const;

  const SaveGroup& group_;
  const std::function<void()>& check_folder_;
  ObservedFiles& files_;
  const std::string folder_, final_path_, draft_;
  const std::string attempt_name_, attempt_path_, ranks_path_;
  const std::chrono::milliseconds farewell_;  // how long the others are given to notice something
  std::optional<Error> failure_of_other_;
};

}  // namespace parka
