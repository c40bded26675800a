#include "engine/checkpoint_verify.h"

#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "core/parallel.h"

namespace parka {
namespace {

constexpr size_t kSumDigits = 32;  // of Checksum::hex()

std::string sum_of(ByteSpan block) {
  Checksum checksum;
  checksum.update(block);
  return checksum.hex();
}

}  // namespace

std::string verify_file(const InputFile& file, const std::string& expected) {
  Checksum whole;
  std::string sums;
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kVerifiedBlockBytes, file.num_bytes())));
  for (int64_t offset = 0; offset < file.num_bytes(); offset += kVerifiedBlockBytes) {
    const std::span block =
        std::span(buffer).first(static_cast<size_t>(std::min(kVerifiedBlockBytes, file.num_bytes() - offset)));
    file.read(offset, block);
    whole.update(block);
    sums += sum_of(block);
  }
  if (whole.hex() != expected) {
    throw_bad_input("{}: has checksum {}, the manifest says {}: damaged or replaced", file.path(), whole.hex(),
                    expected);
  }
  return sums;
}

const InputFile& VerifiedReader::open(size_t file) {
  if (files_[file].opened) return *files_[file].opened;
  const auto found = open_.find(file);
  if (found != open_.end()) return found->second;
  if (open_.size() >= kMaxOpenFiles) open_.clear();
  return open_.try_emplace(file, files_[file].path, NoPermission::kIsIo).first->second;
}

void VerifiedReader::load(size_t file, int64_t begin, int64_t end) {
  end_ = 0;  // nothing is valid if this throws
  const InputFile& opened = open(file);
  buffer_.resize(static_cast<size_t>(end - begin));
  parallel_for(end - begin, kVerifiedBlockBytes, [&](int64_t block_begin, int64_t block_end) {
    const std::span block =
        std::span(buffer_).subspan(static_cast<size_t>(block_begin), static_cast<size_t>(block_end - block_begin));
    opened.read(begin + block_begin, block);
    const auto number = static_cast<size_t>((begin + block_begin) / kVerifiedBlockBytes);
    if (std::string_view(files_[file].block_sums).substr(number * kSumDigits, kSumDigits) != sum_of(block)) {
      throw_bad_input("{}: changed after it was verified, in bytes {} to {}: damaged or replaced", opened.path(),
                      begin + block_begin, begin + block_end - 1);
    }
  });
  file_ = file;
  begin_ = begin;
  end_ = end;
}

ByteSpan VerifiedReader::view(size_t file, int64_t offset, int64_t num_bytes) {
  PARKA_REQUIRE(num_bytes <= kMaxView && offset >= 0 && offset + num_bytes <= files_[file].num_bytes);
  if (num_bytes == 0) return {};
  if (file != file_ || offset < begin_ || offset + num_bytes > end_) {
    const int64_t begin = offset / kVerifiedBlockBytes * kVerifiedBlockBytes;
    const int64_t last = (offset + num_bytes - 1) / kVerifiedBlockBytes * kVerifiedBlockBytes;
    load(file, begin, std::min(last + kVerifiedBlockBytes, files_[file].num_bytes));
  }
  return ByteSpan(buffer_).subspan(static_cast<size_t>(offset - begin_), static_cast<size_t>(num_bytes));
}

void VerifiedReader::read(size_t file, int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const auto part = static_cast<size_t>(std::min(kMaxView, static_cast<int64_t>(out.size())));
    std::ranges::copy(view(file, offset, static_cast<int64_t>(part)), out.begin());
    offset += static_cast<int64_t>(part);
    out = out.subspan(part);
  }
}

}  // namespace parka
