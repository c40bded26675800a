// What a kill, a full disk or a failing step of a save does to the checkpoints that are there: nothing.
#include <csignal>

#include <fcntl.h>
#include <sys/resource.h>

#include "engine/checkpoint/checkpoint.h"
#include "engine/files/file_io.h"
#include "tests/engine/checkpoint_fixture.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

namespace {

SaveOptions options_with(std::function<void(std::string_view)> observer, int writers = 1) {
  return {.keep = 2, .max_shard_bytes = 50, .writers = writers, .observer = std::move(observer)};
}

// A folder before a save, and that save.
struct Scenario {
  std::string name;
  std::function<void(const std::string& run)> prepare;
  CheckpointContents saved;
  std::optional<CheckpointContents> before;  // what loads until the save is complete
};

std::vector<Scenario> scenarios() {
  const auto save_10_and_20 = [](const std::string& run) {
    for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), options_with({}));
  };
  return {
      {"first save", [](const std::string& run) { fs::create_directory(run); }, small_contents(10), std::nullopt},
      {"another step, an old one goes", save_10_and_20, small_contents(30), small_contents(20)},
      {"the same step again", save_10_and_20, small_contents(20, 1), small_contents(20)},
      {"over the leftovers of dead runs",
       [=](const std::string& run) {
         save_10_and_20(run);
         fs::rename(run + "/step_00000020", run + "/step_00000020.old");
         for (const char* name : {"/step_00000020.tmp", "/step_00000010.delete", "/step_00000030.tmp"}) {
           fs::create_directory(run + name);
           write_file(run + name + "/shard_0.safetensors", "half of a file");
         }
         copy_folder(run + "/step_00000010", run + "/step_00000010.old");
       },
       small_contents(20, 1), small_contents(20)},
  };
}

// What is wrong with `run` after a save from `before` to `after` was cut off; empty when nothing is.
std::string defect_after_cut(const std::string& run,
                             const std::vector<std::optional<CheckpointContents>>& allowed) {
  const Newest newest = read_newest(run);
  if (!newest.refusals.empty()) return "refused: " + newest.refusals[0];
  const auto equal = [&](const std::optional<CheckpointContents>& contents) {
    return newest.contents ? contents && same(*newest.contents, *contents) : !contents;
  };
  if (std::none_of(allowed.begin(), allowed.end(), equal)) return "loads neither the old nor the new checkpoint";
  return "";
}

// The next save after a cut must work, be what loads, and leave no trace of the cut.
std::string defect_after_next_save(const std::string& run) {
  std::vector<std::string> reports;
  SaveOptions options = options_with({});
  options.report = [&](const std::string& message) { reports.push_back(message); };
  save_checkpoint(run, small_contents(40), options);
  if (!reports.empty()) return "the next save reports: " + reports[0];
  for (const std::string& name : names_in(run)) {
    if (name.find('.') != std::string::npos) return "the next save left " + name;
  }
  if (list_checkpoints(run).size() > 2) return "the next save kept too many";
  const Newest newest = read_newest(run);
  return newest.contents && same(*newest.contents, small_contents(40)) ? "" : "the next save does not load";
}

}  // namespace

TEST_CASE("a kill at any point of a save loses nothing", "[engine][checkpoint][faults][slow]") {
  const TemporaryFolder folder;
  const std::string prepared = folder / "prepared", run = folder / "run";
  const Scenario scenario = scenarios()[GENERATE(0u, 1u, 2u, 3u)];
#ifdef __SANITIZE_THREAD__
  const int writers = 1;  // ThreadSanitizer allows a child of fork() no threads
#else
  const int writers = GENERATE(1, 3);
#endif
  scenario.prepare(prepared);
  int num_kills = 0;
  std::string defects;
  for (bool killed = true; killed; ++num_kills) {
    copy_folder(prepared, run);
    const int status = run_in_child([&] {
      int points_left = num_kills;
      const auto kill = [&](std::string_view) {
        if (points_left-- == 0) std::raise(SIGKILL);
      };
      save_checkpoint(run, scenario.saved, options_with(kill, writers));
      return 0;
    });
    killed = status == 128 + SIGKILL;
    REQUIRE((killed || status == 0));
    std::string defect = defect_after_cut(run, {scenario.before, scenario.saved});
    if (defect.empty()) defect = defect_after_next_save(run);
    if (!defect.empty()) defects += fmt::format("point {}: {}\n", num_kills, defect);
  }
  CAPTURE(scenario.name, writers);
  CHECK(defects == "");
  CHECK(num_kills > 20);
}

