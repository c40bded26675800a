// A library to be preloaded (LD_PRELOAD): file operations of the process fail or are slow, as the environment says.
//   FAULTY_FILES="OPERATION:GLOB:ERROR:FROM:COUNT;..."
//     From its FROM-th time on (1: the first), COUNT times (0: for ever), an operation on a path that matches GLOB
//     fails with ERROR: the name of an errno value, or KILL, which ends the process there. Operations: open, read,
//     write, fsync (fdatasync too), rename (by either path), mkdir, unlink (rmdir and unlinkat too), flock. The
//     star of a glob matches slashes too. Every rule counts for itself, over all threads of a process.
//   FAULTY_WRITE_GLOB=GLOB FAULTY_WRITE_BYTES_PER_SECOND=N
//     All writes to files that match take, together, as long as a disk of that speed needs.
// A rule that cannot be read ends the process with exit code 99.
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int kKill = -1;
constexpr std::pair<std::string_view, int> kErrors[] = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EFBIG", EFBIG},   {"EACCES", EACCES},
    {"EPERM", EPERM},   {"EROFS", EROFS},   {"ENOENT", ENOENT}, {"ESTALE", ESTALE}, {"EMFILE", EMFILE},
    {"ENFILE", ENFILE}, {"ENOMEM", ENOMEM}, {"ENOLCK", ENOLCK}, {"ENOSYS", ENOSYS}, {"EINTR", EINTR},
    {"EBUSY", EBUSY},   {"KILL", kKill}};

struct Rule {
  std::string operation, glob;
  int error = 0;
  long from = 1, count = 1;
  std::atomic<long> seen{0};
};

[[noreturn]] void refuse(std::string_view text) {
  std::fprintf(stderr, "faulty_files: cannot read \"%.*s\"\n", static_cast<int>(text.size()), text.data());
  std::_Exit(99);
}

long number(std::string_view text, std::string_view rule) {
  long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) refuse(rule);
  return value;
}

int error_of(std::string_view name, std::string_view rule) {
  for (const auto& [known, error] : kErrors) {
    if (known == name) return error;
  }
  refuse(rule);
}

class Faults {
 public:
  Faults() {
    const char* text = std::getenv("FAULTY_FILES");
    for (std::string_view left = text == nullptr ? "" : text; !left.empty();) {
      const std::string_view rule = left.substr(0, left.find(';'));
      left.remove_prefix(std::min(left.size(), rule.size() + 1));
      if (!rule.empty()) add(rule);
    }
    const char* rate = std::getenv("FAULTY_WRITE_BYTES_PER_SECOND");
    const char* glob = std::getenv("FAULTY_WRITE_GLOB");
    if (rate != nullptr && glob != nullptr) {
      slow_glob_ = glob;
      bytes_per_second_ = static_cast<double>(number(rate, rate));
    }
  }

  // The errno value with which this operation is to fail; 0: it goes on.
  int meet(std::string_view operation, const std::string& path, const std::string& other_path) {
    for (Rule& rule : rules_) {
      const auto matches = [&](const std::string& p) { return ::fnmatch(rule.glob.c_str(), p.c_str(), 0) == 0; };
      if (rule.operation != operation || (!matches(path) && !matches(other_path))) continue;
      const long time = ++rule.seen;
      if (time < rule.from || (rule.count > 0 && time >= rule.from + rule.count)) continue;
      if (rule.error == kKill) ::kill(::getpid(), SIGKILL);
      return rule.error;
    }
    return 0;
  }

  void wait_for_disk(const std::string& path, size_t num_bytes) {
    if (bytes_per_second_ <= 0 || ::fnmatch(slow_glob_.c_str(), path.c_str(), 0) != 0) return;
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> needed(static_cast<double>(num_bytes) / bytes_per_second_);
    Clock::time_point end;
    {
      const std::lock_guard lock(mutex_);
      disk_free_ = std::max(disk_free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(needed);
      end = disk_free_;
    }
    std::this_thread::sleep_until(end);
  }

 private:
  void add(std::string_view text) {
    std::array<std::string_view, 3> last;  // of the fields: a glob may have colons
    std::string_view left = text;
    for (size_t i = last.size(); i-- > 0;) {
      const size_t colon = left.rfind(':');
      if (colon == std::string_view::npos) refuse(text);
      last[i] = left.substr(colon + 1);
      left = left.substr(0, colon);
    }
    const size_t colon = left.find(':');
    if (colon == std::string_view::npos) refuse(text);
    Rule& rule = rules_.emplace_back();
    rule.operation = left.substr(0, colon);
    rule.glob = left.substr(colon + 1);
    rule.error = error_of(last[0], text);
    rule.from = number(last[1], text);
    rule.count = number(last[2], text);
    for (const std::string_view known : {"open", "read", "write", "fsync", "rename", "mkdir", "unlink", "flock"}) {
      if (rule.operation == known) return;
    }
    refuse(text);
  }

  std::deque<Rule> rules_;
  std::string slow_glob_;
  double bytes_per_second_ = 0;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point disk_free_;  // when it has written what it was given so far
};

Faults& faults() {
  static Faults* const all = new Faults;  // never destroyed: files are written after main(), too
  return *all;
}

std::string linked_to(const std::string& link) {
  std::array<char, 4096> target;
  const ssize_t size = ::readlink(link.c_str(), target.data(), target.size());
  return size < 0 ? std::string() : std::string(target.data(), static_cast<size_t>(size));
}

std::string path_of(int fd) { return linked_to("/proc/self/fd/" + std::to_string(fd)); }

std::string absolute(int folder, const char* path) {
  if (path == nullptr) return "";
  if (path[0] == '/') return path;
  return (folder == AT_FDCWD ? linked_to("/proc/self/cwd") : path_of(folder)) + "/" + path;
}

// The function of this name that the program would have called without this library.
template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

bool fails(std::string_view operation, const std::string& path, const std::string& other_path = {}) {
  const int saved = errno;
  const int error = faults().meet(operation, path, other_path);
  errno = error != 0 ? error : saved;
  return error != 0;
}

bool fails_to_write(int fd, size_t num_bytes) {
  const std::string path = path_of(fd);
  if (fails("write", path)) return true;
  faults().wait_for_disk(path, num_bytes);
  return false;
}

bool takes_mode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

mode_t mode_in(std::va_list arguments, int flags) { return takes_mode(flags) ? va_arg(arguments, mode_t) : 0; }

}  // namespace

