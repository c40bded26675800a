#include "engine/training/run_lock.h"

#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>

#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

FileDescriptor open_lock(const std::string& path, RunLock::Role role) {
  const int flags = role == RunLock::Role::kHolder ? O_RDWR | O_CREAT : O_RDONLY;
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (fd < 0) throw_open_error("open", path, errno);
  return FileDescriptor(fd);
}

}  // namespace

RunLock::RunLock(std::string folder, Role role)
    : folder_(std::move(folder)),
      path_(folder_ + "/lock"),
      is_new_(role == Role::kHolder && !file_exists(path_)),
      file_(open_lock(path_, role)) {
  if (role == Role::kWitness) return;
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
    require_ours();  // a start that was refused at this moment has removed the file
    return;
  }
  is_new_ = false;
  if (errno == EWOULDBLOCK) {
    throw_bad_input(
        "{}: another process is training in this folder; wait for it, or choose another checkpoint.folder",
        folder_);
  }
  log_warning("{}: cannot be locked ({}): make sure that no second run is started in this folder", path_,
              std::generic_category().message(errno));
}

RunLock::~RunLock() {
  if (!is_new_) return;
  try {
    if (!is_at(file_.get(), path_)) return;
  } catch (const Error&) {
    return;
  }
  std::error_code ignored;
  const std::filesystem::directory_iterator begin(folder_, ignored);
  // A run that began has its config there, too.
  if (ignored || std::distance(begin, std::filesystem::directory_iterator()) != 1) return;
  std::filesystem::remove(path_, ignored);
  std::filesystem::remove(folder_, ignored);
}

void RunLock::require_ours() const {
  if (is_at(file_.get(), path_)) return;
  throw_io(
      "{}: is no longer the folder in which this run began: it or its file \"lock\" was moved or removed, or "
      "another run has taken its place; nothing in it was touched; to resume, set checkpoint.folder to the folder "
      "that has this run's checkpoints",
      folder_);
}

}  // namespace parka
