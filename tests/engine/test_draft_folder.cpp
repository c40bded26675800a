#include "engine/files/file_io.h"

#include <csignal>
#include <filesystem>

#include "tests/engine/checkpoint_fixture.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

TEST_CASE("a folder has its name once it is complete", "[engine][files]") {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  {
    DraftFolder draft(out);
    write_new_file(draft / "a", "text");
    CHECK_FALSE(fs::exists(out));
    draft.publish();
  }
  CHECK(names_in(folder.path()) == std::set<std::string>{"out"});
  CHECK(names_in(out) == std::set<std::string>{"a"});
  { const DraftFolder given_up(folder / "other"); }
  CHECK(names_in(folder.path()) == std::set<std::string>{"out"});
}

TEST_CASE("what a killed command has left of a folder is in nobody's way", "[engine][files]") {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  const auto kill_at = GENERATE(0, 1, 2);
  const int status = run_in_child([&] {
    DraftFolder draft(out);
    for (int i = 0; i < kill_at; ++i) write_new_file(draft / std::to_string(i), "text");
    return std::raise(SIGKILL);
  });
  REQUIRE(status == 128 + SIGKILL);
  REQUIRE(fs::exists(out + ".tmp"));
  DraftFolder draft(out);
  CHECK_FALSE(fs::exists(draft / "0"));
  draft.publish();
  CHECK(names_in(out).empty());
}

TEST_CASE("a draft that is another's stays", "[engine][files]") {
  const TemporaryFolder folder;
  const std::string out = folder / "out";
  SECTION("of a command at work") {
    const DraftFolder at_work(out);
    const Error error = error_of([&] { const DraftFolder draft(out); });
    CHECK(error.code() == ExitCode::kBadInput);
    CHECK(mentions(error.what(), out + ".tmp"));
    CHECK(fs::exists(out + ".tmp"));
  }
  SECTION("a folder of the user") {
    fs::create_directory(out + ".tmp");
    write_file(out + ".tmp/notes", "mine");
    CHECK(mentions(error_of([&] { const DraftFolder draft(out); }).what(), out + ".tmp"));
    CHECK(read_file(out + ".tmp/notes") == "mine");
  }
  SECTION("a file of the user") {
    write_file(out + ".tmp", "mine");
    CHECK(mentions(error_of([&] { const DraftFolder draft(out); }).what(), out + ".tmp"));
    CHECK(read_file(out + ".tmp") == "mine");
  }
}
