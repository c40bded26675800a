#include "engine/files/draft_folder.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>

#include "core/error.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

// Without slashes and dots at its end: "new/." cannot be renamed to.
std::string without_slashes(std::string path) {
  while (path.size() > 1 && (path.back() == '/' || path.ends_with("/."))) path.pop_back();
  if (path.empty()) throw_bad_input("the path of the folder to write is empty");
  return path;
}

constexpr const char* kMarkName = ".unfinished";

// Locked while the returned descriptor is open, or its process lives.
FileDescriptor lock_mark(const std::string& draft, int flags) {
  const std::string path = draft + "/" + kMarkName;
  FileDescriptor mark(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0666));
  if (mark.get() != -1 && ::flock(mark.get(), LOCK_EX | LOCK_NB) == 0) return mark;
  if (mark.get() != -1 && errno == EWOULDBLOCK) {
    throw_bad_input("{}: another command is writing it; wait for its end, or choose another folder", draft);
  }
  return FileDescriptor(-1);  // there is none, or the file system has no locks
}

void remove_draft_of_killed(const std::string& draft) {
  if (!is_there(draft)) return;
  std::error_code error;
  const bool is_folder = fs::symlink_status(draft, error).type() == fs::file_type::directory;
  // Killed before it had its mark, or between it and its name: then all of it is what a user may have put there.
  if (is_folder && (fs::is_empty(draft, error) || lock_mark(draft, 0).get() != -1)) return remove_tree(draft);
  throw_bad_input("{}: exists already, and may not be left by a command that was killed; remove it", draft);
}

}  // namespace

DraftFolder::DraftFolder(std::string path) : path_(without_slashes(std::move(path))), draft_(path_ + ".tmp") {
  if (is_there(path_)) throw_bad_input("{}: exists already; choose another folder, or remove it", path_);
  remove_draft_of_killed(draft_);
  const std::string parent = fs::path(path_).parent_path().string();
  if (!parent.empty()) make_directories(parent);
  make_directory(draft_);
  mark_ = lock_mark(draft_, O_CREAT | O_EXCL);
}

DraftFolder::~DraftFolder() {
  std::error_code ignored;
  if (!published_) fs::remove_all(draft_, ignored);
}

void DraftFolder::publish() {
  std::error_code ignored;
  fs::remove(draft_ + "/" + kMarkName, ignored);
  sync_directory(draft_);
  rename_path(draft_, path_);
  published_ = true;
  const std::string parent = fs::path(path_).parent_path().string();
  sync_directory(parent.empty() ? "." : parent);
}

void write_new_file(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(as_bytes(text));
  file.sync();
  file.close();
}

void copy_to_new_file(const std::string& from, const std::string& to) {
  const InputFile source(from);
  OutputFile file(to);
  copy_bytes(source, 0, source.num_bytes(), file);
  file.sync();
  file.close();
}

}  // namespace parka
