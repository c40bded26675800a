#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/log/work_progress.h"
#include "engine/files/file_io.h"

// Every byte of a checkpoint is compared with the manifest before the checkpoint is used, and again on use. Use may
// read only a part of a file. So the first pass, which computes a file's checksum, also computes one for each block
// of the file. Ranks that each read a share of the files can exchange these.
namespace parka {

inline constexpr int64_t kVerifiedBlockBytes = 512 << 10;

// The checksums of a file's blocks, as Checksum::hex() prints them, one after the other. Throws Error(kBadInput)
// unless the file's own checksum is `expected`. Each block is a heartbeat().
std::string verify_file(const InputFile& file, const std::string& expected, WorkProgress& progress);

struct VerifiedFile {
  std::string path;
  int64_t num_bytes = 0;
  std::string block_sums = {};  // from verify_file
  // Set if the file is kept open, so that a run that removes the checkpoint does not take it away from a reader.
  std::shared_ptr<const InputFile> opened = {};
};
// How many files of a checkpoint are kept open.
inline constexpr size_t kMaxOpenFiles = 256;

// Files that were verified, opened when they are first used.
class VerifiedFiles {
 public:
  explicit VerifiedFiles(const std::vector<VerifiedFile>& files) : files_(files) {}

  int64_t num_bytes(size_t file) const { return files_[file].num_bytes; }
  // Fills `out` with whole blocks of file `file` from byte `begin` on (the last block of a file may be short), on
  // all threads of parallel_for. Throws Error(kBadInput) if the file has changed.
  void read_blocks(size_t file, int64_t begin, std::span<std::byte> out);

 private:
  const InputFile& open(size_t file);

  const std::vector<VerifiedFile>& files_;
  std::unordered_map<size_t, InputFile> open_;
};

// Whole blocks of a file: bytes [begin, end).
struct BlockRange {
  size_t file = 0;
  int64_t begin = 0, end = 0;

  int64_t num_bytes() const { return end - begin; }
};
// The blocks of file `file`, of `file_bytes` bytes, in which bytes [begin, end) lie.
BlockRange blocks_around(size_t file, int64_t file_bytes, int64_t begin, int64_t end);

// Reads parts of verified files, and compares them with the checksums of their blocks.
class VerifiedReader {
 public:
  explicit VerifiedReader(const std::vector<VerifiedFile>& files) : files_(files) {}

  // Fills `out` from `offset` of file `file` on. Throws Error(kBadInput) if the file has changed.
  void read(size_t file, int64_t offset, std::span<std::byte> out);

 private:
  static constexpr int64_t kMaxView = 16 << 20;
  // Valid until the next call.
  ByteSpan view(size_t file, int64_t offset, int64_t num_bytes);

  VerifiedFiles files_;
  BlockRange loaded_;  // what buffer_ holds
  std::vector<std::byte> buffer_;
};

// Reads ranges of blocks in order. Another thread prefetches the next range while the present one is used. If the
// system allows no further thread, each range is read on demand.
class BlockReadAhead {
 public:
  BlockReadAhead(const std::vector<VerifiedFile>& files, std::vector<BlockRange> ranges);
  ~BlockReadAhead();
  BlockReadAhead& operator=(BlockReadAhead&&) = delete;

  // The bytes of the next range, valid until the next call. Throws the error of reading it; it was then the last.
  ByteSpan next();

 private:
  static constexpr size_t kBuffers = 2;

  ByteSpan read(size_t index);
  void read_all();

  VerifiedFiles files_;
  const std::vector<BlockRange> ranges_;
  std::vector<std::byte> buffers_[kBuffers];
  size_t num_taken_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_read_ = 0;
  std::exception_ptr failure_;  // of range num_read_
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace parka
