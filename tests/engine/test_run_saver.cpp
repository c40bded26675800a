#include "engine/training/run_saver.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "core/heartbeat.h"
#include "engine/config/config_io.h"
#include "engine/planning/memory_advice.h"
#include "tests/engine/checkpoint_fixture.h"
#include "tests/engine/written_tokens.h"
#include "tests/support/alone.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/no_threads.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

namespace {

// Staging memory that the host does not have.
class NoStaging final : public StagingBuffer {
 public:
  const std::string& failure() override { return failure_; }
  void begin(const std::vector<TensorView>&) override { FAIL("staged without memory"); }
  void order_after(size_t) override { FAIL("nothing is staged"); }
  std::span<const std::byte> wait(size_t) override { throw std::logic_error("nothing is staged"); }

 private:
  std::string failure_ = "3.0 GiB of host memory are not to be had";
};

// The CPU, whose host has no memory to stage checkpoints in.
class DeviceWithoutStaging final : public ForwardingDevice {
 public:
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t) override { return std::make_unique<NoStaging>(); }
};

// Remembers how much is asked for.
class RecordingStaging final : public ForwardingDevice {
 public:
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) override {
    asked.push_back(bytes);
    return ForwardingDevice::make_staging_buffer(bytes);
  }
  std::vector<int64_t> asked;
};

Config tiny_config(const std::string& folder) {
  write_tokens(folder + "/train.npy", 640);
  return parse_config(
      {{"model", {{"vocab_size", 64}, {"d_model", 32}, {"num_layers", 2}, {"num_heads", 2}, {"d_ffn", 64}}},
       {"precision", {{"recipe", "coat"}}},
       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", 16}}},
       {"training", {{"steps", 10}, {"global_batch_size", 4}, {"micro_batch_size", 2}}},
       {"checkpoint", {{"folder", folder + "/run"}, {"keep", 0}}}},
      "test");
}

// A run of one rank, which is saved.
struct SavedRun {
  explicit SavedRun(const TemporaryFolder& folder, bool async = true,
                    std::unique_ptr<Device> on = make_cpu_device())
      : config(tiny_config(folder.path())), device(std::move(on)) {
    config.checkpoint.async = async;
    run = std::make_unique<TrainingRun>(config, *device, alone());
    run->initialize();
  }
  void step() {
    run->step();
    run->finish();
  }
  std::unique_ptr<RunSaver> saver(SaveOptions options) {
    return std::make_unique<RunSaver>(*run, alone(), config.checkpoint, std::move(options));
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> found;
    for (const CheckpointInfo& checkpoint : list_checkpoints(config.checkpoint.folder)) {
      found.push_back(checkpoint.step);
    }
    return found;
  }

  Config config;
  std::unique_ptr<Device> device;
  std::unique_ptr<TrainingRun> run;
};

// Remembers whether one thread alone has read it, from the first read on.
class ReadByOne final : public ForwardingDevice {
 public:
  void copy_to_host(void* host, const void* source, int64_t bytes) override {
    is_own = is_own && std::this_thread::get_id() == own_;
    ForwardingDevice::copy_to_host(host, source, bytes);
  }
  std::atomic<bool> is_own = true;

 private:
  const std::thread::id own_ = std::this_thread::get_id();
};

// Trains on `device` to step `steps`, saving after each, and one more step beside the last save. Saves that
// the training's thread makes are heartbeats, others are none.
std::vector<std::string> train_and_save(Device& device, const Config& config, int64_t steps, bool writes_itself) {
  std::vector<std::string> reports;
  SaveOptions options;
  options.keep = 0;
  options.report = [&](const std::string& message) { reports.push_back(message); };
  TrainingRun run(config, device, alone());
  run.initialize();
  const uint64_t heartbeats = last_heartbeat().count;
  RunSaver saver(run, alone(), config.checkpoint, options);
  for (int64_t step = 1; step <= steps; ++step) {
    run.step();
    run.finish();
    saver.save();
    CHECK(saver.newest_step() == step);
  }
  run.step();
  run.finish();
  saver.finish();
  CHECK(saver.take_wait_seconds() > 0);
  CHECK(saver.take_wait_seconds() == 0);
  CHECK((last_heartbeat().count > heartbeats) == writes_itself);
  return reports;
}

}  // namespace

TEST_CASE("without memory to stage in a save is made while training waits, with the same bytes",
          "[engine][checkpoint]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path());
  const auto cpu = make_cpu_device();
  CHECK(train_and_save(*cpu, config, 3, false).empty());
  const std::string staged = config.checkpoint.folder;
  config.checkpoint.folder = folder / "other";
  DeviceWithoutStaging device;
  const std::vector<std::string> reports = train_and_save(device, config, 3, true);
  REQUIRE(reports.size() == 1);  // once, not for each save
  CHECK(mentions(reports[0], "3.0 GiB of host memory are not to be had"));
  CHECK(mentions(reports[0], "checkpoint.async=false"));
  for (const CheckpointInfo& info : list_checkpoints(staged)) {
    CheckpointContents one = read_contents(load_checkpoint(info.path));
    CheckpointContents other =
        read_contents(load_checkpoint(fmt::format("{}/step_{:08}", config.checkpoint.folder, info.step)));
    one.state = other.state = {};  // names the folder
    CHECK(same(one, other));
  }
  CHECK(list_checkpoints(staged).size() == 3);
}

