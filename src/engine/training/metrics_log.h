#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include <nlohmann/json.hpp>

#include "engine/files/file_io.h"

namespace parka {

struct MetricsHooks {
  // Throws when the folder is not the run's any more (RunLock::require_ours).
  std::function<void()> check_folder = {};
  std::function<void(const std::string& message)> report = {};
};

// The metrics of a run: a text file to which one JSON object per line is added (JSON Lines). A record that
// describes a training step has an integer field "step".
class MetricsLog {
 public:
  // Opens the file for adding, creates it where there is none. Throws Error(kBadInput) or Error(kIo).
  explicit MetricsLog(std::string path, MetricsHooks hooks = {});

  // Adds one line and hands it to the system before it returns, so that a kill of this process loses nothing. NaN
  // and infinities become null. Throws Error(kIo); the file then still ends with a whole line. Where the file was
  // removed, moved or replaced since it was opened the line goes to the file that is at the path now, a new one
  // where there is none, unless the folder is not the run's any more; that is reported.
  void write(const nlohmann::ordered_json& record);

  // Makes what was written durable. May be called from another thread than write().
  void sync();

  struct Truncated {
    int64_t later = 0;            // records of a later step that were removed
    int64_t unreadable = 0;       // lines that were, for they are not a JSON object: torn by a crash
    int64_t last_train_step = 0;  // of the records of kind "train" that stay; 0: there are none
  };
  // For a run that resumes after `step`: takes out what the dead run wrote after that step, in one atomic
  // replacement. All other lines stay as they are, byte for byte. A missing file is fine; one that the path only
  // links to is replaced where it lies. Without `keep_evaluations` what was evaluated at `step` is taken out, too.
  static Truncated truncate_after(const std::string& path, int64_t step, bool keep_evaluations = true);

  // For a new run: empties the file of what a run wrote that ended before its first checkpoint. Where there are
  // records of training steps the file is kept under the name that is returned, <path>.1 and so on.
  static std::string begin_anew(const std::string& path);

 private:
  void follow_path();

  const std::string path_;
  MetricsHooks hooks_;
  std::mutex mutex_;  // of file_
  FileDescriptor file_;
};

}  // namespace parka
