// What the death or failure of one of several ranks does to a checkpoint that they save together: nothing is lost,
// and no rank waits for ever.
#include <atomic>
#include <csignal>

#include "engine/checkpoint/checkpoint.h"
#include "engine/files/file_io.h"
#include "tests/engine/checkpoint_fixture_ranks.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;
using std::chrono::milliseconds;

namespace {

constexpr int kRanks = 3;

// Step 20 is saved a second time over what two dead runs left of it.
void prepare(const std::string& run) {
  for (const int64_t step : {10, 20}) REQUIRE(messages_of(save_by_ranks(run, small_contents(step), kRanks)) == "");
  for (const char* name : {"/step_00000020.tmp/attempt_dead", "/step_00000020.tmp/attempt_dead.ranks",
                           "/step_00000030.tmp/attempt_dead"}) {
    fs::create_directories(run + name);
  }
  for (const char* name : {"attempt_dead/rank_0001_shard_0.safetensors", "attempt_dead.ranks/rank_0001.done",
                           "attempt_dead.ranks/rank_0002.failed", "rank_0001.done"}) {
    write_file(run + "/step_00000020.tmp/" + name, "[]");
  }
}

// Steps of a save that a rank takes, counted by its observer.
std::vector<int> count_points(const std::string& run, const CheckpointContents& contents) {
  std::vector<int> counts(kRanks);
  const auto errors = save_by_ranks(run, contents, kRanks, [&](int rank, SaveOptions& options) {
    options.observer = [&, rank](std::string_view) { ++counts[static_cast<size_t>(rank)]; };
  });
  REQUIRE(messages_of(errors) == "");
  return counts;
}

// What is wrong with the folder after a save of `saved` over `before` was cut off, and with what comes next there.
std::string defect_after(const std::string& run, const CheckpointContents& before,
                         const CheckpointContents& saved) {
  const Newest newest = read_newest(run);
  if (!newest.refusals.empty()) return "refused: " + newest.refusals[0];
  if (!newest.contents || (!same(*newest.contents, before) && !same(*newest.contents, saved))) {
    return "loads neither the old nor the new checkpoint";
  }
  std::string reports;
  const CheckpointContents again = small_contents(20, 2);
  const auto errors = save_by_ranks(run, again, kRanks, [&](int, SaveOptions& options) {
    options.report = [&](const std::string& message) { reports += message; };
  });
  if (const std::string text = messages_of(errors) + reports; !text.empty()) return "the next save: " + text;
  if (names_in(run) != std::set<std::string>{"step_00000010", "step_00000020"})
    return "the next save leaves a mess";
  if (!same(read_contents(load_checkpoint(run + "/step_00000020")), again))
    return "the next save is not what loads";
  return "";
}

}  // namespace

