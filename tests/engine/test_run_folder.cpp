// A run folder that is moved, removed or taken by another run while a run trains in it.
#include <atomic>
#include <map>

#include "engine/checkpoint/checkpoint.h"
#include "engine/files/file_io.h"
#include "engine/training/metrics_log.h"
#include "engine/training/run_lock.h"
#include "tests/engine/checkpoint_fixture_ranks.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

namespace {

void ignore(const std::string&) {}

// The paths of all files below a folder, with their contents.
std::map<std::string, std::string> files_in(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    files[entry.path().string()] = entry.is_regular_file() ? read_file(entry.path()) : "";
  }
  return files;
}

// A run folder whose name another run takes at a chosen look at it.
class TakenFolder {
 public:
  explicit TakenFolder(const TemporaryFolder& folder) : run(folder / "run"), moved(folder / "moved") {
    fs::create_directory(run);
    for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), {.keep = 0});
    for (const int64_t step : {10, 20, 30}) save_checkpoint(other, small_contents(step, 1), {.keep = 0});
    fs::create_directory(other + "/step_00000010.old");  // what a save would clear away or rename
    fs::create_directory(other + "/step_00000005.old");
    fs::create_directory(other + "/step_00000030.tmp");
    before = files_in(other);
  }

  // For SaveOptions::check_folder: after the look number `last` the folder is another.
  std::function<void()> until_look(int last) {
    return [this, last] {
      if (num_looks++ == last) {
        fs::rename(run, moved);
        fs::rename(other, run);
        taken = true;
      }
      if (taken) throw Error(ExitCode::kIo, "taken");
    };
  }

  bool other_is_untouched() const {
    std::map<std::string, std::string> now;
    for (const auto& [path, content] : files_in(run)) now[other + path.substr(run.size())] = content;
    return now == before;
  }

  const std::string run, moved, other = run + "_of_another";
  std::map<std::string, std::string> before;
  std::atomic<int> num_looks = 0;
  std::atomic<bool> taken = false;
};

}  // namespace

TEST_CASE("a lock says whether the folder is still the run's own", "[engine][run_folder]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run", moved = folder / "moved";
  fs::create_directory(run);
  const RunLock lock(run, RunLock::Role::kHolder), witness(run, RunLock::Role::kWitness);
  const auto is_ours = [&] {
    std::vector<bool> answers;
    for (const RunLock* each : {&lock, &witness}) {
      try {
        each->require_ours();
        answers.push_back(true);
      } catch (const Error& e) {
        CHECK(e.code() == ExitCode::kIo);
        CHECK(mentions(e.what(), run + ": is no longer the folder in which this run began"));
        answers.push_back(false);
      }
    }
    REQUIRE(answers[0] == answers[1]);
    return static_cast<bool>(answers[0]);
  };
  CHECK(is_ours());
  fs::rename(run, moved);
  CHECK_FALSE(is_ours());
  fs::create_directory(run);
  CHECK_FALSE(is_ours());
  const RunLock of_another(run, RunLock::Role::kHolder);
  CHECK_FALSE(is_ours());
  fs::remove_all(run);
  fs::rename(moved, run);
  CHECK(is_ours());
  CHECK(mentions(error_of([&] { RunLock(run, RunLock::Role::kHolder); }).what(), "another process"));
  fs::remove(run + "/lock");
  CHECK_FALSE(is_ours());
}

TEST_CASE("a lock that is new and alone in its folder is removed with it", "[engine][run_folder]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run", lock = run + "/lock";
  fs::create_directory(run);
  const auto hold = [&](const std::function<void()>& meanwhile) {
    const RunLock held(run, RunLock::Role::kHolder);
    CHECK(fs::exists(lock));
    meanwhile();
  };
  hold([] {});
  CHECK_FALSE(fs::exists(run));
  fs::create_directory(run);
  hold([&] {  // another run has taken the folder's name
    fs::rename(run, run + "_moved");
    fs::create_directory(run);
    std::ofstream(lock) << "";
  });
  CHECK(fs::exists(lock));
  hold([] {});
  CHECK(fs::exists(lock));  // it was there before
  fs::remove(lock);
  hold([&] { std::ofstream(run + "/config.json") << "{}"; });
  CHECK(fs::exists(lock));
}