TEST_CASE("a kill during the save that follows a kill loses nothing", "[engine][checkpoint][faults][slow]") {
  const TemporaryFolder folder;
  const Scenario scenario = scenarios()[GENERATE(2u, 3u)];
  scenario.prepare(folder / "prepared");
  // The folder as it is at a point is the folder that a kill at that point leaves, so one save gives all of them.
  const auto cut_everywhere = [&](const std::string& from, const CheckpointContents& contents,
                                  const std::string& to) {
    copy_folder(from, folder / "live");
    int num_cuts = 0;
    save_checkpoint(folder / "live", contents, options_with([&](std::string_view) {
                      copy_folder(folder / "live", to + std::to_string(num_cuts++));
                    }));
    return num_cuts;
  };
  const CheckpointContents again = small_contents(20, 2);
  const int num_first = cut_everywhere(folder / "prepared", scenario.saved, folder / "first_");
  std::string defects;
  for (int first = 0; first < num_first; ++first) {
    const int num_second = cut_everywhere(folder / ("first_" + std::to_string(first)), again, folder / "second_");
    for (int second = 0; second < num_second; ++second) {
      const std::string run = folder / ("second_" + std::to_string(second));
      const std::string defect = defect_after_cut(run, {scenario.before, scenario.saved, again});
      if (!defect.empty()) defects += fmt::format("points {} and {}: {}\n", first, second, defect);
    }
  }
  CAPTURE(scenario.name);
  CHECK(defects == "");
  CHECK(num_first > 20);
}

TEST_CASE("a step of a save that fails leaves the earlier checkpoints and no draft",
          "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  const std::string prepared = folder / "prepared", run = folder / "run";
  const Scenario scenario = scenarios()[GENERATE(0u, 1u, 2u, 3u)];
  const int writers = GENERATE(1, 3);
  scenario.prepare(prepared);
  std::string defects;
  int num_failures = 0, num_reports = 0;
  for (bool reached = true; reached; ++num_failures) {
    copy_folder(prepared, run);
    int points_left = num_failures;
    reached = false;
    const auto fail = [&](std::string_view) {
      if (points_left-- != 0) return;
      reached = true;
      throw Error(ExitCode::kIo, "the disk is on fire");
    };
    SaveOptions options = options_with(fail, writers);
    options.report = [&](const std::string& message) { num_reports += mentions(message, "the disk is on fire"); };
    bool saved = true;
    try {
      save_checkpoint(run, scenario.saved, options);
    } catch (const Error& e) {
      saved = false;
      REQUIRE(e.code() == ExitCode::kIo);
      REQUIRE(mentions(e.what(), "the disk is on fire"));  // of several writers the one's that failed
    }
    // The new checkpoint may be there after a failure when only the last sync of all failed.
    std::string defect =
        saved ? defect_after_cut(run, {scenario.saved}) : defect_after_cut(run, {scenario.before, scenario.saved});
    if (!saved && fs::exists(run + fmt::format("/step_{:08}.tmp/manifest.json", scenario.saved.step))) {
      defect = "the draft is still there";
    }
    if (defect.empty()) defect = defect_after_next_save(run);
    if (!defect.empty()) defects += fmt::format("point {}: {}\n", num_failures, defect);
  }
  CAPTURE(scenario.name, writers);
  CHECK(defects == "");
  CHECK(num_failures > 20);
  // A failure to tidy up is no failure of the save, but it is told.
  CHECK((num_reports > 0 || !scenario.before));
}

TEST_CASE("everything is on disk before the checkpoint gets its name, and old ones go last",
          "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run", draft = run + "/step_00000020.tmp";
  for (const int64_t step : {10, 20}) {
    save_checkpoint(run, small_contents(step), {});
  }
  std::vector<std::string> points;
  const auto observer = [&](std::string_view point) {
    if (points.empty() || points.back() != point) points.emplace_back(point);
  };
  save_checkpoint(run, small_contents(20), {.keep = 1, .max_shard_bytes = 100, .observer = observer});
  CHECK(points == std::vector<std::string>{
                      "remove " + draft,
                      "make " + draft,
                      "create " + draft + "/shard_0.safetensors",
                      "write " + draft + "/shard_0.safetensors",
                      "sync " + draft + "/shard_0.safetensors",
                      "create " + draft + "/shard_1.safetensors",
                      "write " + draft + "/shard_1.safetensors",
                      "sync " + draft + "/shard_1.safetensors",
                      "create " + draft + "/manifest.json",
                      "write " + draft + "/manifest.json",
                      "sync " + draft + "/manifest.json",
                      "sync " + draft,
                      "rename " + run + "/step_00000020",  // to .old
                      "rename " + draft,
                      "sync " + run,
                      "rename " + run + "/step_00000020.old",  // to .delete
                      "remove " + run + "/step_00000020.delete",
                      "rename " + run + "/step_00000010",  // to .delete
                      "remove " + run + "/step_00000010.delete",
                  });
}