TEST_CASE("as much memory to stage in is asked for as is planned, beside a base too", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path());
  const auto check = [&] {
    RecordingStaging device;
    TrainingRun run(config, device, alone());
    RunSaver saver(run, alone(), config.checkpoint, {});
    CHECK(device.asked.empty());
    if (config.checkpoint.init_from.empty()) {
      run.initialize();
    } else {
      run.initialize_from(load_checkpoint(config.checkpoint.init_from));
    }
    saver.prepare();
    run.step();
    run.finish();
    saver.save();
    saver.finish();
    CHECK(device.asked == std::vector{plan_for_gpus(config, 1).staging_bytes});
    return list_checkpoints(config.checkpoint.folder).back().path;
  };
  config.checkpoint.init_from = check();
  config.checkpoint.folder = folder / "adapters";
  config.finetune.method = FinetuneMethod::kLora;
  config.finetune.rank = 2;
  check();
}

TEST_CASE("with checkpoint.async off no memory to stage in is asked for", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path());
  config.checkpoint.async = false;
  DeviceWithoutStaging device;
  CHECK(train_and_save(device, config, 2, true).empty());
  CHECK(list_checkpoints(config.checkpoint.folder).size() == 2);
}

TEST_CASE("a save that failed is made up for with the state of the next call, and a second failure is thrown",
          "[engine][checkpoint]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path());
  config.checkpoint.async = GENERATE(true, false);
  const auto device = make_cpu_device();
  TrainingRun run(config, *device, alone());
  run.initialize();
  int failures_left = 0;
  SaveOptions options;
  options.observer = [&](std::string_view point) {
    if (point.find(".tmp/manifest.json") == std::string_view::npos || failures_left == 0) return;
    --failures_left;
    throw Error(ExitCode::kIo, "the disk is on fire");
  };
  std::vector<std::string> reports;
  options.report = [&](const std::string& message) { reports.push_back(message); };
  RunSaver saver(run, alone(), config.checkpoint, options);
  const auto step = [&] {
    run.step();
    run.finish();
  };
  const auto wait = [&] {
    while (!saver.failed() && list_checkpoints(config.checkpoint.folder).empty()) std::this_thread::yield();
  };

  failures_left = 1;
  step();
  saver.save();
  wait();
  CHECK(saver.failed());
  step();
  saver.save();
  CHECK(!saver.failed());
  saver.finish();
  REQUIRE(reports.size() == 1);
  CHECK(mentions(reports[0], "the disk is on fire"));
  REQUIRE(list_checkpoints(config.checkpoint.folder).size() == 1);
  CHECK(list_checkpoints(config.checkpoint.folder)[0].step == 2);

  failures_left = 1;  // the next failure is a first one again
  step();
  saver.save();
  saver.finish();
  CHECK(list_checkpoints(config.checkpoint.folder).front().step == 3);

  failures_left = 2;
  step();
  saver.save();
  const Error error = error_of([&] { saver.finish(); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(mentions(error.what(), "the disk is on fire"));
  CHECK(list_checkpoints(config.checkpoint.folder).front().step == 3);
}

TEST_CASE("saves go on in the background and one waits for the other", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  SavedRun saved(folder);
  std::promise<void> go_on;
  std::shared_future<void> may_go_on = go_on.get_future().share();
  const auto saver = saved.saver({.keep = 0, .observer = [=](std::string_view) { may_go_on.wait(); }});
  saved.step();
  saver->save();
  CHECK(saved.steps().empty());  // it returned while the save stands still before its first step
  saved.step();
  std::thread helper([&] { go_on.set_value(); });
  saver->save();
  CHECK_FALSE(saved.steps().empty());  // it returned when the first was complete
  saver->finish();
  CHECK(saved.steps() == std::vector<int64_t>{2, 1});
  helper.join();
}

TEST_CASE("what one thread alone can read is read by it, whatever number of writers", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  auto device = std::make_unique<ReadByOne>();
  const ReadByOne& watched = *device;
  SavedRun saved(folder, /*async=*/false, std::move(device));
  const auto saver = saved.saver({.max_shard_bytes = 4, .writers = 4});
  saved.step();
  saver->save();
  saver->finish();
  CHECK(watched.is_own);
  CHECK(saved.steps() == std::vector<int64_t>{1});
}

TEST_CASE("the saver's destructor finishes the save and reports its error", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  SavedRun saved(folder);
  bool fails = GENERATE(false, true);
  std::vector<std::string> reports;
  saved.step();
  saved
      .saver({.observer =
                  [&](std::string_view) {
                    if (fails) throw Error(ExitCode::kIo, "the disk is on fire");
                  },
              .report = [&](const std::string& message) { reports.push_back(message); }})
      ->save();
  CHECK(saved.steps().size() == (fails ? 0 : 1));
  CHECK(reports.size() == (fails ? 1 : 0));
  if (fails) CHECK(mentions(reports[0], "the disk is on fire"));
}

TEST_CASE("older checkpoints that a save has kept are removed when it turns out to be good",
          "[engine][checkpoint]") {
  const TemporaryFolder folder;
  SavedRun saved(folder);
  const auto saver = saved.saver({.keep = 1});
  saved.step();
  saver->save();
  saver->keep_older(true);
  saved.step();
  saver->save();
  saver->finish();
  CHECK(saved.steps() == std::vector<int64_t>{2, 1});
  saver->remove_older();
  saver->finish();
  CHECK(saved.steps() == std::vector<int64_t>{2});
  saver->keep_older(true);
  saved.step();
  saver->save();
  saver->remove_older();  // while it may still be saved
  saver->finish();
  CHECK(saved.steps() == std::vector<int64_t>{3});
}

TEST_CASE("an error of removing older checkpoints is kept like one of a save", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  SavedRun saved(folder);
  std::atomic<bool> is_ours = true;
  const auto check = [&] {
    if (!is_ours) throw Error(ExitCode::kIo, "the folder was taken over");
  };
  const auto saver = saved.saver({.keep = 1, .check_folder = check});
  check_run_folder_writable(saved.config.checkpoint.folder);
  saved.step();
  saver->save();
  saver->keep_older(true);
  saved.step();
  saver->save();
  saver->finish();
  is_ours = false;
  saver->remove_older();
  CHECK(error_of([&] { saver->finish(); }).code() == ExitCode::kIo);
  CHECK(saved.steps() == std::vector<int64_t>{2, 1});
}

TEST_CASE("where no thread can be made the saver says so", "[engine][checkpoint]") {
  const TemporaryFolder folder;
  SavedRun saved(folder);
  const auto make_saver = [&] {
    const NoThreads no_threads;
    saved.saver({});
  };
  CHECK(error_of(make_saver).code() == ExitCode::kBadInput);
}

TEST_CASE("ranks do not wait for one that has failed and cannot say so in the folder",
          "[engine][checkpoint][ranks]") {
  const TemporaryFolder folder;
  Config config = tiny_config(folder.path());
  config.checkpoint.async = GENERATE(true, false);
  const int failing = GENERATE(0, 1);
  // How many saves find the folder out of the failing rank's reach.
  const int failures = GENERATE(1, 1000);
  check_run_folder_writable(config.checkpoint.folder);
  const std::string id = make_save_id();
  std::vector<std::string> reports(2), errors(2);
  const auto begun = std::chrono::steady_clock::now();
  ThreadRanks(2).run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto at = static_cast<size_t>(rank);
    const auto device = make_cpu_device();
    TrainingRun run(config, *device, communicator);
    run.initialize();
    SaveOptions options;
    options.group = {.rank = rank, .size = 2, .id = id};
    std::atomic<bool> is_out_of_reach = false;
    int num_failures = 0;
    options.observer = [&](std::string_view point) {
      if (rank != failing || num_failures >= failures || point.find("safetensors") == std::string_view::npos)
        return;
      ++num_failures;
      is_out_of_reach = true;
      throw Error(ExitCode::kIo, "the cable is out");
    };
    options.check_folder = [&] {
      if (is_out_of_reach) throw Error(ExitCode::kIo, "the cable is out");
    };
    options.report = [&](const std::string& message) {
      reports[at] += message + "\n";
      is_out_of_reach = false;
    };
    RunSaver saver(run, communicator, config.checkpoint, options);
    run.step();
    run.finish();
    saver.save();
    try {
      saver.finish();
    } catch (const Error& error) {
      errors[at] = error.what();
    }
  });
  CAPTURE(config.checkpoint.async, failing, failures, reports, errors);
  const auto other = static_cast<size_t>(1 - failing), own = static_cast<size_t>(failing);
  CHECK(mentions(reports[own], "the cable is out; trying once more"));
  CHECK(mentions(reports[other], "another rank could not save its part"));
  CHECK((errors[own].empty() && errors[other].empty()) == (failures == 1));
  if (failures > 1) {
    CHECK(mentions(errors[own], "the cable is out"));
    CHECK_FALSE(errors[other].empty());
  }
  CHECK(list_checkpoints(config.checkpoint.folder).size() == (failures == 1 ? 1 : 0));
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::minutes(1));  // and not the half-hour of a save
}