TEST_CASE("a save whose folder another run has taken touches nothing there", "[engine][checkpoint][run_folder]") {
  // The saves of a new step, which removes an old one, and of a step that is there already.
  const int64_t step = GENERATE(30, 20);
  bool taken = true;
  for (int look = 0; taken; ++look) {
    CAPTURE(step, look);
    const TemporaryFolder folder;
    TakenFolder place(folder);
    SaveOptions options{.keep = 1, .max_shard_bytes = 100};
    options.check_folder = place.until_look(look);
    std::optional<Error> error;
    try {
      save_checkpoint(place.run, small_contents(step, 2), options);
    } catch (const Error& e) {
      error = e;
    }
    taken = place.taken;
    REQUIRE(taken == error.has_value());
    if (!taken) {
      CHECK(look >= 3);  // before the save, before the rename, before the removal
      continue;
    }
    CHECK(error->code() == ExitCode::kIo);
    CHECK(place.other_is_untouched());
    CHECK(read_newest(place.moved).contents);
  }
}

TEST_CASE("ranks whose folder another run has taken touch nothing there",
          "[engine][checkpoint][ranks][run_folder]") {
  bool taken = true;
  for (int look = 0; taken; look = 2 * look + 1) {
    CAPTURE(look);
    const TemporaryFolder folder;
    TakenFolder place(folder);
    const auto errors = save_by_ranks(place.run, small_contents(30, 2), 3, [&](int rank, SaveOptions& options) {
      options.group.timeout = std::chrono::minutes(5);  // a hang would be seen
      const std::function<void()> look_of_first = place.until_look(look);
      options.check_folder = [&, rank, look_of_first] {
        if (rank == 0) look_of_first();
        if (place.taken) throw Error(ExitCode::kIo, "taken");
      };
    });
    taken = place.taken;
    if (!taken) continue;
    REQUIRE(errors[0]);
    CHECK(place.other_is_untouched());
  }
}

TEST_CASE("a save does not make a run folder that is gone", "[engine][checkpoint][run_folder]") {
  const TemporaryFolder folder;
  const Error error =
      error_of([&] { save_checkpoint(folder / "run", small_contents(10), {.check_folder = [] {}}); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(mentions(error.what(), "run/step_00000010.tmp"));
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("metrics go on at their path when the file there is another", "[engine][metrics][run_folder]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const RunLock lock(folder.path(), RunLock::Role::kHolder);
  MetricsLog log(path, &lock);
  log.write({{"step", 1}});
  fs::rename(path, folder / "rotated");
  log.write({{"step", 2}});
  log.write({{"step", 3}});
  CHECK(read_file(folder / "rotated") == "{\"step\":1}\n");
  CHECK(read_file(path) == "{\"step\":2}\n{\"step\":3}\n");
  fs::remove(path);
  log.write({{"step", 4}});
  CHECK(read_file(path) == "{\"step\":4}\n");
  fs::remove(path);
  fs::remove(folder / "lock");  // another run's folder by now
  CHECK(error_of([&] { log.write({{"step", 5}}); }).code() == ExitCode::kIo);
  CHECK(names_in(folder.path()) == std::set<std::string>{"rotated"});
}

TEST_CASE("what has the name of a step folder and is none is kept aside by a save",
          "[engine][checkpoint][run_folder]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  fs::create_directory(run);
  fs::create_symlink(folder / "nowhere", run + "/step_00000010");
  write_file(run + "/step_00000010.refused", "one from before");
  write_file(run + "/step_00000020", "precious");
  std::vector<std::string> reports;
  const SaveOptions options{.report = [&](const std::string& message) { reports.push_back(message); }};
  for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), options);
  CHECK(names_in(run) == std::set<std::string>{"step_00000010", "step_00000010.refused", "step_00000010.refused.2",
                                               "step_00000020", "step_00000020.refused"});
  CHECK(fs::is_symlink(run + "/step_00000010.refused.2"));
  CHECK(read_file(run + "/step_00000020.refused") == "precious");
  REQUIRE(reports.size() == 2);
  CHECK(mentions(reports[0], "step_00000010: is not a folder; renamed to " + run + "/step_00000010.refused.2"));
  CHECK(same(*read_newest(run).contents, small_contents(20)));
}

TEST_CASE("a checkpoint of a later Parka is not passed over", "[engine][checkpoint][ranks][run_folder]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run", manifest = run + "/step_00000020/manifest.json";
  for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), {.keep = 0});
  std::string body = read_file(manifest);
  body.resize(body.rfind(",\n  \"manifest_xxh3_128\""));
  const std::string version = "\"version\": 1";
  body.replace(body.find(version), version.size(), "\"version\": 3");
  Checksum checksum;
  checksum.update(as_bytes(body));
  write_file(manifest, body + ",\n  \"manifest_xxh3_128\": \"" + checksum.hex() + "\"\n}\n");
  const int num_ranks = GENERATE(1, 2);
  const auto errors = on_ranks(num_ranks, [&](Communicator& ranks) { load_newest(run, ignore, ranks); });
  for (const auto& error : errors) {
    REQUIRE(error);
    CHECK(error->code() == ExitCode::kBadInput);
    CHECK(mentions(error->what(), "format version 3, this Parka reads versions 1 and 2"));
  }
}

