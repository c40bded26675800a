#include "engine/checkpoint/checkpoint_saver.h"

#include <atomic>
#include <future>
#include <memory>
#include <span>
#include <thread>

#include <fmt/format.h>

#include "tests/engine/checkpoint_fixture.h"
#include "tests/support/no_threads.h"

using namespace parka;
using namespace parka::test;

namespace {

size_t num_complete(const std::string& folder) { return list_checkpoints(folder).size(); }

}  // namespace

TEST_CASE("saves go on in the background and one waits for the other", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  std::promise<void> go_on;
  std::shared_future<void> may_go_on = go_on.get_future().share();
  CheckpointSaver saver(run, {.keep = 0, .observer = [=](std::string_view) { may_go_on.wait(); }});
  saver.save(small_contents(1));
  CHECK(num_complete(run) == 0);  // it returned while the save stands still before its first step
  std::thread helper([&] { go_on.set_value(); });
  saver.save(small_contents(2));
  CHECK(num_complete(run) >= 1);  // it returned when the first was complete
  saver.wait();
  CHECK(num_complete(run) == 2);
  CHECK(same(*read_newest(run).contents, small_contents(2)));
  helper.join();
}

TEST_CASE("contents that one thread alone can read are read by it, whatever number of writers",
          "[engine][checkpoint]") {
  class OwnTensor final : public TensorSource {
   public:
    int64_t num_bytes() const override { return 4; }
    void read(const ByteSink& sink) const override {
      is_own_ = is_own_ && std::this_thread::get_id() == own_;
      const float value = 1.0f;
      sink(std::as_bytes(std::span(&value, 1)));
    }
    bool is_own() const { return is_own_; }

   private:
    std::thread::id own_ = std::this_thread::get_id();
    mutable std::atomic<bool> is_own_ = true;
  };
  const TemporaryFolder folder;
  CheckpointContents contents{1, nlohmann::json::object(), {}};
  const auto source = std::make_shared<OwnTensor>();
  for (int i = 0; i < 64; ++i) {
    HostTensor tensor{fmt::format("tensor.{}", i), DType::kF32, {1}, {}, {}, {}};
    tensor.source = source;
    contents.tensors.push_back(std::move(tensor));
  }
  CheckpointSaver saver(folder / "run", {.max_shard_bytes = 4, .writers = 4});
  saver.save_here(contents);
  saver.wait();
  CHECK(source->is_own());
  CHECK(read_newest(folder / "run").contents->tensors.size() == 64);
}

TEST_CASE("an error in the background reaches the next call, once", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  CheckpointSaver saver(folder / "file/run", {});
  saver.save(small_contents(1));
  CHECK(error_of([&] { saver.wait(); }).code() == ExitCode::kIo);
  saver.wait();
  saver.save(small_contents(2));
  CHECK(error_of([&] { saver.save(small_contents(3)); }).code() == ExitCode::kIo);
  saver.wait();  // the contents of the call that threw were not taken
}

TEST_CASE("the saver works on after a failed save", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  bool fail = true;
  CheckpointSaver saver(folder / "run", {.observer =
                                             [&](std::string_view) {
                                               if (fail) throw Error(ExitCode::kIo, "no");
                                             },
                                         .report = {}});
  saver.save(small_contents(1));
  CHECK(error_of([&] { saver.wait(); }).code() == ExitCode::kIo);
  fail = false;
  saver.save(small_contents(2));
  saver.wait();
  CHECK(same(*read_newest(folder / "run").contents, small_contents(2)));
}

TEST_CASE("the saver's destructor finishes the save and reports its error", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  std::vector<std::string> reports;
  const auto report = [&](const std::string& message) { reports.push_back(message); };
  {
    CheckpointSaver saver(folder / "run", {.report = report});
    saver.save(small_contents(1));
  }
  CHECK(same(*read_newest(folder / "run").contents, small_contents(1)));
  CHECK(reports.empty());
  {
    CheckpointSaver saver(folder / "file/run", {.report = report});
    saver.save(small_contents(1));
  }
  REQUIRE(reports.size() == 1);
  CHECK(mentions(reports[0], folder / "file"));
}

TEST_CASE("older checkpoints that a save has kept are removed when it turns out to be good",
          "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  const auto steps = [&] {
    std::vector<int64_t> found;
    for (const CheckpointInfo& checkpoint : list_checkpoints(run)) found.push_back(checkpoint.step);
    return found;
  };
  CheckpointSaver saver(run, {.keep = 1});
  saver.save(small_contents(1));
  CheckpointContents doubtful = small_contents(2);
  doubtful.keeps_older = true;
  saver.save(doubtful);
  saver.remove_outdated(3);  // of which nothing is saved
  saver.wait();
  CHECK(steps() == std::vector<int64_t>{2, 1});
  saver.save(doubtful);
  saver.remove_outdated(2);  // while it may still be saved
  saver.wait();
  CHECK(steps() == std::vector<int64_t>{2});
}

TEST_CASE("an error of removing older checkpoints is kept, and none of a save is lost", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const std::string run = folder / "run";
  std::atomic<bool> is_ours = true;
  const auto check = [&] {
    if (!is_ours) throw Error(ExitCode::kIo, "the folder was taken over");
  };
  CheckpointSaver saver(run, {.keep = 1, .check_folder = check});
  std::filesystem::create_directories(run);
  saver.save(small_contents(1));
  CheckpointContents doubtful = small_contents(2);
  doubtful.keeps_older = true;
  saver.save(doubtful);
  saver.wait();
  is_ours = false;
  saver.remove_outdated(2);
  CHECK_THROWS_AS(saver.wait(), Error);
  saver.save(small_contents(3));
  saver.remove_outdated(2);
  CHECK_THROWS_AS(saver.wait(), Error);
  CHECK(num_complete(run) == 2);
}

TEST_CASE("where no thread can be made the saver says so", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  const auto make_saver = [&] {
    const NoThreads no_threads;
    const CheckpointSaver saver(folder / "run", {});
  };
  CHECK(error_of(make_saver).code() == ExitCode::kBadInput);
}
