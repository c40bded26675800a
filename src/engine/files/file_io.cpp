#include "engine/files/file_io.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// GCC 12's AVX-512 intrinsics warn of their own deliberately undefined registers.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#include "core/error.h"
#include "core/heartbeat.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

bool is_fault_of_path(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EACCES:
    case EPERM:
    case EROFS:
    case EEXIST:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG: return true;
    default: return false;
  }
}

std::string_view advice(int error) {
  switch (error) {
    case ENOSPC: return "free space on that disk";
    case EDQUOT: return "free space or have your disk quota raised";
    case EFBIG: return "raise the file size limit (ulimit -f) or use another file system";
    case EACCES:
    case EPERM: return "check its permissions";
    case EROFS: return "choose a folder on a writable file system";
    case ENOTDIR: return "a part of this path is a file, not a folder";
    case EEXIST: return "choose another path or remove what is there";
    case ENOENT: return "check the path";
    case EMFILE: return "raise the limit of open files (ulimit -n)";
    default: return "check the file system it is on";
  }
}

[[noreturn]] void throw_file_error(ExitCode code, std::string_view action, const std::string& path, int error) {
  throw Error(code, fmt::format("cannot {} {}: {}; {}", action, path, std::generic_category().message(error),
                                advice(error)));
}

// Repeats a system call that a signal interrupted.
template <typename Call>
auto retry(Call call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

FileDescriptor open_file(std::string_view action, const std::string& path, int flags) {
  const int fd = retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (fd == -1) throw_open_error(action, path, errno);
  return FileDescriptor(fd);
}

FileDescriptor open_input(const std::string& path, NoPermission no_permission) {
  // Without O_NONBLOCK a named pipe in place of the file would hang the open.
  const int fd = retry([&] { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); });
  if (fd != -1) return FileDescriptor(fd);
  if (no_permission == NoPermission::kIsIo && (errno == EACCES || errno == EPERM)) {
    throw_io_error("open", path, errno);
  }
  throw_open_error("open", path, errno);
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Opens the file that will replace another: new, instead of one that was left by a crash, but of no folder.
OutputFile open_draft(const std::string& draft) {
  if (is_folder(draft)) throw_open_error("create", draft, EISDIR);
  remove_tree(draft);
  return OutputFile(draft);
}

// The place where a file of this name is or will be, after all links.
std::string target_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // as Linux follows
  fs::path target = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(target, error); ++links) {
    if (links == kMostLinks) throw_open_error("create", path, ELOOP);
    const fs::path named = fs::read_symlink(target, error);
    if (error) throw_open_error("create", path, error.value());
    target = target.parent_path() / named;
  }
  return target.string();
}

// A file that cannot be replaced: a device, a pipe, or what this process prints to.
struct Stream {
  int printed_to = -1;  // the process's own descriptor of it
};

std::optional<Stream> stream_at(const std::string& path) {
  struct stat there, own;
  if (::stat(path.c_str(), &there) == -1) return std::nullopt;
  if (S_ISDIR(there.st_mode)) throw_open_error("create", path, EISDIR);
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    const bool is_it = ::fstat(fd, &own) == 0 && own.st_dev == there.st_dev && own.st_ino == there.st_ino;
    if (is_it) return Stream{fd};
  }
  if (S_ISREG(there.st_mode)) return std::nullopt;
  if (S_ISCHR(there.st_mode) || S_ISFIFO(there.st_mode)) return Stream{};
  throw_bad_input("{}: is a socket or a disk, which is not written into; choose another path", path);
}

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

void throw_open_error(std::string_view action, const std::string& path, int error) {
  throw_file_error(is_fault_of_path(error) ? ExitCode::kBadInput : ExitCode::kIo, action, path, error);
}

void throw_io_error(std::string_view action, const std::string& path, int error) {
  throw_file_error(ExitCode::kIo, action, path, error);
}

FileDescriptor::~FileDescriptor() {
  if (fd_ != -1) ::close(fd_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

bool is_at(int fd, const std::string& path) {
  struct stat open, there;
  if (::fstat(fd, &open) == -1) throw_io_error("examine", path, errno);
  if (::stat(path.c_str(), &there) == 0) return there.st_dev == open.st_dev && there.st_ino == open.st_ino;
  if (errno == ENOENT || errno == ENOTDIR || errno == ESTALE) return false;
  throw_io_error("examine", path, errno);
}

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh3); }
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum::~Checksum() = default;

