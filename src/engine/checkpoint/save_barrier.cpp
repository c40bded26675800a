#include "engine/checkpoint/save_barrier.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include <fmt/ranges.h>

#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::string_view kDone = "done", kFailed = "failed";
constexpr int64_t kMaxNoteBytes = 64 << 20;
// Enough for a look at the folder and, on a network file system, for the news to arrive.
constexpr milliseconds kFarewell = std::chrono::seconds(10);

std::string note_name(int rank, std::string_view state) { return fmt::format("rank_{:04}.{}", rank, state); }

std::vector<Manifest::File> read_done_note(const std::string& path, int rank) {
  const json note = parse_json_text(read_text(path, kMaxNoteBytes), path, JsonComments::kRefused);
  std::vector<Manifest::File> files = parse_files(note, path);
  for (size_t i = 0; i < files.size(); ++i) {
    if (files[i].name != rank_shard_name(rank, i)) throw_io("{}: names files that are not of rank {}", path, rank);
  }
  return files;
}

// A rank whose disk is full may have left an empty note.
Error read_failed_note(const std::string& path, int rank) {
  try {
    const json note = parse_json_text(read_text(path, kMaxNoteBytes), path, JsonComments::kRefused);
    return Error(static_cast<ExitCode>(note.at("code").get<int>()), note.at("message").get<std::string>());
  } catch (const std::exception&) {
    return Error(ExitCode::kIo, fmt::format("rank {} could not write its part of the checkpoint", rank));
  }
}

}  // namespace

SaveBarrier::SaveBarrier(const SaveOptions& options, ObservedFiles& files, std::string folder,
                         std::string final_path, std::string draft)
    : group_(options.group),
      check_folder_(options.check_folder),
      is_given_up_(options.is_given_up),
      files_(files),
      folder_(std::move(folder)),
      final_path_(std::move(final_path)),
      draft_(std::move(draft)),
      attempt_name_("attempt_" + group_.id),
      attempt_path_((fs::path(draft_) / attempt_name_).string()),
      ranks_path_(attempt_path_ + ".ranks"),
      farewell_(std::min(kFarewell, group_.timeout)) {}

std::string SaveBarrier::path_of(int rank, std::string_view state) const {
  return (fs::path(ranks_path_) / note_name(rank, state)).string();
}

void SaveBarrier::check_folder() const {
  if (check_folder_) check_folder_();
}