TEST_CASE("a checkpoint that is removed while it is read does not fail its reader",
          "[engine][checkpoint][run_folder]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  for (const int64_t step : {10, 20}) save_checkpoint(run, small_contents(step), {.keep = 0});
  // Between the list and the look at it: of a group of one the list is the first thing that is gathered, so the
  // removal happens in the report of another that is refused.
  fs::create_directory(run + "/step_00000030");
  int num_reports = 0;
  const auto loaded = load_newest(run, [&](const std::string&) {
    if (++num_reports > 1) return;
    fs::rename(run + "/step_00000020", run + "/step_00000020.delete");
    save_checkpoint(run, small_contents(40), {.keep = 0});
  });
  REQUIRE(loaded);
  CHECK(loaded->step() == 40);
  // And once it is loaded.
  fs::remove_all(run);
  CHECK(same(read_contents(*loaded), small_contents(40)));
}

TEST_CASE("a new run keeps the steps of the one before aside, and a link stays one",
          "[engine][metrics][run_folder]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl", target = folder / "target";
  CHECK(MetricsLog::begin_anew(path).empty());
  CHECK(names_in(folder.path()).empty());
  fs::create_symlink(target, path);
  write_file(target, R"({"kind":"eval","step":0})"
                     "\n"
                     R"({"kind":"tra)");
  CHECK(MetricsLog::begin_anew(path).empty());
  CHECK(read_file(target).empty());
  const std::string steps = R"({"kind":"eval","step":0})"
                            "\n"
                            R"({"kind":"train","step":1})"
                            "\n";
  for (const char* suffix : {".1", ".2"}) {
    write_file(target, steps);
    CHECK(MetricsLog::begin_anew(path) == target + suffix);
    CHECK(read_file(target + suffix) == steps);
    CHECK_FALSE(fs::exists(target));
  }
  write_file(target, steps + R"({"kind":"train","step":2})"
                             "\n"
                             R"({"kind":"start","step":1})"
                             "\n");
  const MetricsLog::Truncated result = MetricsLog::truncate_after(path, 1);
  CHECK(result.later == 1);
  CHECK(result.missing == 0);
  CHECK(read_file(target) == steps + R"({"kind":"start","step":1})"
                                     "\n");
  CHECK(fs::is_symlink(path));
}
