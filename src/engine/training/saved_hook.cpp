#include "engine/training/saved_hook.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include <sys/wait.h>

#include <fmt/format.h>

#include "core/error.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "core/parallel.h"
#include "engine/files/file_io.h"
#include "engine/text/helper_process.h"
#include "engine/training/stop_signal.h"

namespace parka {
namespace {

constexpr std::string_view kPath = "{path}";
constexpr std::chrono::milliseconds kBetweenLooks(20);

std::string command_for(const std::string& on_saved, const std::string& path) {
  const std::string word = quoted(path);
  std::string command = on_saved;
  for (size_t at = command.find(kPath); at != std::string::npos; at = command.find(kPath, at + word.size())) {
    command.replace(at, kPath.size(), word);
  }
  return command;
}

std::string name_of_folder(const std::string& path) { return std::filesystem::path(path).filename().string(); }

}  // namespace

SavedHook::SavedHook(const CheckpointConfig& config, Communicator& communicator)
    : communicator_(communicator), on_saved_(config.on_saved), done_path_(config.folder + "/on_saved.done") {
  if (on_saved_.empty() || communicator.rank() != 0) return;
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how a command ends
  thread_ = start_thread("runs checkpoint.on_saved", [this] { work(); });
}

SavedHook::~SavedHook() { stop_thread(thread_, mutex_, changed_, stopping_); }

void SavedHook::run(const std::string& path) {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    next_ = path;
  }
  changed_.notify_all();
}

void SavedHook::begin_anew() {
  if (communicator_.rank() == 0) remove_tree(done_path_);
}

void SavedHook::repeat(const LoadedCheckpoint& checkpoint) {
  if (!thread_.joinable()) return;
  const std::string name = name_of_folder(checkpoint.path());
  if (file_exists(done_path_) && read_text(done_path_, 4096) == name + "\n") return;
  remove_tree(done_path_);  // a later one that it may name will be made again
  log_info("{}: {} does not name it, so the command of checkpoint.on_saved runs for it now", name, done_path_);
  run(checkpoint.path());
}

void SavedHook::finish() {
  const int asked_before = stop_signal();
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return next_.empty() && !running_; };
  if (idle()) return;
  log_info("waiting for the command of checkpoint.on_saved");
  while (!changed_.wait_for(lock, kBetweenLooks, idle)) {
    heartbeat("waiting for checkpoint.on_saved");
    if (stop_signal() == asked_before) continue;
    log_warning("checkpoint.on_saved: the command is left running; the next start runs it again");
    return;
  }
}

void SavedHook::finish_on_all_ranks() {
  if (on_saved_.empty()) return;
  finish();
  communicator_.max(0.0);
}

void SavedHook::note_done(const std::string& path) const {
  try {
    replace_file(done_path_, name_of_folder(path) + "\n");
  } catch (const Error& e) {
    log_warning("{}", e.what());
  }
}

void SavedHook::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !next_.empty(); });
    if (stopping_) return;
    const std::string path = std::exchange(next_, "");
    running_ = true;
    lock.unlock();
    std::string failure;
    if (run_command(path, failure)) {
      note_done(path);
    } else if (!failure.empty()) {
      const char* state = file_exists(path)
                              ? "the checkpoint is complete, and the run goes on"
                              : "it was removed meanwhile: a larger checkpoint.keep leaves the command more time";
      log_warning("checkpoint.on_saved {} for {}; {}", failure, path, state);
    }
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

// True if it ended with 0; else `failure` gets what went wrong, or nothing where this object is about to go.
bool SavedHook::run_command(const std::string& path, std::string& failure) {
  pid_t pid;
  if (const int error = spawn({"/bin/sh", "-c", command_for(on_saved_, path)}, -1, pid); error != 0) {
    failure = fmt::format("cannot be started: {}", std::strerror(error));
    return false;
  }
  std::unique_lock lock(mutex_);
  int status = 0;
  for (;;) {
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) break;
    if (ended < 0 && errno != EINTR) {
      failure = fmt::format("was started, but how it ended is not known: {}", std::strerror(errno));
      return false;
    }
    if (changed_.wait_for(lock, kBetweenLooks, [this] { return stopping_; })) return false;
  }
  if (status != 0) failure = describe_end(status);
  return status == 0;
}

}  // namespace parka
