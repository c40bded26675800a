#include "engine/checkpoint/checkpoint_verify.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/heartbeat.h"
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

std::string verify_file(const InputFile& file, const std::string& expected, WorkProgress& progress) {
  Checksum whole;
  std::string sums;
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kVerifiedBlockBytes, file.num_bytes())));
  for (int64_t offset = 0; offset < file.num_bytes(); offset += kVerifiedBlockBytes) {
    const std::span block =
        std::span(buffer).first(static_cast<size_t>(std::min(kVerifiedBlockBytes, file.num_bytes() - offset)));
    file.read(offset, block);
    whole.update(block);
    sums += sum_of(block);
    heartbeat();
    progress.add(static_cast<int64_t>(block.size()));
  }
  if (whole.hex() != expected) {
    throw_bad_input("{}: has checksum {}, the manifest says {}: damaged or replaced", file.path(), whole.hex(),
                    expected);
  }
  return sums;
}

const InputFile& VerifiedFiles::open(size_t file) {
  if (files_[file].opened) return *files_[file].opened;
  const auto found = open_.find(file);
  if (found != open_.end()) return found->second;
  if (open_.size() >= kMaxOpenFiles) open_.clear();
  return open_.try_emplace(file, files_[file].path, NoPermission::kIsIo).first->second;
}

void VerifiedFiles::read_blocks(size_t file, int64_t begin, std::span<std::byte> out) {
  const InputFile& opened = open(file);
  parallel_for(static_cast<int64_t>(out.size()), kVerifiedBlockBytes, [&](int64_t block_begin, int64_t block_end) {
    const std::span block =
        out.subspan(static_cast<size_t>(block_begin), static_cast<size_t>(block_end - block_begin));
    opened.read(begin + block_begin, block);
    const auto number = static_cast<size_t>((begin + block_begin) / kVerifiedBlockBytes);
    if (std::string_view(files_[file].block_sums).substr(number * kSumDigits, kSumDigits) != sum_of(block)) {
      throw_bad_input("{}: changed after it was verified, in bytes {} to {}: damaged or replaced", opened.path(),
                      begin + block_begin, begin + block_end - 1);
    }
  });
}

BlockRange blocks_around(size_t file, int64_t file_bytes, int64_t begin, int64_t end) {
  PARKA_REQUIRE(begin >= 0 && begin < end && end <= file_bytes);
  const int64_t last = (end - 1) / kVerifiedBlockBytes * kVerifiedBlockBytes;
  return {file, begin / kVerifiedBlockBytes * kVerifiedBlockBytes,
          std::min(last + kVerifiedBlockBytes, file_bytes)};
}

ByteSpan VerifiedReader::view(size_t file, int64_t offset, int64_t num_bytes) {
  if (file != loaded_.file || offset < loaded_.begin || offset + num_bytes > loaded_.end) {
    loaded_ = {};  // nothing is valid if this throws
    const BlockRange blocks = blocks_around(file, files_.num_bytes(file), offset, offset + num_bytes);
    buffer_.resize(static_cast<size_t>(blocks.num_bytes()));
    files_.read_blocks(file, blocks.begin, buffer_);
    loaded_ = blocks;
  }
  return ByteSpan(buffer_).subspan(static_cast<size_t>(offset - loaded_.begin), static_cast<size_t>(num_bytes));
}

void VerifiedReader::read(size_t file, int64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const auto part = static_cast<size_t>(std::min(kMaxView, static_cast<int64_t>(out.size())));
    std::ranges::copy(view(file, offset, static_cast<int64_t>(part)), out.begin());
    offset += static_cast<int64_t>(part);
    out = out.subspan(part);
  }
}

BlockReadAhead::BlockReadAhead(const std::vector<VerifiedFile>& files, std::vector<BlockRange> ranges)
    : files_(files), ranges_(std::move(ranges)) {
  if (ranges_.size() < 2) return;
  try {
    thread_ = start_thread("reads a checkpoint", [this] { read_all(); });
  } catch (const Error&) {  // next() reads
  }
}

BlockReadAhead::~BlockReadAhead() { stop_thread(thread_, mutex_, changed_, stopping_); }

ByteSpan BlockReadAhead::read(size_t index) {
  const BlockRange& range = ranges_[index];
  const auto count = static_cast<size_t>(range.num_bytes());
  std::vector<std::byte>& buffer = buffers_[index % kBuffers];
  if (buffer.size() < count) buffer.resize(count);
  const std::span bytes = std::span(buffer).first(count);
  files_.read_blocks(range.file, range.begin, bytes);
  return bytes;
}

void BlockReadAhead::read_all() {
  for (size_t i = 0; i < ranges_.size(); ++i) {
    {
      // The buffer is free when the range after the one that it holds was asked for.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || i < kBuffers || num_taken_ >= i - kBuffers + 2; });
      if (stopping_) return;
    }
    std::exception_ptr failure;
    try {
      read(i);
    } catch (...) {
      failure = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      failure_ = failure;
      if (!failure) ++num_read_;
    }
    changed_.notify_all();
    if (failure) return;
  }
}

ByteSpan BlockReadAhead::next() {
  const size_t index = num_taken_;
  PARKA_REQUIRE(index < ranges_.size());
  if (!thread_.joinable()) {
    ++num_taken_;
    return read(index);
  }
  std::unique_lock lock(mutex_);
  ++num_taken_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return failure_ || num_read_ > index; });
  if (num_read_ <= index) std::rethrow_exception(failure_);
  return ByteSpan(buffers_[index % kBuffers]).first(static_cast<size_t>(ranges_[index].num_bytes()));
}

}  // namespace parka