bool SaveBarrier::poll(milliseconds patience, const std::function<bool()>& finished) const {
  const auto deadline = steady_clock::now() + patience;
  for (;;) {
    check_folder();
    if (finished()) return true;
    if (is_given_up_ && is_given_up_()) {
      throw_io("{}: not saved: another rank could not save its part; its own message says why", final_path_);
    }
    if (steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(group_.poll_interval);
  }
}

bool SaveBarrier::is_attempt_there() const {
  const std::vector<std::string> names = list_names(draft_);
  return std::ranges::find(names, attempt_name_) != names.end();
}

bool SaveBarrier::is_complete() const {
  list_names(folder_);  // for what a network file system has cached of it
  try {
    return read_manifest_alone(final_path_).attempt == group_.id;
  } catch (const Error&) {
    return false;  // not there, or being replaced
  }
}

void SaveBarrier::check_failures(const std::vector<std::string>& names) {
  const std::set<std::string_view> present(names.begin(), names.end());
  for (int rank = 0; rank < group_.size; ++rank) {
    if (!present.contains(note_name(rank, kFailed))) continue;
    failure_of_other_ = read_failed_note(path_of(rank, kFailed), rank);
    throw Error(*failure_of_other_);
  }
}

void SaveBarrier::throw_given_up() {
  failure_of_other_ =
      Error(ExitCode::kIo, fmt::format("{}: rank 0 has given up this save; its own message says why", final_path_));
  throw Error(*failure_of_other_);
}

void SaveBarrier::throw_missing() {
  const std::vector<std::string> names = list_names(ranks_path_);
  const std::set<std::string_view> present(names.begin(), names.end());
  std::vector<int> missing;
  for (int rank = 0; rank < group_.size; ++rank) {
    if (!present.contains(note_name(rank, kDone))) missing.push_back(rank);
  }
  if (missing.empty()) missing.push_back(0);  // all files are there: what is missing is rank 0's manifest
  throw_io("{}: not saved: rank{} {} did not finish within {} s", final_path_, missing.size() == 1 ? "" : "s",
           fmt::join(missing, ", "), std::chrono::duration<double>(group_.timeout).count());
}

void SaveBarrier::check() {
  check_folder();
  check_failures(list_names(ranks_path_));
  if (!is_attempt_there()) throw_given_up();
}

void SaveBarrier::open() {
  files_.make_directory(ranks_path_);
  files_.make_directory(attempt_path_);
}

std::vector<Manifest::File> SaveBarrier::wait_for_files() {
  std::vector<std::optional<std::vector<Manifest::File>>> by_rank(static_cast<size_t>(group_.size));
  const bool all = poll(group_.timeout, [&] {
    const std::vector<std::string> names = list_names(ranks_path_);
    check_failures(names);
    const std::set<std::string_view> present(names.begin(), names.end());
    bool complete = true;
    for (int rank = 0; rank < group_.size; ++rank) {
      auto& files = by_rank[static_cast<size_t>(rank)];
      if (!files && present.contains(note_name(rank, kDone))) files = read_done_note(path_of(rank, kDone), rank);
      complete = complete && files;
    }
    return complete;
  });
  if (!all) throw_missing();
  std::vector<Manifest::File> files;
  for (const auto& of_rank : by_rank) files.insert(files.end(), of_rank->begin(), of_rank->end());
  return files;
}

void SaveBarrier::wait_until_others_left() noexcept {
  try {
    poll(farewell_, [&] {
      const std::vector<std::string> names = list_names(ranks_path_);
      const std::set<std::string_view> present(names.begin(), names.end());
      for (int rank = 1; rank < group_.size; ++rank) {
        if (!present.contains(note_name(rank, kFailed))) return false;
      }
      return true;
    });
  } catch (...) {
    // Then they get to know later that this rank has given up, without the reason.
    return;
  }
}

void SaveBarrier::wait_until_open() {
  const bool open = poll(group_.timeout, [&] {
    check_failures(list_names(ranks_path_));
    return is_attempt_there();
  });
  if (!open) {
    throw_io("{}: not saved: rank 0 did not begin the save within {} s", final_path_,
             std::chrono::duration<double>(group_.timeout).count());
  }
}

void SaveBarrier::leave_files(const std::vector<Manifest::File>& files) {
  const std::string path = path_of(group_.rank, kDone);
  files_.write_text(path + ".tmp", encode_files(files).dump(2) + "\n");
  files_.rename(path + ".tmp", path);
}

void SaveBarrier::wait_until_complete() {
  // Longer than rank 0 waits for files, so that what it says on whom it waited for arrives.
  const bool ended = poll(group_.timeout + farewell_, [&] {
    check_failures(list_names(ranks_path_));
    return !is_attempt_there();
  });
  if (!ended) throw_missing();
  if (!poll(farewell_, [&] { return is_complete(); })) throw_given_up();
  sync_directory(folder_);  // rank 0 may be about to
}

void SaveBarrier::leave_failure(const std::string& message, ExitCode code) noexcept {
  const std::string path = path_of(group_.rank, kFailed);
  try {
    check_folder();
  } catch (...) {
    return;  // the others see for themselves that the folder is not the run's any more
  }
  try {
    if (group_.rank == 0) make_directories(ranks_path_);  // the others may be waiting for the save to begin
    const json note = {{"code", static_cast<int>(failure_of_other_ ? failure_of_other_->code() : code)},
                       {"message", failure_of_other_ ? failure_of_other_->what()
                                                     : fmt::format("rank {}: {}", group_.rank, message)}};
    replace_file(path, note.dump(-1, ' ', false, json::error_handler_t::replace));
  } catch (...) {
    try {
      OutputFile(path).close();  // on a full disk an empty file may still find room
    } catch (...) {
      return;  // then the others find out by options.is_given_up
    }
  }
}

}  // namespace parka
