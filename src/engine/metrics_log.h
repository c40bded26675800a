#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include <nlohmann/json.hpp>

#include "engine/file_io.h"

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

  struct Removed {
    int64_t later = 0;       // records of a later step
    int64_t unreadable = 0;  // lines that are not a JSON object: torn by a crash
  };
  // For a run that resumes after `step`: takes out what the dead run wrote after that step, in one atomic
  // replacement. All other lines stay as they are, byte for byte. A missing file is fine.
  static Removed truncate_after(const std::string& path, int64_t step);

 private:
  void follow_path();

  std::string path_;
  MetricsHooks hooks_;
  FileDescriptor file_;
};

}  // namespace parka
