#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "engine/files/file_io.h"
#include "engine/files/json.h"
#include "engine/training/run_lock.h"

namespace parka {

// The subject of an evaluation's record: "data.eval", "set NAME" or "task NAME"; empty for other records.
std::string evaluated(const json& record);

// The metrics of a run: a text file to which one JSON object per line is added (JSON Lines). A record that
// describes a training step has an integer field "step".
class MetricsLog {
 public:
  // Opens or creates the file for appending. Throws Error(kBadInput) or Error(kIo). `lock`: of a run's folder.
  explicit MetricsLog(std::string path, const RunLock* lock = nullptr);

  // Appends one line and passes it to the system before it returns, so that a kill of this process loses nothing.
  // NaN and infinities become null. Throws Error(kIo); the file then still ends with a whole line. If the file was
  // removed, moved or replaced since it was opened, it warns, and the line goes to the file that is at the
  // path now, or to a new one, unless the folder is no longer the run's.
  void write(const ordered_json& record);
  // The same, and a new file in place of one that is gone begins with this record, too.
  void write_first(const ordered_json& record);

  // Makes what was written durable. May be called from another thread than write().
  void sync();

  struct Truncated {
    int64_t later = 0;        // records of a later step that were removed
    int64_t evaluations = 0;  // records of evaluations at `step` that were removed
    int64_t unreadable = 0;   // lines removed because they are not a JSON object: torn by a crash
    std::string set_aside;    // new name of a file that had nothing else
    // The steps up to `step`, as far as a resumed run looks, without a "train" record: how many, first, last.
    int64_t missing = 0, first_missing = 0, last_missing = 0;
  };
  // For a run that resumes after `step`: removes the records of later steps, in one atomic replacement. All other
  // lines stay byte for byte. It reads the file from its end, up to records of earlier steps, but all of a short
  // one: what is before them earlier starts have looked at. A missing file is fine; if the path is a link, its
  // target is replaced. Evaluations at `step` of what is `made_again`, by evaluated(), are removed too. A file
  // without any record is renamed to <path>.1 and so on: it is no run's.
  static Truncated truncate_after(const std::string& path, int64_t step,
                                  const std::set<std::string>& made_again = {});

  // For a new run: removes the records of a run that ended before its first checkpoint. If there are records of
  // training steps, the file is renamed to <path>.1 and so on; returns that name.
  static std::string begin_anew(const std::string& path);

 private:
  void follow_path();
  void append(const std::string& lines);

  const std::string path_;
  const RunLock* lock_;
  std::mutex mutex_;  // of file_
  FileDescriptor file_;
  std::string first_;  // line of a new file
};

}  // namespace parka