TEST_CASE("a kill of any rank at any point of a save loses nothing", "[engine][checkpoint][faults][ranks][slow]") {
  const TemporaryFolder folder;
  const std::string prepared = folder / "prepared", run = folder / "run";
  prepare(prepared);
  const CheckpointContents before = small_contents(20), saved = small_contents(20, 1);
  copy_folder(prepared, run);
  const std::vector<int> num_points = count_points(run, saved);
  const std::vector<CheckpointContents> parts = split_contents(saved, kRanks);
  const int victim = GENERATE(0, 1, 2);
  std::string defects;
  int num_kills = 0, num_told = 0;
  for (int point = 0; point < num_points[static_cast<size_t>(victim)]; ++point) {
    copy_folder(prepared, run);
    const std::string id = make_save_id();
    const int status = run_in_child([&] {
      std::vector<pid_t> children;
      for (int rank = 0; rank < kRanks; ++rank) {
        const pid_t child = ::fork();
        if (child != 0) {
          children.push_back(child);
          continue;
        }
        SaveOptions options = options_of_rank(rank, kRanks, id);
        options.group.timeout = milliseconds(200);
        options.observer = [&, points_left = point](std::string_view) mutable {
          if (rank == victim && points_left-- == 0) std::raise(SIGKILL);
        };
        int result = 0;
        try {
          save_checkpoint(run, parts[static_cast<size_t>(rank)], options);
        } catch (const Error& e) {
          result = e.code() == ExitCode::kIo ? 1 : 2;
        } catch (...) {
          result = 3;
        }
        ::_exit(result);
      }
      // Bit 0: the victim was killed. Bit 1: another rank threw Error(kIo). Bit 2: something else went wrong.
      int summary = 0;
      for (int rank = 0; rank < kRanks; ++rank) {
        int child_status = 0;
        ::waitpid(children[static_cast<size_t>(rank)], &child_status, 0);
        if (WIFSIGNALED(child_status)) {
          summary |= rank == victim && WTERMSIG(child_status) == SIGKILL ? 1 : 4;
        } else if (WEXITSTATUS(child_status) != 0) {
          summary |= WEXITSTATUS(child_status) == 1 ? 2 : 4;
        }
      }
      return summary;
    });
    num_kills += (status & 1) != 0;
    num_told += (status & 2) != 0;
    std::string defect = status < 4 ? "" : fmt::format("status {}; ", status);
    defect += defect_after(run, before, saved);
    if (!defect.empty()) defects += fmt::format("point {}: {}\n", point, defect);
  }
  CHECK(defects == "");
  // On a slow machine some may run into the time-out before they come to their point.
  CHECK(num_kills > num_points[static_cast<size_t>(victim)] / 2);
  CHECK(num_told > 5);
  CHECK(num_points[static_cast<size_t>(victim)] > 8);
}

TEST_CASE("a failure of any rank at any point of a save is told to all ranks and leaves no draft",
          "[engine][checkpoint][faults][ranks]") {
  const TemporaryFolder folder;
  const std::string prepared = folder / "prepared", run = folder / "run";
  prepare(prepared);
  const CheckpointContents before = small_contents(20), saved = small_contents(20, 1);
  copy_folder(prepared, run);
  const std::vector<int> num_points = count_points(run, saved);
  const int victim = GENERATE(0, 1, 2);
  const ExitCode code = victim == 1 ? ExitCode::kInternal : ExitCode::kIo;
  std::string defects;
  int num_failed = 0;
  for (int point = 0; point < num_points[static_cast<size_t>(victim)]; ++point) {
    copy_folder(prepared, run);
    std::string at;
    const auto errors = save_by_ranks(run, saved, kRanks, [&](int rank, SaveOptions& options) {
      if (rank != victim) return;
      options.observer = [&, points_left = point](std::string_view name) mutable {
        if (points_left-- != 0) return;
        at = name;
        throw Error(code, "the disk is on fire");
      };
    });
    std::string defect;
    const std::string told = messages_of(errors);
    // Rank 0's failure to tidy up is none of the save; its failure to sync what is published comes after the others
    // have seen it there.
    const bool published = victim == 0 && (at == "sync " + run || told.empty());
    for (size_t rank = 0; rank < kRanks && !published; ++rank) {
      const std::string expected = static_cast<int>(rank) == victim
                                       ? "the disk is on fire"
                                       : fmt::format("rank {}: the disk is on fire", victim);
      if (!errors[rank] || errors[rank]->what() != expected || errors[rank]->code() != code) {
        defect = "not told on all ranks: " + told;
      }
    }
    num_failed += !told.empty();
    if (!told.empty() && fs::exists(run + "/step_00000020.tmp")) defect += "the draft is still there; ";
    defect += defect_after(run, before, saved);
    if (!defect.empty()) defects += fmt::format("point {} ({}): {}\n", point, at, defect);
  }
  CHECK(defects == "");
  CHECK(num_failed > (victim == 0 ? 15 : num_points[static_cast<size_t>(victim)] - 1));
}

