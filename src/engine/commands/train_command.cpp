#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "comm/launch/launch.h"
#include "comm/launch/launch_checks.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/commands/version.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/precision_losses.h"
#include "engine/planning/memory_advice.h"
#include "engine/text/helper_process.h"
#include "engine/text/tokenizer_files.h"
#include "engine/training/run_folder.h"
#include "engine/training/run_lock.h"
#include "engine/training/stop_signal.h"
#include "engine/training/training_loop.h"

namespace parka {
namespace {

constexpr double kTellingRise = 0.01;  // nats: a hundredth of the perplexity

// The folder of a run that was moved or copied has a config that names the place before: training there would leave
// the folder alone that was named, and go on with another run, or begin one.
void require_named_run(const TrainOptions& options, const std::string& folder) {
  const fs::path file = config_file(options.config_path);
  const fs::path named = file.has_parent_path() ? file.parent_path() : ".";
  const bool is_run = file.filename() == "config.json" && file_exists((named / "lock").string());
  const bool is_given = is_overridden(options.overrides, "checkpoint.folder");
  std::error_code ignored;
  if (!is_run || is_given || fs::equivalent(named, folder, ignored)) return;
  throw_bad_input(
      "{}: is the config of a run in this folder, but has checkpoint.folder = {}, another place; to go on with the run "
      "here give --set checkpoint.folder={}, and to train there --set checkpoint.folder={}",
      file.string(), folder, named.string(), folder);
}

void require_trainable(const TrainOptions& options, const Config& config) {
  require_named_run(options, config.checkpoint.folder);
  if (config.data.train.empty()) {
    throw_bad_input("{}: data.train: nothing to train on; list token files (parka prepare makes them)",
                    options.config_path);
  }
  if (file_exists(config.checkpoint.folder + "/manifest.json")) {
    throw_bad_input(
        "{}: is a checkpoint, not a run folder; to train from it name it in checkpoint.init_from, and give "
        "another checkpoint.folder",
        config.checkpoint.folder);
  }
}

// All ranks call this: rank 0 locks the folder, and the others see that it is the same.
std::unique_ptr<const RunLock> lock_folder(const Config& config, Launch& launch) {
  const std::string& folder = config.checkpoint.folder;
  std::unique_ptr<const RunLock> lock;
  if (launch.rank() == 0) {
    check_run_folder(folder, resolved_text(config));
    check_tokenizer(config);
    check_run_folder_writable(folder);
    lock = std::make_unique<const RunLock>(folder, RunLock::Role::kHolder);
    clear_write_tests(folder);
  }
  launch.hosts().barrier();  // no rank looks at a folder that is not there
  require_one_folder(launch, folder);
  if (launch.rank() != 0) check_run_folder_writable(folder);
  if (!lock) lock = std::make_unique<const RunLock>(folder, RunLock::Role::kWitness);
  return lock;
}

TrainingStart start_of(const TrainOptions& options, const Launch& launch, const Device& device, int gpu,
                       const DecidedGemms& gemms, const Communicator& communicator) {
  TrainingStart start;
  start.config_file = config_file(options.config_path);
  start.must_be_new = options.must_be_new;
  start.convert_states = options.convert_states;
  start.place = fmt::format("rank {} ({}, {}{})", launch.rank(), launch.host(), device.name(),
                            gpu < 0 ? "" : fmt::format(" {}", gpu));
  start.gemm_line = gemms.line;
  ordered_json& facts = start.facts;
  facts = {{"host", launch.host()}, {"device", device.name()}};
  for (const auto& [name, version] : device.software()) facts[name] = version;
  if (gpu >= 0) facts["gemm_tuning"] = gemms.source;
  facts["ranks"] = launch.size();
  if (launch.size() > 1) facts["collectives"] = communicator.description();
  facts["version"] = parka_version();
  facts["commit"] = parka_commit();
  facts["command"] = options.command_line;
  return start;
}

// FP8 may cost weights that were trained without it. Training itself tells of weights that cannot be used.
void warn_of_fp8(const TrainOptions& options, const Config& config, Device& device) {
  if (!list_checkpoints(config.checkpoint.folder).empty()) return;
  std::optional<LossesOfStart> losses;
  try {
    losses = losses_of_start(device, config);
  } catch (const Error&) {
    return;
  }
  if (!losses || losses->fp8 - losses->plain < kTellingRise) return;
  log_warning(
      "precision.recipe = {} costs these weights {:.1f} % of perplexity: loss {:.4f}, without FP8 {:.4f}, on {} "
      "sequences; parka tune-precision {} --write NEW.json finds what to leave in bf16",
      name_of(config.precision.recipe), 100 * std::expm1(losses->fp8 - losses->plain), losses->fp8, losses->plain,
      losses->num_sequences, options.config_path);
}

}  // namespace

int run_train(const TrainOptions& options) {
  const auto begun = RunRecords::Clock::now();
  end_on_stop_signals();
  const LaunchOptions starts = launch_options(options.config_path, options.overrides, options.started);
  return run_launched(starts, [&](Launch& launch) {
    if (launch.rank() != 0) log_from(LogLevel::kWarning);
    const Config config = load_config(options.config_path, options.overrides);
    launch.require_same("the config", to_lines(config), "start all ranks with the same config and --set");
    require_trainable(options, config);
    const std::unique_ptr<const RunLock> lock = lock_folder(config, launch);
    std::optional<Follower> follower;
    if (launch.rank() == 0 && !options.follow.empty()) follower.emplace(config.checkpoint.folder, options.follow);
    catch_stop_signals();
    const int gpu = launch.agree_on_gpu(wants_gpu(config, options.started));
    const std::string idle = idle_gpus(launch.size(), gpu < 0 ? 0 : num_cuda_devices());
    if (!idle.empty()) log_info("{}", idle);
    std::unique_ptr<Device> device = make_untuned_device(config, std::max(0, gpu));
    check_memory(config, GivenConfig::read(options.config_path, options.overrides), *device, launch.size());
    DecidedGemms gemms;
    if (gpu >= 0) gemms = decide_gemms(config, options.config_path, launch, gpu, device);
    if (launch.rank() == 0) warn_of_fp8(options, config, *device);
    const std::unique_ptr<Communicator> communicator = launch.make_communicator(*device);
    TrainingStart start = start_of(options, launch, *device, gpu, gemms, *communicator);
    start.begun = begun;
    return train(config, start, launch, *lock, *device, *communicator);
  });
}

}  // namespace parka
