#include "data/token_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kVocab = 50304;

// Numbers that count up, two and two exchanged: else they would be positions.
template <typename T = uint16_t>
std::vector<T> counting(int first, size_t count) {
  std::vector<T> ids(count);
  std::ranges::generate(ids, [&] { return static_cast<T>(first++ ^ 1); });
  return ids;
}

std::vector<int32_t> counting_sequence(int32_t first, size_t count) { return counting<int32_t>(first, count); }

}  // namespace

TEST_CASE("sequences are cut from each file in turn and remainders dropped", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "b.npy", counting(1000, 11));  // two sequences of 4, three tokens dropped
  write_tokens(folder / "a.npy", counting(2000, 4));
  write_tokens(folder / "c.npy", counting(3000, 9));
  const TokenFiles files({folder / "b.npy", folder / "a.npy", folder / "c.npy"}, TokenType::kUint16, 4, kVocab);
  CHECK(files.num_sequences() == 5);
  CHECK(files.num_tokens() == 20);
  const std::vector<int32_t> first_ids = {1000, 1004, 2000, 3000, 3004};
  for (int64_t i = 0; i < 5; ++i) {
    CAPTURE(i);
    CHECK(read_sequence(files, i) == counting_sequence(first_ids[static_cast<size_t>(i)], 4));
  }
  CHECK(error_of([&] { read_sequence(files, 5); }).code() == ExitCode::kInternal);
  CHECK(error_of([&] { read_sequence(files, -1); }).code() == ExitCode::kInternal);
}

TEST_CASE("uint32 files hold ids of any vocabulary", "[data][token_files]") {
  const TemporaryFolder folder;
  const std::vector<uint32_t> ids = {0, 65535, 65536, 128255, 1, 2147483647, 2, 3};
  write_tokens(folder / "t.npy", ids);
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint32, 4, int64_t{1} << 31);
  CHECK(files.num_sequences() == 2);
  CHECK((read_sequence(files, 0) == std::vector<int32_t>{0, 65535, 65536, 128255}));
  CHECK((read_sequence(files, 1) == std::vector<int32_t>{1, 2147483647, 2, 3}));
}

TEST_CASE("an id outside the vocabulary is named with its place", "[data][token_files]") {
  const TemporaryFolder folder;
  const std::string good = folder / "good.npy", bad = folder / "bad.npy";
  const bool wide = GENERATE(false, true);
  constexpr size_t kMany = 40'000, kBad = 5002;  // on none of the pages that are looked at when a file is opened
  if (wide) {
    write_tokens(good, std::vector<uint32_t>(8, 1));
    std::vector<uint32_t> ids(kMany, 1);
    ids[kBad] = 0xffffffffu;
    write_tokens(bad, ids);
  } else {
    write_tokens(good, std::vector<uint16_t>(8, 1));
    std::vector<uint16_t> ids(kMany, 1);
    ids[kBad] = 300;
    write_tokens(bad, ids);
  }
  const TokenFiles files({good, bad}, wide ? TokenType::kUint32 : TokenType::kUint16, 4, 300);
  CHECK((read_sequence(files, 2) == std::vector<int32_t>{1, 1, 1, 1}));
  const Error error = error_of([&] { read_sequence(files, 2 + kBad / 4); });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, bad + ": token 5002 is id " + (wide ? "4294967295" : "300") + ","));
  CHECK(contains(error, "vocabulary has 300 ids"));
}

TEST_CASE("the last id of the vocabulary is allowed", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "t.npy", std::vector<uint16_t>{299, 0});
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint16, 2, 300);
  CHECK((read_sequence(files, 0) == std::vector<int32_t>{299, 0}));
}

