#include "engine/run_lock.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/file.h>

#include "core/error.h"

namespace parka {

RunLock::RunLock(const std::string& folder)
    : file_(::open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
  if (file_.get() < 0) throw_open_error("open", folder + "/lock", errno);
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) return;
  // A file system without locks is no reason not to train.
  if (errno != EWOULDBLOCK) return;
  throw_bad_input(
      "{}: another process is training in this folder; wait for it, or choose another checkpoint.folder", folder);
}

}  // namespace parka
