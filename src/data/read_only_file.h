#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace parka {

// An open regular file that is read at given offsets.
//
// It uses pread, not mmap: if a mapped file shrinks, or its file server goes away, SIGBUS kills the process. Here
// it is an Error that names the file. A training batch is a few scattered reads of some KiB, so mapping saves
// nothing.
class ReadOnlyFile {
 public:
  // Throws Error(kBadInput) if the path is missing, is not a regular file, may not be read, or is a pointer of Git
  // LFS. If the process has reached its soft limit of open files, raises that to the hard limit: corpora of
  // thousands of files are common.
  explicit ReadOnlyFile(std::string path);
  ~ReadOnlyFile();
  ReadOnlyFile(ReadOnlyFile&& other) noexcept;
  ReadOnlyFile& operator=(ReadOnlyFile&&) = delete;
  ReadOnlyFile(const ReadOnlyFile&) = delete;
  ReadOnlyFile& operator=(const ReadOnlyFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes, when the file was opened

  // Fills `out` from byte `offset` on. Threads may read at the same time. Throws Error(kIo) if the file has become
  // shorter or cannot be read any more.
  void read(int64_t offset, std::span<std::byte> out) const;

  // The first 4 KiB, and behind them the last; a smaller file twice.
  std::vector<std::byte> ends() const;

  // The first byte that was never written, which is read as 0; -1 if there is none or the file system cannot tell.
  int64_t first_gap() const;

 private:
  std::string path_;
  int64_t size_ = 0;
  int descriptor_ = -1;
};

// The beginning of a file that a clone without Git LFS has in place of a large one.
inline constexpr std::string_view kLfsPointer = "version https://git-lfs.github.com/spec/";
inline constexpr const char* kLfsAdvice = "is a pointer of Git LFS in place of the file; fetch it: git lfs pull";

// A file by whatever path, among those of this machine: its device and inode.
using FileId = std::pair<uint64_t, uint64_t>;
// nullopt if there is none at `path`, as far as can be known.
std::optional<FileId> file_id(const std::string& path);

// True if something exists at `path`, as far as can be known; false for a path that cannot exist.
bool file_exists(const std::string& path);

}  // namespace parka