void Checksum::update(ByteSpan bytes) {
  if (!bytes.empty()) XXH3_128bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::string Checksum::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string checksum_of(const ReadOnlyFile& file) {
  constexpr int64_t kPiece = int64_t{4} << 20;
  Checksum checksum;
  std::vector<std::byte> piece;
  for (int64_t begin = 0; begin < file.size(); begin += kPiece) {
    piece.resize(static_cast<size_t>(std::min(kPiece, file.size() - begin)));
    file.read(begin, piece);
    checksum.update(piece);
    heartbeat();
  }
  return checksum.hex();
}

OutputFile::OutputFile(std::string path)
    : path_(std::move(path)), file_(open_file("create", path_, O_WRONLY | O_CREAT | O_EXCL)) {}

void OutputFile::write(ByteSpan bytes) {
  write_fully(file_.get(), bytes, path_);
  checksum_.update(bytes);
  num_bytes_ += static_cast<int64_t>(bytes.size());
}

void OutputFile::sync_and_close() {
  if (retry([&] { return ::fsync(file_.get()); }) == -1) throw_io_error("sync", path_, errno);
  close();
}

void OutputFile::close() {
  // Not repeated after EINTR: on Linux the descriptor is gone by then.
  if (::close(file_.release()) == -1 && errno != EINTR) throw_io_error("close", path_, errno);
}

InputFile::InputFile(std::string path, NoPermission no_permission)
    : path_(std::move(path)), file_(open_input(path_, no_permission)) {
  struct stat status;
  if (::fstat(file_.get(), &status) == -1) throw_io_error("examine", path_, errno);
  if (!S_ISREG(status.st_mode)) throw_bad_input("{}: is not a regular file", path_);
  num_bytes_ = status.st_size;
}

void InputFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = retry([&] { return ::pread(file_.get(), out.data(), out.size(), offset); });
    if (got == -1) throw_io_error("read", path_, errno);
    if (got == 0) throw_bad_input("{}: ends at byte {}, {} more were expected", path_, offset, out.size());
    out = out.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

void refuse_lfs_pointer(const InputFile& file) {
  std::string start(kLfsPointer.size(), '\0');
  if (file.num_bytes() < static_cast<int64_t>(start.size())) return;
  file.read(0, std::as_writable_bytes(std::span(start)));
  if (start == kLfsPointer) throw_bad_input("{}: {}", file.path(), kLfsAdvice);
}

void for_each_line_from_end(const InputFile& file,
                            const std::function<bool(std::string_view line, int64_t begin)>& visit) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20, kLongestLine = int64_t{64} << 20;
  std::string piece, rest;  // `rest`: the end of a line that begins before `at`
  int64_t at = file.num_bytes();
  bool is_last = true;  // a line end at the end of the file ends the last line, and begins none
  while (at > 0) {
    const int64_t begin = std::max<int64_t>(0, at - kPieceBytes);
    piece.resize(static_cast<size_t>(at - begin));
    file.read(begin, std::as_writable_bytes(std::span(piece)));
    at = begin;
    std::string_view left = piece;
    if (is_last && left.ends_with('\n')) left.remove_suffix(1);
    is_last = false;
    for (size_t end; (end = left.rfind('\n')) != std::string_view::npos; left = left.substr(0, end)) {
      if (!rest.empty()) rest.insert(0, left.substr(end + 1));
      const std::string_view line = rest.empty() ? left.substr(end + 1) : std::string_view(rest);
      if (!visit(line, begin + static_cast<int64_t>(end) + 1)) return;
      rest.clear();
    }
    rest.insert(0, left);
    if (static_cast<int64_t>(rest.size()) > kLongestLine) {
      throw_bad_input(
          "{}: has a line of more than {} MiB at its byte {}, which no run has written; rename the file",
          file.path(), kLongestLine >> 20, begin);
    }
  }
  if (file.num_bytes() > 0) visit(rest, 0);
}