TEST_CASE("ranks that never come are named", "[engine][checkpoint][faults][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const auto save_without = [&](const std::set<int>& absent) {
    const std::vector<CheckpointContents> parts = split_contents(small_contents(10), 4);
    const std::string id = make_save_id();
    return on_ranks(4, [&](int rank) {
      if (absent.contains(rank)) return;
      SaveOptions options = options_of_rank(rank, 4, id);
      options.group.timeout = milliseconds(300);
      save_checkpoint(run, parts[static_cast<size_t>(rank)], options);
    });
  };
  const auto without_2_and_3 = save_without({2, 3});
  for (const int rank : {0, 1}) {
    const auto& error = without_2_and_3[static_cast<size_t>(rank)];
    REQUIRE(error);
    CHECK(error->code() == ExitCode::kIo);
    CHECK(mentions(error->what(), "step_00000010: not saved: ranks 2, 3 did not finish within 0.3 s"));
  }
  CHECK(names_in(run).empty());
  for (const auto& error : save_without({0, 3})) {
    if (error) CHECK(mentions(error->what(), "rank 0 did not begin the save within 0.3 s"));
  }
  CHECK(names_in(run).empty());
}

TEST_CASE("a rank of an earlier save that wakes up late does not disturb a later one of the same step",
          "[engine][checkpoint][faults][ranks][slow]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  // Rank 1 of the first save stands still in the middle of its file until the second is complete.
  std::atomic<bool> arrived = false, go_on = false;
  const std::vector<CheckpointContents> parts = split_contents(small_contents(10), 2);
  std::optional<Error> late_error;
  std::thread late([&] {
    SaveOptions options = options_of_rank(1, 2, "first");
    options.observer = [&](std::string_view point) {
      if (!point.starts_with("sync ") || arrived) return;
      arrived = true;
      while (!go_on) std::this_thread::sleep_for(milliseconds(1));
    };
    try {
      save_checkpoint(run, parts[1], options);
    } catch (const Error& e) {
      late_error = e;
    }
  });
  SaveOptions options = options_of_rank(0, 2, "first");
  options.group.timeout = milliseconds(500);
  CHECK(mentions(error_of([&] { save_checkpoint(run, parts[0], options); }).what(), "rank 1 did not finish"));
  CHECK(arrived);
  CHECK(messages_of(save_by_ranks(run, small_contents(10, 1), 2)) == "");
  go_on = true;
  late.join();
  REQUIRE(late_error);
  CHECK(mentions(late_error->what(), "rank 0 has given up this save"));
  CHECK(names_in(run) == std::set<std::string>{"step_00000010"});
  CHECK(same(*read_newest(run).contents, small_contents(10, 1)));
}

TEST_CASE("rank 0 that fails before the save begins says so to the ranks that wait for it",
          "[engine][checkpoint][faults][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const auto errors = save_by_ranks(run, small_contents(10), 3, [&](int rank, SaveOptions& options) {
    if (rank == 0) options.observer = [](std::string_view) { throw Error(ExitCode::kBadInput, "no such disk"); };
  });
  CHECK(messages_of(errors) ==
        "on rank 0: no such disk\non rank 1: rank 0: no such disk\non rank 2: rank 0: no such disk\n");
  CHECK(names_in(run).empty());
}

TEST_CASE("a rank's file that is not as long as the rank says makes no checkpoint",
          "[engine][checkpoint][faults][ranks]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const auto errors = save_by_ranks(run, small_contents(20), kRanks, [&](int rank, SaveOptions& options) {
    if (rank != 1) return;
    options.observer = [](std::string_view point) {  // as a network file system that has lost the end of a write
      const size_t at = point.find(".ranks/rank_0001.done");
      if (!point.starts_with("rename ") || at == std::string_view::npos) return;
      const fs::path attempt(point.substr(7, at - 7));
      for (const auto& file : fs::directory_iterator(attempt)) {
        if (file.path().filename().string().starts_with("rank_0001_")) {
          fs::resize_file(file.path(), file.file_size() + 1);
        }
      }
    };
  });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK(error->code() == ExitCode::kIo);
    CHECK(mentions(error->what(), "the rank that wrote it says"));
  }
  CHECK(list_checkpoints(run).empty());
}