// The parameters after `flags` are read as open(2) says.
#define FAULTY_OPEN(name)                                                          \
  extern "C" int name(const char* path, int flags, ...) {                          \
    std::va_list arguments;                                                        \
    va_start(arguments, flags);                                                    \
    const mode_t mode = mode_in(arguments, flags);                                 \
    va_end(arguments);                                                             \
    static auto* const real = next<int(const char*, int, ...)>(#name);             \
    return fails("open", absolute(AT_FDCWD, path)) ? -1 : real(path, flags, mode); \
  }
#define FAULTY_OPENAT(name)                                                              \
  extern "C" int name(int folder, const char* path, int flags, ...) {                    \
    std::va_list arguments;                                                              \
    va_start(arguments, flags);                                                          \
    const mode_t mode = mode_in(arguments, flags);                                       \
    va_end(arguments);                                                                   \
    static auto* const real = next<int(int, const char*, int, ...)>(#name);              \
    return fails("open", absolute(folder, path)) ? -1 : real(folder, path, flags, mode); \
  }
FAULTY_OPEN(open)
FAULTY_OPEN(open64)
FAULTY_OPENAT(openat)
FAULTY_OPENAT(openat64)

extern "C" ssize_t read(int fd, void* out, size_t count) {
  static auto* const real = next<ssize_t(int, void*, size_t)>("read");
  return fails("read", path_of(fd)) ? -1 : real(fd, out, count);
}

extern "C" ssize_t pread(int fd, void* out, size_t count, off_t offset) {
  static auto* const real = next<ssize_t(int, void*, size_t, off_t)>("pread");
  return fails("read", path_of(fd)) ? -1 : real(fd, out, count, offset);
}

extern "C" ssize_t pread64(int fd, void* out, size_t count, off64_t offset) {
  static auto* const real = next<ssize_t(int, void*, size_t, off64_t)>("pread64");
  return fails("read", path_of(fd)) ? -1 : real(fd, out, count, offset);
}

extern "C" ssize_t write(int fd, const void* bytes, size_t count) {
  static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
  return fails_to_write(fd, count) ? -1 : real(fd, bytes, count);
}

extern "C" ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return fails_to_write(fd, count) ? -1 : real(fd, bytes, count, offset);
}

extern "C" ssize_t pwrite64(int fd, const void* bytes, size_t count, off64_t offset) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off64_t)>("pwrite64");
  return fails_to_write(fd, count) ? -1 : real(fd, bytes, count, offset);
}

extern "C" ssize_t writev(int fd, const iovec* parts, int count) {
  static auto* const real = next<ssize_t(int, const iovec*, int)>("writev");
  size_t num_bytes = 0;
  for (int i = 0; i < count; ++i) num_bytes += parts[i].iov_len;
  return fails_to_write(fd, num_bytes) ? -1 : real(fd, parts, count);
}

extern "C" int fsync(int fd) {
  static auto* const real = next<int(int)>("fsync");
  return fails("fsync", path_of(fd)) ? -1 : real(fd);
}

extern "C" int fdatasync(int fd) {
  static auto* const real = next<int(int)>("fdatasync");
  return fails("fsync", path_of(fd)) ? -1 : real(fd);
}

extern "C" int rename(const char* from, const char* to) noexcept {
  static auto* const real = next<int(const char*, const char*)>("rename");
  return fails("rename", absolute(AT_FDCWD, from), absolute(AT_FDCWD, to)) ? -1 : real(from, to);
}

extern "C" int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = next<int(const char*, mode_t)>("mkdir");
  return fails("mkdir", absolute(AT_FDCWD, path)) ? -1 : real(path, mode);
}

extern "C" int unlink(const char* path) noexcept {
  static auto* const real = next<int(const char*)>("unlink");
  return fails("unlink", absolute(AT_FDCWD, path)) ? -1 : real(path);
}

extern "C" int rmdir(const char* path) noexcept {
  static auto* const real = next<int(const char*)>("rmdir");
  return fails("unlink", absolute(AT_FDCWD, path)) ? -1 : real(path);
}

// The C library's own remove() would not come by here.
extern "C" int remove(const char* path) noexcept {
  static auto* const real = next<int(const char*)>("remove");
  return fails("unlink", absolute(AT_FDCWD, path)) ? -1 : real(path);
}

extern "C" int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto* const real = next<int(int, const char*, int)>("unlinkat");
  return fails("unlink", absolute(folder, path)) ? -1 : real(folder, path, flags);
}

extern "C" int flock(int fd, int operation) noexcept {
  static auto* const real = next<int(int, int)>("flock");
  return fails("flock", path_of(fd)) ? -1 : real(fd, operation);
}
