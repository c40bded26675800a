#include "data/read_only_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

std::string describe_errno(int error) { return std::generic_category().message(error); }

}  // namespace

std::optional<FileId> file_id(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  return FileId{status.st_dev, status.st_ino};
}

bool file_exists(const std::string& path) { return file_id(path).has_value(); }

ReadOnlyFile::ReadOnlyFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  // Asked before the file is opened, because opening a named pipe would wait for a writer.
  if (stat(path_.c_str(), &status) != 0) {
    if (errno == ENOENT)
      throw_bad_input("{}: no such file; check the path in the config's data section or on the command line",
                      path_);
    throw_bad_input("{}: cannot be opened ({}); check its path and permissions", path_, describe_errno(errno));
  }
  if (S_ISDIR(status.st_mode)) throw_bad_input("{}: is a directory; list the token files in it instead", path_);
  if (!S_ISREG(status.st_mode)) throw_bad_input("{}: is not a regular file; copy the tokens into one", path_);
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) {
    if (errno == EMFILE)
      throw_bad_input("{}: too many open files; raise the limit (ulimit -n) or merge files", path_);
    throw_bad_input("{}: cannot be opened ({}); check its path and permissions", path_, describe_errno(errno));
  }
  size_ = status.st_size;
  std::string start(std::min(kLfsPointer.size(), static_cast<size_t>(size_)), '\0');
  read(0, std::as_writable_bytes(std::span(start)));
  if (start == kLfsPointer) throw_bad_input("{}: {}", path_, kLfsAdvice);
}

ReadOnlyFile::~ReadOnlyFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

ReadOnlyFile::ReadOnlyFile(ReadOnlyFile&& other) noexcept
    : path_(std::move(other.path_)), size_(other.size_), descriptor_(std::exchange(other.descriptor_, -1)) {}

void ReadOnlyFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(descriptor_, out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_io("{}: cannot be read at byte {} ({})", path_, offset, describe_errno(errno));
    if (count == 0) {
      struct stat status {};
      const bool is_known = fstat(descriptor_, &status) == 0;
      throw_io("{}: ends at byte {} but had {} bytes when it was opened; do not change data files during a run",
               path_, is_known ? status.st_size : offset, size_);
    }
    out = out.subspan(static_cast<size_t>(count));
    offset += count;
  }
}

std::vector<std::byte> ReadOnlyFile::ends() const {
  constexpr int64_t kEdge = 4096;
  const auto edge = static_cast<size_t>(std::min(kEdge, size_));
  std::vector<std::byte> both(2 * edge);
  read(0, std::span(both).first(edge));
  read(size_ - static_cast<int64_t>(edge), std::span(both).last(edge));
  return both;
}

int64_t ReadOnlyFile::first_gap() const {
  const off_t gap = lseek(descriptor_, 0, SEEK_HOLE);  // the end of a file without any
  return gap < size_ ? gap : -1;
}

}  // namespace parka