TEST_CASE("several writers write what one does", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  CheckpointContents contents = small_contents(10);
  for (uint64_t i = 0; i < 40; ++i) {
    contents.tensors.push_back(
        random_tensor(fmt::format("more.{}", i), DType::kF32, {3, 5 + static_cast<int64_t>(i)}, i));
  }
  const auto files_by = [&](int writers) {
    const std::string run = folder / fmt::format("run_{}", writers);
    save_checkpoint(run, contents, options_with({}, writers));
    std::map<std::string, std::string> files;
    for (const std::string& name : names_in(run + "/step_00000010")) {
      files[name] = read_file(run + "/step_00000010/" + name);
    }
    return files;
  };
  const auto expected = files_by(1);
  CHECK(expected.size() > 30);
  for (const int writers : {2, 3, 100}) CHECK(files_by(writers) == expected);
}

TEST_CASE("of several writers an error ends the others' files, too", "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  CheckpointContents contents{10, {}, {}};
  for (uint64_t i = 0; i < 6; ++i) {
    contents.tensors.push_back(random_tensor(fmt::format("large.{}", i), DType::kU8, {8 << 20}, i));
  }
  int num_writes = 0;
  const auto fail_early = [&](std::string_view point) {
    if (point.starts_with("write") && ++num_writes == 5) throw Error(ExitCode::kIo, "the disk is on fire");
  };
  const Error error = error_of([&] { save_checkpoint(run, contents, options_with(fail_early, 3)); });
  CHECK(std::string(error.what()) == "the disk is on fire");
  CHECK(names_in(run).empty());
  CHECK(num_writes < 6 * 32);  // the files were not written to their ends
}

TEST_CASE("a disk that fills up is an I/O error and harms no earlier checkpoint", "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  save_checkpoint(run, small_contents(10), options_with({}));
  const rlim_t limit = GENERATE(rlim_t{0}, 10, 400, 300'000);
  CheckpointContents large = small_contents(20);
  large.tensors.push_back(random_tensor("large", DType::kF32, {300, 1000}, 1));
  // A limit of the file size fails a write just as a full disk does, and needs no disk to fill.
  const int status = run_in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit size_limit{limit, limit};
    if (::setrlimit(RLIMIT_FSIZE, &size_limit) != 0) return 2;
    try {
      save_checkpoint(run, large, options_with({}));
      return 3;
    } catch (const Error& e) {
      const bool told =
          mentions(e.what(), run + "/step_00000020.tmp/shard_") && mentions(e.what(), "File too large");
      return e.code() == ExitCode::kIo && told ? 0 : 4;
    }
  });
  CHECK(status == 0);
  CHECK(names_in(run) == std::set<std::string>{"step_00000010"});
  CHECK(same(*read_newest(run).contents, small_contents(10)));
}

TEST_CASE("a write to a full device names the path and the reason", "[engine][checkpoint][faults]") {
  const FileDescriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  REQUIRE(full.get() != -1);
  const Error error = error_of([&] { write_fully(full.get(), as_bytes("x"), "/mnt/run/file"); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(std::string(error.what()) ==
        "cannot write /mnt/run/file: No space left on device; free space on that disk");
}

TEST_CASE("a large tensor gives the observer a point at least every 256 KiB", "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  int num_writes = 0;
  CheckpointContents contents{1, {}, {random_tensor("a", DType::kU8, {3 << 20}, 1)}};
  save_checkpoint(folder / "run", contents, options_with([&](std::string_view point) {
                    num_writes += mentions(std::string(point), "shard_0") && point.starts_with("write");
                  }));
  CHECK(num_writes >= 12);
}

TEST_CASE("a checkpoint's name is durable before older checkpoints are removed", "[engine][checkpoint][faults]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  save_checkpoint(run, small_contents(10), {.keep = 1});
  std::vector<std::string> points;
  const auto observer = [&](std::string_view point) { points.emplace_back(point); };
  save_checkpoint(run, small_contents(20), {.keep = 1, .observer = observer});
  const auto place_of = [&](auto is_it) { return std::ranges::find_if(points, is_it) - points.begin(); };
  const auto named =
      place_of([](const std::string& p) { return p.starts_with("rename ") && p.ends_with("step_00000020.tmp"); });
  const auto synced = std::find(points.begin() + named, points.end(), "sync " + run) - points.begin();
  const auto removed = place_of([](const std::string& p) { return p.find("step_00000010") != std::string::npos; });
  CAPTURE(points);
  CHECK((named < synced && synced < removed && removed < std::ssize(points)));
}
