#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/file_io.h"

// Every byte of a checkpoint is compared with the manifest before the checkpoint is used, and again when it is
// used, which may be a part of a file only. So the first pass, which adds up a file's checksum, also leaves a
// checksum of each block of the file; those of several ranks, each of which read a share of the files, can be put
// together.
namespace parka {

inline constexpr int64_t kVerifiedBlockBytes = 512 << 10;

// The checksums of a file's blocks, as Checksum::hex() prints them, one after the other. Throws Error(kBadInput)
// unless the file's own checksum is `expected`.
std::string verify_file(const InputFile& file, const std::string& expected);

struct VerifiedFile {
  std::string path;
  int64_t num_bytes = 0;
  std::string block_sums = {};  // from verify_file
  // Where it is kept open: then a run that removes the checkpoint does not take it away from a reader.
  std::shared_ptr<const InputFile> opened = {};
};
// How many files of a checkpoint are kept open.
inline constexpr size_t kMaxOpenFiles = 256;

// Reads parts of files that were verified. What it gives out was compared with the checksums of its blocks.
class VerifiedReader {
 public:
  explicit VerifiedReader(const std::vector<VerifiedFile>& files) : files_(files) {}

  // Fills `out` from `offset` of file `file` on. Throws Error(kBadInput) when the file is not what it was.
  void read(size_t file, int64_t offset, std::span<std::byte> out);
  // The same without a copy, for at most kMaxView bytes; valid until the next call.
  static constexpr int64_t kMaxView = 16 << 20;
  ByteSpan view(size_t file, int64_t offset, int64_t num_bytes);

 private:
  const InputFile& open(size_t file);
  void load(size_t file, int64_t begin, int64_t end);

  const std::vector<VerifiedFile>& files_;
  std::unordered_map<size_t, InputFile> open_;
  // Bytes [begin_, end_) of a file, whole blocks.
  size_t file_ = 0;
  int64_t begin_ = 0, end_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace parka
