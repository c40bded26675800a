#include <algorithm>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "engine/files/file_io.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

namespace {

size_t num_entries(const TemporaryFolder& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()));
}

}  // namespace

TEST_CASE("a link to a file stays, and the file that it leads to is replaced", "[engine][files]") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "below");
  write_file(folder / "below/file", "old");
  fs::create_symlink("file", folder / "below/link");
  fs::create_symlink("below/link", folder / "link");
  fs::create_symlink("below/new", folder / "to_new");  // which is not there yet
  for (const auto& [link, file] : {std::pair("link", "below/file"), std::pair("to_new", "below/new")}) {
    CAPTURE(link);
    check_output(folder / link);
    write_output(folder / link, "new");
    CHECK(fs::is_symlink(folder / link));
    CHECK_FALSE(fs::is_symlink(folder / file));
    CHECK(read_file(folder / file) == "new");
  }
  CHECK(num_entries(folder) == 3);  // no drafts
}

TEST_CASE("links that go round, and folders, are refused", "[engine][files]") {
  const TemporaryFolder folder;
  fs::create_symlink("b", folder / "a");
  fs::create_symlink("a", folder / "b");
  fs::create_directory(folder / "folder");
  for (const char* name : {"a", "folder"}) {
    CAPTURE(name);
    CHECK(refusal([&] { check_output(folder / name); }).find(folder / name) != std::string::npos);
    CHECK(refusal([&] { write_output(folder / name, "text"); }).find(folder / name) != std::string::npos);
  }
  CHECK(num_entries(folder) == 3);
}

TEST_CASE("a pipe is written into", "[engine][files]") {
  const TemporaryFolder folder;
  const std::string pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0666) == 0);
  fs::create_symlink("pipe", folder / "link");
  for (const char* name : {"pipe", "link"}) {
    CAPTURE(name);
    check_output(folder / name);  // does not wait
    // It need not wait for the writer, who fits what he writes into the pipe.
    const FileDescriptor reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK));
    write_output(folder / name, "text");
    char read[8] = {};
    CHECK(::read(reader.get(), read, sizeof(read)) == 4);
    CHECK(std::string(read) == "text");
    CHECK(fs::is_fifo(pipe));
  }
  CHECK(num_entries(folder) == 2);
}

TEST_CASE("a device is written into and stays one", "[engine][files]") {
  const TemporaryFolder folder;
  const std::string null = folder / "null", full = folder / "full";
  if (::mknod(null.c_str(), S_IFCHR | 0666, makedev(1, 3)) == -1 ||
      ::mknod(full.c_str(), S_IFCHR | 0666, makedev(1, 7)) == -1 ||
      FileDescriptor(::open(null.c_str(), O_WRONLY)).get() == -1) {
    WARN("devices can not be made here");
    return;
  }
  check_output(null);
  write_output(null, "text");
  CHECK(fs::is_character_file(null));
  CHECK(refusal([&] { write_output(full, "text"); }, ExitCode::kIo).find(full) != std::string::npos);
  CHECK(fs::is_character_file(full));
  CHECK(num_entries(folder) == 2);
}

TEST_CASE("a file that has the name of a draft is not removed to find out whether one can be made",
          "[engine][files]") {
  const TemporaryFolder folder;
  write_file(folder / "out.tmp", "of someone");
  CHECK(refusal([&] { check_output(folder / "out"); }).find("out.tmp: exists already") != std::string::npos);
  CHECK(read_file(folder / "out.tmp") == "of someone");
}

TEST_CASE("a file is read line by line from its end", "[engine][files]") {
  const parka::test::TemporaryFolder folder;
  const std::string path = folder / "lines";
  const std::string longer(3 << 20, 'x'), piece(1 << 20, 'y');  // than what is read at a time, and as long
  const auto lines = GENERATE_COPY(std::vector<std::string>{}, std::vector<std::string>{""},
                                   std::vector<std::string>{"a", "", "bc", ""},
                                   std::vector<std::string>{longer, "", piece, "z", longer},
                                   std::vector<std::string>{piece.substr(1), piece, piece.substr(1), "a"},
                                   std::vector<std::string>(40000, std::string(99, 'l')));
  const bool ends = GENERATE(true, false);
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  if (!ends && !lines.empty() && !lines.back().empty()) all.pop_back();
  parka::test::write_file(path, all);
  std::vector<std::string> read;
  bool stands_there = true;
  for_each_line_from_end(InputFile(path), [&](std::string_view line, int64_t begin) {
    stands_there = stands_there && all.compare(static_cast<size_t>(begin), line.size(), line) == 0;
    read.emplace_back(line);
    return true;
  });
  CHECK(stands_there);
  std::reverse(read.begin(), read.end());
  CHECK((read == lines));
  if (lines.size() < 3) return;
  size_t visited = 0;
  for_each_line_from_end(InputFile(path), [&](std::string_view, int64_t) { return ++visited < 2; });
  CHECK(visited == 2);
}
