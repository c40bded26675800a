#include "engine/checkpoint/checkpoint_verify.h"

#include <chrono>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "tests/engine/checkpoint_fixture.h"
#include "tests/support/no_threads.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kFileBytes = 11 * kVerifiedBlockBytes + 77;

// Two files of random bytes, and what they hold.
struct Files {
  explicit Files(const TemporaryFolder& folder) {
    std::mt19937_64 random(1);
    for (const char* name : {"a", "b"}) {
      std::vector<std::byte>& bytes = contents.emplace_back(static_cast<size_t>(kFileBytes));
      for (std::byte& b : bytes) b = static_cast<std::byte>(random());
      OutputFile file(folder / name);
      file.write(bytes);
      file.close();
      WorkProgress progress("verifying", kFileBytes);
      verified.push_back(
          {folder / name, kFileBytes, verify_file(InputFile(folder / name), file.checksum(), progress)});
    }
  }

  ByteSpan bytes_of(const BlockRange& range) const {
    return ByteSpan(contents[range.file])
        .subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.num_bytes()));
  }

  std::vector<std::vector<std::byte>> contents;
  std::vector<VerifiedFile> verified;
};

// Of different lengths, over both files and the short last block.
std::vector<BlockRange> some_ranges() {
  std::vector<BlockRange> ranges;
  for (const size_t file : {0u, 1u}) {
    int64_t begin = 0;
    for (const int64_t blocks : {1, 3, 1, 4, 2, 1}) {
      const int64_t end = std::min(begin + blocks * kVerifiedBlockBytes, kFileBytes);
      ranges.push_back({file, begin, end});
      begin = end;
    }
  }
  return ranges;
}

}  // namespace

TEST_CASE("blocks that are read ahead come in their order, with a thread and without", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const Files files(folder);
  const std::vector<BlockRange> ranges = some_ranges();
  const bool has_thread = GENERATE(true, false);
  std::optional<NoThreads> no_threads;
  if (!has_thread) no_threads.emplace();
  BlockReadAhead reader(files.verified, ranges);
  no_threads.reset();
  int wrong = 0;
  for (const BlockRange& range : ranges) {
    const ByteSpan got = reader.next(), want = files.bytes_of(range);
    // Time enough for the reader to spoil what it gave out, if it did.
    if (range.begin == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    wrong += !std::equal(got.begin(), got.end(), want.begin(), want.end());
  }
  CHECK(wrong == 0);
}

TEST_CASE("a changed block is told when its turn comes, and not before", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const Files files(folder);
  const std::vector<BlockRange> ranges = some_ranges();
  const auto changed = static_cast<size_t>(ranges[2].begin) + 5;
  std::fstream(files.verified[0].path, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(changed))
      .put(static_cast<char>(files.contents[0][changed] ^ std::byte{8}));
  BlockReadAhead reader(files.verified, ranges);
  for (size_t i = 0; i < 2; ++i) {
    const ByteSpan got = reader.next(), want = files.bytes_of(ranges[i]);
    CHECK(std::equal(got.begin(), got.end(), want.begin(), want.end()));
  }
  const Error error = error_of([&] { reader.next(); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(std::string(error.what()).find(files.verified[0].path + ": changed after it was verified") == 0);
}

TEST_CASE("a reader that is given up in the middle ends", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const Files files(folder);
  for (const size_t num_taken : {0u, 1u, 5u}) {
    BlockReadAhead reader(files.verified, some_ranges());
    for (size_t i = 0; i < num_taken; ++i) CHECK_FALSE(reader.next().empty());
  }
}
