#pragma once
#include <string>

#include "engine/file_io.h"

namespace parka {

// Keeps a second training process out of a run folder, where the two would clear away each other's unfinished
// checkpoints. The lock ends with the process, however it ends; the file `lock` stays.
class RunLock {
 public:
  // Throws Error(kBadInput) when another process holds the lock.
  explicit RunLock(const std::string& folder);

 private:
  FileDescriptor file_;
};

}  // namespace parka
