#pragma once
#include <string>

#include "engine/files/file_io.h"

namespace parka {

// A new folder that gets its name only when it is complete; after an error it does not appear at all. Until then it
// is <path>.tmp, with a file in it that this process has locked: one of a command that was killed is known by that,
// and removed.
class DraftFolder {
 public:
  // Throws Error(kBadInput) if `path` exists: nothing is ever overwritten; or if another command writes the same.
  explicit DraftFolder(std::string path);
  DraftFolder(const DraftFolder&) = delete;
  DraftFolder& operator=(const DraftFolder&) = delete;
  ~DraftFolder();  // removes what was not published

  std::string operator/(const std::string& name) const { return draft_ + "/" + name; }
  // Gives the folder its name; files in it must have been synced.
  void publish();

 private:
  std::string path_, draft_;
  FileDescriptor mark_{-1};
  bool published_ = false;
};

// Creates a file with `text`, durable when this returns.
void write_new_file(const std::string& path, const std::string& text);
// Likewise with the content of another file.
void copy_to_new_file(const std::string& from, const std::string& to);

}  // namespace parka
