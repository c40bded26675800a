#pragma once
#include <cstdint>
#include <string>

#include "engine/files/file_io.h"

namespace parka {

// Keeps a second training process out of a run folder, where the two would remove each other's unfinished
// checkpoints. The lock ends with the process, however it ends; the file `lock` stays. The file is kept open, so it
// also shows whether the folder of that name is still the one in which the run began. The destructor
// removes a new `lock` that is alone in its folder, and the folder: then the start was refused.
class RunLock {
 public:
  enum class Role : uint8_t {
    kHolder,   // locks the folder: rank 0
    kWitness,  // the other ranks: know the file that rank 0 has locked
  };
  // Throws Error(kBadInput) if another process holds the lock. Without locks in the file system it warns.
  RunLock(std::string folder, Role role);
  RunLock& operator=(RunLock&&) = delete;
  ~RunLock();

  // Throws Error(kIo) unless <folder>/lock is still the file of the start: otherwise the folder was moved or
  // removed, or another run has taken its name. May be called from any thread.
  void require_ours() const;

 private:
  std::string folder_, path_;
  bool is_new_;  // this object made the file
  FileDescriptor file_;
};

}  // namespace parka
