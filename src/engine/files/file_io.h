#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/read_only_file.h"

// File operations whose errors name the path, the system's reason and what to do. Functions that open or create
// throw Error(kBadInput) if the path itself is wrong (missing, no permission, a file where a folder should be) and
// Error(kIo) otherwise. Writing, syncing, renaming and removing always throw Error(kIo).
namespace parka {

namespace fs = std::filesystem;

// Files are read and written by the system's own calls: "s3://bucket/x" would become a folder "s3:".
inline bool is_store_address(std::string_view path) { return path.find("://") != std::string_view::npos; }
inline constexpr const char* kStoreAdvice =
    "is the address of an object store; mount the store, or copy from and to it (docs/object_storage.md)";

using ByteSpan = std::span<const std::byte>;

inline ByteSpan as_bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

// An open file descriptor; the destructor closes it.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }
  int release();  // the caller closes it

 private:
  int fd_;
};

// True if `path` still leads to the open file `fd`. Throws Error(kIo) if that cannot be determined.
bool is_at(int fd, const std::string& path);

// XXH3-128 of everything passed to update(), in parts of any size.
class Checksum {
 public:
  Checksum();
  Checksum(Checksum&&) noexcept;
  ~Checksum();

  void update(ByteSpan bytes);
  std::string hex() const;  // 32 digits, as `xxh128sum` prints it

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Returns the checksum of all bytes of a file. Each 4 MiB are a heartbeat().
std::string checksum_of(const ReadOnlyFile& file);

// A new file, checksummed while it is written. Nothing is durable before sync_and_close().
class OutputFile {
 public:
  explicit OutputFile(std::string path);  // throws when `path` exists

  void write(ByteSpan bytes);
  void sync_and_close();
  void close();  // network file systems report failed writes here

  int64_t num_bytes() const { return num_bytes_; }
  std::string checksum() const { return checksum_.hex(); }

 private:
  std::string path_;
  FileDescriptor file_;
  Checksum checksum_;
  int64_t num_bytes_ = 0;
};

// The meaning of a refusal: the path is wrong, or, for a file that was open before, the machine fails.
enum class NoPermission : uint8_t { kIsBadInput, kIsIo };

// A regular file, open for reading. Not affected by a later rename of its folder.
class InputFile {
 public:
  explicit InputFile(std::string path, NoPermission no_permission = NoPermission::kIsBadInput);

  const std::string& path() const { return path_; }
  int64_t num_bytes() const { return num_bytes_; }  // when it was opened
  // Fills `out` from `offset` on. Throws Error(kBadInput) when the file ends before that.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  FileDescriptor file_;
  int64_t num_bytes_ = 0;
};

// Throws Error(kBadInput) for what a clone without Git LFS has in place of a large file.
void refuse_lfs_pointer(const InputFile& file);

// Calls `visit` with the lines of a file, without their ends, from its last to its first, until it returns false;
// `begin` is where the line stands. Throws Error(kBadInput) where a line is longer than any of a run.
void for_each_line_from_end(const InputFile& file,
                            const std::function<bool(std::string_view line, int64_t begin)>& visit);

// The whole file. Throws Error(kBadInput) if it is larger than `max_bytes`.
std::string read_text(const std::string& path, int64_t max_bytes,
                      NoPermission no_permission = NoPermission::kIsBadInput);

// Writes all of `bytes`, however many calls that takes; `path` is for the message.
void write_fully(int fd, ByteSpan bytes, const std::string& path);

// True if a folder is there, or a link to one, as far as can be known.
bool is_folder(const fs::path& path);
// Creates `path` and its missing parents so that they survive a power failure. An existing folder is fine.
void make_directories(const std::string& path);
void make_directory(const std::string& path);  // throws when `path` exists
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);  // a missing one is fine
// The names in a folder, in no order; none if it is missing. On a network file system this asks the server, while
// checking a single path may be answered from a cache.
std::vector<std::string> list_names(const std::string& path);
// Makes the names in a folder durable: created, renamed and removed entries.
void sync_directory(const std::string& path);

// Replaces the content of the file at `path` atomically: even after a crash it is the old or the new.
void replace_file(const std::string& path, std::string_view content);
void replace_file(const std::string& path, const std::function<void(OutputFile& file)>& write);
// Writes the bytes from `begin` to `end` of a file into another, a piece in memory at a time.
void copy_bytes(const InputFile& from, int64_t begin, int64_t end, OutputFile& to);

// Writes a file that the command line names: replaces it as above. A link stays, and what it leads to is replaced.
// A device, a pipe and what this process prints to are written into.
void write_output(const std::string& path, std::string_view content);
// Throws if write_output() would, or would remove something for its draft, whose name is `path` with .tmp added.
// It also throws where the file is one of `inputs`, which the command reads and the result would replace. Call it
// before the work whose result the file is for. An empty path means no file and is fine.
void check_output(const std::string& path, const std::vector<std::string>& inputs = {});

// Throws Error with "cannot <action> <path>: <reason of errno value>; <advice>".
[[noreturn]] void throw_open_error(std::string_view action, const std::string& path, int error);
[[noreturn]] void throw_io_error(std::string_view action, const std::string& path, int error);

// Text as one word of a shell, in single quotes, which keep everything but themselves; and only if it needs them.
std::string quoted(const std::string& text);
std::string shell_word(const std::string& text);

// A new folder that gets its name only when it is complete. Until then it is <path>.tmp, with a file in it that
// this process has locked: one of a command that was killed is known by that, and removed.
class DraftFolder {
 public:
  // Throws Error(kBadInput) if `path` exists: nothing is ever overwritten; or if another command writes the same.
  explicit DraftFolder(std::string path);
  DraftFolder& operator=(DraftFolder&&) = delete;
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
