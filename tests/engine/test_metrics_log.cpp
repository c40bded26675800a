#include "engine/training/metrics_log.h"

#include <csignal>
#include <filesystem>
#include <limits>

#include <sys/resource.h>
#include <sys/stat.h>

#include "engine/training/run_folder.h"
#include "engine/training/run_records.h"
#include "tests/engine/checkpoint_fixture.h"

using namespace parka;
using namespace parka::test;
namespace fs = std::filesystem;

TEST_CASE("metrics are whole lines that are there at once and are only added to", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  {
    MetricsLog log(path);
    log.write({{"step", 1}, {"loss", 2.5}});
    CHECK(read_file(path) == "{\"step\":1,\"loss\":2.5}\n");
  }
  MetricsLog log(path);
  log.write({{"step", 2}, {"loss", std::numeric_limits<double>::quiet_NaN()}, {"note", "a\nb\xff"}});
  CHECK(read_file(path) ==
        "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":null,\"note\":\"a\\nb\xef\xbf\xbd\"}\n");
}

TEST_CASE("metrics that cannot be opened are bad input, that cannot be written an I/O error", "[engine][metrics]") {
  const TemporaryFolder folder;
  CHECK(error_of([&] { MetricsLog log(folder / "missing/metrics.jsonl"); }).code() == ExitCode::kBadInput);
  MetricsLog full("/dev/full");
  const Error error = error_of([&] { full.write({{"step", 1}}); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(mentions(error.what(), "cannot write /dev/full: No space left on device"));
}

TEST_CASE("a line for which there is no room leaves no half of it", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const int status = run_in_child([&] {
    MetricsLog log(path);
    log.write({{"step", 1}});
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{20, 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    try {
      log.write({{"step", 2}, {"loss", 2.5}});
      return 3;
    } catch (const Error& e) {
      return e.code() == ExitCode::kIo ? 0 : 4;
    }
  });
  CHECK(status == 0);
  CHECK(read_file(path) == "{\"step\":1}\n");
}

TEST_CASE("resuming takes out later records and torn lines, and nothing else", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const auto [before, after, later, unreadable] = GENERATE(table<std::string, std::string, int, int>({
      {"", "", 0, 0},
      {"{\"step\":1}\n{\"step\":5}\n", "{\"step\":1}\n{\"step\":5}\n", 0, 0},
      {"{\"step\":5}\n{\"step\":6}\n{\"step\":7}\n", "{\"step\":5}\n", 2, 0},
      {"{\"step\":6}\n", "", 1, 0},
      // The order does not matter, spaces stay, and what has no step is kept.
      {"{\"step\":9}\n{ \"step\" : 4 }\n{\"event\":\"resumed\"}\n", "{ \"step\" : 4 }\n{\"event\":\"resumed\"}\n",
       1, 0},
      {"{\"step\":\"9\"}\n{\"step\":9.5}\n{\"step\":-1}\n", "{\"step\":\"9\"}\n{\"step\":9.5}\n{\"step\":-1}\n", 0,
       0},
      // Torn at the end; torn in the middle by a run that was resumed without this; zeros after a power failure.
      {"{\"step\":1}\n{\"step\":2,\"lo", "{\"step\":1}\n", 0, 1},
      {"{\"step\":1}\n{\"st{\"step\":2}\n{\"step\":3}\n", "{\"step\":1}\n{\"step\":3}\n", 0, 1},
      {std::string("{\"step\":1}\n\0\0\0", 14), "{\"step\":1}\n", 0, 1},
      {"{\"step\":1}\n17\n\n", "{\"step\":1}\n", 0, 2},
      // Only its end of line is missing: a whole record all the same.
      {"{\"step\":1}\n{\"step\":2}", "{\"step\":1}\n{\"step\":2}\n", 0, 0},
  }));
  CAPTURE(before);
  write_file(path, before);
  const MetricsLog::Truncated removed = MetricsLog::truncate_after(path, 5);
  CHECK(read_file(path) == after);
  CHECK(removed.later == later);
  CHECK(removed.unreadable == unreadable);
  CHECK(names_in(folder.path()) == std::set<std::string>{"metrics.jsonl"});
}

TEST_CASE("of the last step those evaluations are removed that are made again", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const std::string kept =
      "{\"kind\":\"eval_set\",\"set\":\"a\",\"step\":4}\n"
      "{\"kind\":\"train\",\"step\":5}\n"
      "{\"kind\":\"eval_set\",\"set\":\"b\",\"step\":5}\n"
      "{\"kind\":\"task\",\"task\":\"a\",\"step\":5}\n";
  write_file(path, kept +
                       "{\"kind\":\"eval\",\"step\":5}\n{\"kind\":\"eval_set\",\"set\":\"a\",\"step\":5}\n"
                       "{\"kind\":\"task\",\"task\":\"b\",\"step\":5}\n");
  const MetricsLog::Truncated removed =
      MetricsLog::truncate_after(path, 5, {"data.eval", "set a", "task b", "task c"});
  CHECK(read_file(path) == kept);
  CHECK(removed.evaluations == 3);
}

TEST_CASE("metrics cut at any byte lose at most the torn line", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const std::string whole = "{\"step\":1,\"loss\":2.5}\n{\"step\":2,\"loss\":2.25}\n";
  int wrong = 0;
  for (size_t size = 0; size <= whole.size(); ++size) {
    write_file(path, whole.substr(0, size));
    MetricsLog::truncate_after(path, 100);
    MetricsLog(path).write({{"step", 3}});
    const size_t lines = std::count(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size), '\n') +
                         (size < whole.size() && whole[size] == '\n');
    const size_t kept = lines == 0 ? 0 : lines == 1 ? whole.find('\n') + 1 : whole.size();
    wrong += read_file(path) != whole.substr(0, kept) + "{\"step\":3}\n";
  }
  CHECK(wrong == 0);
}

TEST_CASE("metrics that are not there need no truncation", "[engine][metrics]") {
  const TemporaryFolder folder;
  const MetricsLog::Truncated removed = MetricsLog::truncate_after(folder / "metrics.jsonl", 5);
  CHECK(removed.later + removed.unreadable == 0);
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("the history of a run adds up all of its starts", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  CHECK(read_history(path, 5).wall_seconds == 0);
  MetricsLog log(path);
  const auto start = [&](double earlier, const char* tuning) {
    log.write({{"kind", "start"}, {"step", 0}, {"earlier_seconds", earlier}, {"gemm_tuning", tuning}});
  };
  const auto train = [&](int64_t step, double seconds, double wall) {
    log.write({{"kind", "train"}, {"step", step}, {"seconds", seconds}, {"wall_seconds", wall}});
  };
  start(0, "a.json");
  train(1, 2, 10);
  train(2, 3, 15);
  start(15, "b.json");
  train(2, 5, 8);  // again
  start(23, "");
  train(3, 7, 4);
  log.write({{"kind", "eval"}, {"step", 3}, {"loss", 2.5}, {"wall_seconds", 6}});
  log.write({{"kind", "eval_set"}, {"step", 3}, {"loss", nullptr}, {"wall_seconds", 6}});  // is made again
  train(4, 100, 9);  // behind the step from which the next start resumes: its wall time has passed all the same
  const RunHistory history = read_history(path, 3);
  CHECK(history.wall_seconds == 23 + 9);
  CHECK(history.step_seconds == 2 + 3 + 5 + 7);
  CHECK(history.evaluations == std::set<std::string>{"data.eval"});
  CHECK(history.gemm_tuning.empty());
}

TEST_CASE("a run whose metrics were rotated keeps its goodput", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  MetricsLog log(path);
  // As a run writes it after the records of its first 800 s and 100 steps were moved away.
  log.write({{"kind", "start"}, {"step", 0}, {"earlier_seconds", 200}});
  log.write({{"kind", "train"}, {"step", 101}, {"seconds", 8}, {"goodput", 0.9}, {"wall_seconds", 800}});
  log.write({{"kind", "train"}, {"step", 102}, {"seconds", 8}, {"goodput", 0.75}, {"wall_seconds", 1000}});
  log.write({{"kind", "train"}, {"step", 103}, {"seconds", 8}, {"goodput", 0.7}, {"wall_seconds", 1100}});
  const RunHistory history = read_history(path, 102);
  CHECK(history.wall_seconds == 1300);
  CHECK(history.step_seconds == 900);
}

TEST_CASE("of long metrics a resumed run reads the end", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  // What is before the records of the last steps is of no use, and would change what is found.
  std::string all = "{\"kind\":\"start\",\"earlier_seconds\":1}\n{\"torn\n";
  const std::string filler = "{\"kind\":\"moments\",\"step\":1,\"text\":\"" + std::string(1000, 'x') + "\"}\n";
  while (all.size() < 40u << 20) all += filler;
  const std::string start = "{\"kind\":\"start\",\"step\":0,\"earlier_seconds\":50,\"gemm_tuning\":\"a.json\"}\n";
  all += start;
  const auto train = [](int64_t step) {
    return fmt::format("{{\"kind\":\"train\",\"step\":{},\"goodput\":0.5,\"wall_seconds\":{}}}\n", step, 10 * step);
  };
  for (int64_t step = 1; step <= 4; ++step) all += train(step);
  const std::string kept = all;
  write_file(path, kept + train(5));
  CHECK(MetricsLog::truncate_after(path, 4).unreadable == 0);
  CHECK(read_file(path) == kept);
  for (int i = 0; i < 20000; ++i) all += filler;  // of step 1, as if written late
  const std::string late = all;
  write_file(path, late + train(5) + "{\"kind\":\"train\",\"st");
  const MetricsLog::Truncated removed = MetricsLog::truncate_after(path, 4);
  CHECK(removed.later == 1);
  CHECK(removed.unreadable == 1);
  CHECK(removed.missing == 0);
  CHECK(read_file(path) == late);
  const RunHistory history = read_history(path, 4);
  CHECK(history.wall_seconds == 50 + 40);
  CHECK(history.step_seconds == 0.5 * (50 + 40));
  CHECK(history.gemm_tuning == "a.json");
}

TEST_CASE("metrics that are no regular file are refused before they are read", "[engine][metrics]") {
  const TemporaryFolder folder;
  const std::string path = folder / "metrics.jsonl";
  const std::string kind = GENERATE("zero", "null", "pipe", "folder");
  CAPTURE(kind);
  if (kind == "pipe") REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  if (kind == "folder") fs::create_directory(path);
  if (kind == "zero" || kind == "null") fs::create_symlink("/dev/" + kind, path);
  CHECK(error_of([&] { read_history(path, 3); }).code() == ExitCode::kBadInput);
  CHECK(error_of([&] { MetricsLog::truncate_after(path, 3); }).code() == ExitCode::kBadInput);
  CHECK(error_of([&] { MetricsLog::begin_anew(path); }).code() == ExitCode::kBadInput);
  CHECK(error_of([&] { check_run_folder(folder.path(), "{}"); }).code() == ExitCode::kBadInput);
}