TEST_CASE("bad token files are refused by name", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "good", counting(0, 8));
  write_file(folder / "odd", "123456789");
  write_file(folder / "short", "123456");
  write_file(folder / "empty", "");
  write_file(folder / "saved", "\x93NUMPY" + std::string(200, '\1'));
  std::filesystem::create_directory(folder / "folder");
  std::filesystem::create_symlink(folder / "loop", folder / "loop");
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);

  const auto [name, message] = GENERATE(table<std::string, std::string>({
      {"missing", "no such file"},
      {"good/child", "cannot be opened"},
      {"folder", "is a directory"},
      {"loop", "cannot be opened"},
      {"pipe", "is not a regular file"},
      {"odd", "9 bytes are not a whole number of 2-byte tokens"},
      {"short", "3 tokens are fewer than one sequence of 4"},
      {"empty", "0 tokens are fewer than one sequence of 4"},
      {"saved", "has the header of numpy.save()"},
  }));
  CAPTURE(name);
  const Error error = error_of([&, path = folder / name] {
    TokenFiles({folder / "good", path}, TokenType::kUint16, 4, kVocab);
  });
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, folder / name + ": "));
  CHECK(contains(error, message));
  CHECK_FALSE(contains(error, "\n"));
}

TEST_CASE("a file that may not be read is refused", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "t.npy", counting(0, 8));
  std::filesystem::permissions(folder / "t.npy", std::filesystem::perms::none);
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  const bool is_root = geteuid() == 0;  // who may read everything
  constexpr uid_t kNobody = 65534;
  if (is_root) REQUIRE(seteuid(kNobody) == 0);
  const Error error = error_of([&] { TokenFiles({folder / "t.npy"}, TokenType::kUint16, 4, kVocab); });
  if (is_root) REQUIRE(seteuid(0) == 0);
  CHECK(error.code() == ExitCode::kBadInput);
  CHECK(contains(error, "t.npy: cannot be opened (Permission denied)"));
}

TEST_CASE("an empty list of token files is refused", "[data][token_files]") {
  const Error error = error_of([] { TokenFiles({}, TokenType::kUint16, 4, kVocab); });
  CHECK((error.code() == ExitCode::kBadInput && contains(error, "no token files")));
}

TEST_CASE("a file that shrinks during the run is an error, not a crash", "[data][token_files]") {
  const TemporaryFolder folder;
  const std::string path = folder / "t.npy";
  write_tokens(path, counting(0, 8192));
  const TokenFiles files({path}, TokenType::kUint16, 1024, kVocab);
  std::filesystem::resize_file(path, 1024 * 2 + 100);
  CHECK(read_sequence(files, 0) == counting_sequence(0, 1024));
  for (const int64_t past_the_end : {1, 5}) {
    const Error error = error_of([&] { read_sequence(files, past_the_end); });
    CHECK(error.code() == ExitCode::kIo);
    CHECK((contains(error, path) && contains(error, "ends at byte 2148 but had 16384 bytes")));
  }
}

TEST_CASE("sequences past 4 GiB are read from their place", "[data][token_files]") {
  const TemporaryFolder folder;
  const std::string path = folder / "large.npy";
  constexpr int64_t kSequence = 2048, kNumSequences = (int64_t{5} << 30) / (2 * kSequence);
  write_file(path, "");
  std::filesystem::resize_file(path, static_cast<uintmax_t>(kNumSequences * kSequence * 2));  // sparse
  {
    const std::vector<uint16_t> ids = counting(7, kSequence);
    std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp((kNumSequences - 1) * kSequence * 2);
    out.write(reinterpret_cast<const char*>(ids.data()), kSequence * 2);
  }
  const TokenFiles files({path}, TokenType::kUint16, kSequence, kVocab);
  CHECK(files.num_sequences() == kNumSequences);
  CHECK(files.num_tokens() == kNumSequences * kSequence);
  CHECK(read_sequence(files, kNumSequences - 1) == counting_sequence(7, kSequence));
  CHECK(read_sequence(files, kNumSequences - 2) == std::vector<int32_t>(kSequence, 0));
}

