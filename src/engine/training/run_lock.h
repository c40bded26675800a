#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "engine/files/file_io.h"

namespace parka {

// Keeps a second training process out of a run folder, where the two would clear away each other's unfinished
// checkpoints. The lock ends with the process, however it ends; the file `lock` stays. Since that file stays open,
// it also tells whether the folder of that name is still the one in which the run began.
class RunLock {
 public:
  enum class Role : uint8_t {
    kHolder,   // locks the folder: rank 0
    kWitness,  // of the other ranks: knows the file that rank 0 has locked
  };
  // Throws Error(kBadInput) when another process holds the lock. A file system without locks is told to `report`
  // and is no reason not to train.
  RunLock(std::string folder, Role role, const std::function<void(const std::string& message)>& report);

  // Throws Error(kIo) unless <folder>/lock is still the file that was there at the start: the folder was moved or
  // removed, or another run has taken its name. May be called from any thread.
  void require_ours() const;

 private:
  std::string folder_, path_;
  FileDescriptor file_;
};

}  // namespace parka
