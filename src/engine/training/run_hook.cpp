#include "engine/training/run_hook.h"

#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/files/file_io.h"
#include "engine/training/stop_signal.h"

namespace parka {
namespace {

void warn(const std::string& message) { log_line(LogLevel::kWarning, message); }

std::string name_of_folder(const std::string& path) { return std::filesystem::path(path).filename().string(); }

SavedHook::Listener listener_for(const std::string& done_path) {
  return {warn, [done_path](const std::string& checkpoint) {
            try {
              replace_file(done_path, name_of_folder(checkpoint) + "\n");
            } catch (const Error& e) {
              warn(e.what());
            }
          }};
}

}  // namespace

RunHook::RunHook(const CheckpointConfig& config, Communicator& communicator, std::function<void()> waiting)
    : communicator_(communicator),
      done_path_(config.folder + "/on_saved.done"),
      waiting_(std::move(waiting)),
      has_command_(!config.on_saved.empty()),
      hook_(has_command_ && communicator.rank() == 0
                ? std::make_unique<SavedHook>(config.on_saved, listener_for(done_path_))
                : nullptr) {}

void RunHook::run(const std::string& path) {
  if (hook_) hook_->run(path);
}

void RunHook::begin_anew() {
  if (communicator_.rank() == 0) remove_tree(done_path_);
}

void RunHook::repeat(const LoadedCheckpoint& checkpoint) {
  if (!hook_) return;
  const std::string name = name_of_folder(checkpoint.path());
  if (file_exists(done_path_) && read_text(done_path_, 4096) == name + "\n") return;
  remove_tree(done_path_);  // a later one that it may name will be made again
  log_info("{}: {} does not name it, so the command of checkpoint.on_saved runs for it now", name, done_path_);
  hook_->run(checkpoint.path());
}

void RunHook::finish() {
  if (!hook_) return;
  const int asked_before = stop_signal();
  const bool is_done = hook_->finish([] { log_info("waiting for the command of checkpoint.on_saved"); },
                                     [&] {
                                       waiting_();
                                       return stop_signal() != asked_before;
                                     });
  if (!is_done) warn("checkpoint.on_saved: the command is left running; the next start runs it again");
}

void RunHook::finish_on_all_ranks() {
  if (!has_command_) return;
  finish();
  communicator_.max(0.0);
}

}  // namespace parka