TEST_CASE("the fingerprint follows every change it promises to see", "[data][token_files]") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "copy");
  std::vector<uint16_t> ids = counting(0, 16384);
  const auto fingerprint = [&](const std::vector<std::string>& names, int64_t sequence_length = 64,
                               TokenType type = TokenType::kUint16) {
    std::vector<std::string> paths;
    for (const std::string& name : names) paths.push_back(folder / name);
    return TokenFiles(paths, type, sequence_length, kAnyVocabulary).fingerprint();
  };
  write_tokens(folder / "a", ids);
  write_tokens(folder / "b", counting(500, 16384));
  write_tokens(folder / "copy/a", ids);
  const uint64_t original = fingerprint({"a", "b"});
  CHECK(fingerprint({"copy/a", "b"}) == original);  // the folder is not part of it
  CHECK(fingerprint({"b", "a"}) != original);
  CHECK(fingerprint({"a"}) != original);
  CHECK(fingerprint({"a", "b", "b"}) != original);
  CHECK(fingerprint({"a", "b"}, 128) != original);
  CHECK(fingerprint({"a", "b"}, 64, TokenType::kUint32) != original);
  write_tokens(folder / "c", ids);
  CHECK(fingerprint({"c", "b"}) != original);
  write_tokens(folder / "d", std::vector<uint16_t>(16384, 1));
  const uint64_t uniform = fingerprint({"d"});
  write_tokens(folder / "d", std::vector<uint16_t>(20000, 1));  // the same first and last 4 KiB
  CHECK(fingerprint({"d"}) != uniform);
  const size_t changed = GENERATE(0, 2047, 16384 - 2048, 16383);  // in the first or the last 4 KiB
  CAPTURE(changed);
  ids[changed] ^= 1;
  write_tokens(folder / "a", ids);
  CHECK(fingerprint({"a", "b"}) != original);
}

TEST_CASE("files are closed again, also after an error", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "good", counting(0, 8));
  write_file(folder / "odd", "123456789");
  const auto lowest_free_descriptor = [] {
    const int descriptor = open("/dev/null", O_RDONLY);
    close(descriptor);
    return descriptor;
  };
  const int before = lowest_free_descriptor();
  { const TokenFiles files({folder / "good", folder / "good"}, TokenType::kUint16, 4, kVocab); }
  error_of([&] { TokenFiles({folder / "good", folder / "odd"}, TokenType::kUint16, 4, kVocab); });
  CHECK(lowest_free_descriptor() == before);
}

TEST_CASE("threads read the same files at the same time", "[data][token_files]") {
  const TemporaryFolder folder;
  write_tokens(folder / "t.npy", counting(0, 4096));
  const TokenFiles files({folder / "t.npy"}, TokenType::kUint16, 16, kVocab);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 256; ++i) {
        const int64_t sequence = (i * (2 * t + 1)) % 256;
        wrong += read_sequence(files, sequence) != counting_sequence(static_cast<int32_t>(sequence) * 16, 16);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

namespace {

// Opens `count` files under a limit of open files, in a process of its own, because a hard limit cannot be raised
// again. Returns the exit code that the error asks for, 0 if there was none, -1 if the process died.
int open_under_limit(const TemporaryFolder& folder, int count, rlim_t most) {
  std::vector<std::string> paths;
  for (int i = 0; i < count; ++i) {
    paths.push_back(folder / std::to_string(i));
    write_tokens(paths.back(), counting(i, 4));
  }
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    const rlimit limit{most, most};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(99);
    try {
      const TokenFiles files(paths, TokenType::kUint16, 4, kVocab);
      if (read_sequence(files, count - 1) != counting_sequence(count - 1, 4)) code = 98;
    } catch (const Error& error) {
      code = contains(error, "ulimit -n") ? static_cast<int>(error.code()) : 97;
    }
    _exit(code);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("more files than may be open are refused", "[data][token_files]") {
  const TemporaryFolder folder;
  CHECK(open_under_limit(folder, 200, 400) == 0);
  CHECK(open_under_limit(folder, 200, 100) == static_cast<int>(ExitCode::kBadInput));
}