std::string read_text(const std::string& path, int64_t max_bytes, NoPermission no_permission) {
  const InputFile file(path, no_permission);
  if (file.num_bytes() > max_bytes) {
    throw_bad_input("{}: has {} bytes, more than the {} that such a file can have", path, file.num_bytes(),
                    max_bytes);
  }
  std::string text(static_cast<size_t>(file.num_bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_fully(int fd, ByteSpan bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = retry([&] { return ::write(fd, bytes.data(), bytes.size()); });
    if (written == -1) throw_io_error("write", path, errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

void make_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) == -1) throw_open_error("create folder", path, errno);
}

void make_directories(const std::string& path) {
  if (is_folder(path)) return;
  const fs::path trimmed = fs::path(path).has_filename() ? fs::path(path) : fs::path(path).parent_path();
  const std::string parent = parent_of(trimmed.string());
  if (parent != trimmed) make_directories(parent);
  // Another rank may have made it in the meantime.
  if (::mkdir(trimmed.c_str(), 0777) == -1 && !(errno == EEXIST && is_folder(trimmed))) {
    throw_open_error("create folder", path, errno);
  }
  sync_directory(parent);
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == -1) throw_io_error("rename", from + " to " + to, errno);
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) throw_io_error("remove", path, error.value());
}

std::vector<std::string> list_names(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator it(path, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error)) names.push_back(it->path().filename());
  // A folder that is removed while it is listed is a missing one too.
  if (error && error.value() != ENOENT && error.value() != ESTALE) {
    throw_open_error("list folder", path, error.value());
  }
  return names;
}

void sync_directory(const std::string& path) {
  const FileDescriptor folder = open_file("open folder", path, O_RDONLY | O_DIRECTORY);
  // EINVAL: this file system has no such operation, and nothing else would do instead.
  if (retry([&] { return ::fsync(folder.get()); }) == -1 && errno != EINVAL) throw_io_error("sync", path, errno);
}

void replace_file(const std::string& path, std::string_view content) {
  replace_file(path, [&](OutputFile& file) { file.write(as_bytes(content)); });
}

void copy_bytes(const InputFile& from, int64_t begin, int64_t end, OutputFile& to) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20;
  std::vector<std::byte> piece;
  for (; begin < end; begin += kPieceBytes) {
    piece.resize(static_cast<size_t>(std::min(kPieceBytes, end - begin)));
    from.read(begin, piece);
    to.write(piece);
  }
}

void replace_file(const std::string& path, const std::function<void(OutputFile& file)>& write) {
  const std::string draft = path + ".tmp";
  OutputFile file = open_draft(draft);
  try {
    write(file);
    file.sync_and_close();
    rename_path(draft, path);
  } catch (const Error&) {
    std::error_code ignored;
    fs::remove(draft, ignored);  // it would take what little room there is
    throw;
  }
  sync_directory(parent_of(path));
}

void write_output(const std::string& path, std::string_view content) {
  const std::optional<Stream> stream = stream_at(path);
  if (!stream) {
    replace_file(target_of(path), content);
  } else if (stream->printed_to != -1) {
    std::fflush(stdout);
    write_fully(stream->printed_to, as_bytes(content), path);
  } else {
    const FileDescriptor file = open_file("open", path, O_WRONLY | O_NOCTTY);
    write_fully(file.get(), as_bytes(content), path);
  }
}

void check_output(const std::string& path, const std::vector<std::string>& inputs) {
  if (path.empty()) return;
  for (const std::string& input : inputs) {
    std::error_code is_missing;
    if (fs::equivalent(path, input, is_missing) && fs::is_regular_file(path, is_missing)) {
      throw_bad_input("{}: this command reads it, and its result would replace it; write to another file",
                      printable(path));
    }
  }
  if (const std::optional<Stream> stream = stream_at(path)) {
    // Opening a pipe would wait for its reader.
    if (stream->printed_to == -1 && ::access(path.c_str(), W_OK) == -1) throw_open_error("open", path, errno);
    return;
  }
  const std::string draft = target_of(path) + ".tmp";
  std::error_code error;
  if (fs::exists(fs::symlink_status(draft, error))) {
    throw_bad_input("{}: exists already, perhaps left by a command that was killed; remove it", draft);
  }
  OutputFile(draft).close();
  remove_tree(draft);
}

std::string quoted(const std::string& text) {
  std::string inside;
  for (const char c : text) inside += c == '\'' ? "'\\''" : std::string(1, c);
  return "'" + inside + "'";
}

std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain = "-_./=:,+@%";
  const bool plain = !text.empty() && std::ranges::all_of(text, [&](unsigned char c) {
    return std::isalnum(c) != 0 || kPlain.find(static_cast<char>(c)) != std::string_view::npos;
  });
  return plain ? text : quoted(text);
}

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
  file.sync_and_close();
}

void copy_to_new_file(const std::string& from, const std::string& to) {
  const InputFile source(from);
  OutputFile file(to);
  copy_bytes(source, 0, source.num_bytes(), file);
  file.sync_and_close();
}

}  // namespace parka
