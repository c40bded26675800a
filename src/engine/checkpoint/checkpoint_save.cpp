#include <algorithm>
#include <cctype>
#include <chrono>
#include <random>
#include <system_error>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_files.h"
#include "engine/checkpoint/checkpoint_index.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/save_barrier.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

// The other ranks must not wait for a checkpoint that cannot be loaded.
int64_t count_tensors(const std::string& folder, const std::vector<Manifest::File>& files) {
  std::vector<CheckpointFile> opened;
  opened.reserve(files.size());
  for (const Manifest::File& file : files) {
    const InputFile input((fs::path(folder) / file.name).string());
    if (input.num_bytes() != file.num_bytes) {
      throw_io("{}: has {} bytes, the rank that wrote it says {}", input.path(), input.num_bytes(), file.num_bytes);
    }
    opened.push_back({input.path(), read_safetensors_header(input)});
  }
  try {
    return static_cast<int64_t>(index_tensors(opened).tensors.size());
  } catch (const Error& e) {
    throw_internal("the ranks' pieces do not make up the tensors: {}", e.what());
  }
}

// Runs a rank's part of a save. The other ranks get to know what it throws.
template <typename Action>
void take_part(SaveBarrier& barrier, Action action) {
  try {
    action();
  } catch (const Error& e) {
    barrier.leave_failure(e.what(), e.code());
    throw;
  } catch (const std::exception& e) {
    barrier.leave_failure(e.what(), ExitCode::kInternal);
    throw;
  }
}

// Writes a rank's tensors into the draft that rank 0 made.
std::vector<Manifest::File> write_part(SaveBarrier& barrier, ObservedFiles& files,
                                       const CheckpointContents& contents, const SaveOptions& options) {
  check_names_unique(contents.tensors);
  const auto name_of = [&](size_t index) { return rank_shard_name(options.group.rank, index); };
  auto written =
      write_shards(files, barrier.attempt_path(), contents.tensors, options, name_of, [&] { barrier.check(); });
  files.sync_directory(barrier.attempt_path());
  return written;
}

// Writes the checkpoint on rank 0 or the only one, and has all that was there before in its hands.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options)
      : folder_(folder),
        contents_(contents),
        options_(options),
        files_(options),
        final_(path(contents.step, StepFolderKind::kComplete)),
        draft_(path(contents.step, StepFolderKind::kTemporary)),
        displaced_(path(contents.step, StepFolderKind::kDisplaced)) {}

  void save() {
    begin();
    restore_displaced();
    try {
      files_.remove(draft_);
      write_draft();
      publish(draft_);
      tell_saved();
    } catch (...) {
      undo();
      throw;
    }
    clear_leftovers();
    remove_outdated();
  }

  void save_with_others() {
    begin();
    SaveBarrier barrier(options_, files_, folder_, final_, draft_);
    try {
      take_part(barrier, [&] {
        restore_displaced();
        files_.remove(draft_);
        write_draft_with_others(barrier);
        publish(barrier.attempt_path());
        tell_saved();
      });
    } catch (...) {
      barrier.wait_until_others_left();
      undo();
      throw;
    }
    clear_leftovers();
    remove_outdated();
  }

  void remove_outdated() {
    if (options_.keep == 0 || contents_.keeps_older) return;
    int64_t num_kept = 1;
    for (const StepFolder& found : list_step_folders(folder_)) {
      if (found.step >= contents_.step || found.kind != StepFolderKind::kComplete) continue;
      try_to_tidy([&] {
        if (num_kept >= options_.keep) {
          discard(found);
        } else {
          // Throws for one that is damaged: not counted, and left until enough good ones are newer than it.
          read_manifest(path(found.step, found.kind));
          ++num_kept;
        }
      });
    }
  }

 private:
  std::string path(int64_t step, StepFolderKind kind) const { return step_folder_path(folder_, step, kind); }

  // A run's folder is made once, when the run begins: made anew here it would be another one.
  void begin() {
    if (options_.check_folder) {
      options_.check_folder();
    } else {
      make_directories(folder_);
    }
  }

  void check_folder() const {
    if (options_.check_folder) options_.check_folder();
  }

  bool may_touch_folder() const noexcept {
    try {
      check_folder();
      return true;
    } catch (...) {
      return false;
    }
  }

  void tell_saved() const {
    if (!options_.saved) return;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun_;
    options_.saved(final_, num_bytes_, seconds.count());
  }

  // A run that died between the two renames of publish() left the only copy of a step under its .old name.
  void restore_displaced() {
    for (const StepFolder& found : list_step_folders(folder_)) {
      const std::string proper = path(found.step, StepFolderKind::kComplete);
      if (found.kind != StepFolderKind::kDisplaced) continue;
      clear_way(proper);
      if (!file_exists(proper)) files_.rename(path(found.step, found.kind), proper);
    }
  }

  void write_draft() {
    files_.make_directory(draft_);
    Manifest manifest{.step = contents_.step,
                      .state = contents_.state,
                      .files = {},
                      .num_tensors = static_cast<int64_t>(contents_.tensors.size())};
    manifest.files = write_shards(files_, draft_, contents_.tensors, options_, shard_name);
    complete_draft(draft_, manifest);
  }

  void write_draft_with_others(SaveBarrier& barrier) {
    files_.make_directory(draft_);
    barrier.open();
    barrier.leave_files(write_part(barrier, files_, contents_, options_));
    Manifest manifest{.step = contents_.step,
                      .state = contents_.state,
                      .files = barrier.wait_for_files(),
                      .num_ranks = options_.group.size,
                      .attempt = options_.group.id};
    manifest.num_tensors = count_tensors(barrier.attempt_path(), manifest.files);
    complete_draft(barrier.attempt_path(), manifest);
  }

  void complete_draft(const std::string& draft, const Manifest& manifest) {
    for (const Manifest::File& file : manifest.files) num_bytes_ += file.num_bytes;
    files_.write_text((fs::path(draft) / kManifestName).string(), encode_manifest(manifest));
    files_.sync_directory(draft);
  }

  // A file or a link that leads nowhere has the name of a step folder: not Parka's, so kept.
  void clear_way(const std::string& path) const {
    if (is_in_the_way(path)) report(fmt::format("{}: is not a folder; renamed to {}", path, set_aside(path)));
  }

  // Gives the draft its name. An earlier save of the same step stays loadable until then, as .old.
  void publish(const std::string& draft) {
    if (options_.before_publish) options_.before_publish();
    check_folder();
    clear_way(final_);
    if (file_exists(final_)) {
      if (file_exists(displaced_)) discard({contents_.step, StepFolderKind::kDisplaced});
      files_.rename(final_, displaced_);
    }
    files_.rename(draft, final_);
    files_.sync_directory(folder_);
  }

  // Takes back a failed save as far as the file system lets it; the user sees the first error alone.
  void undo() noexcept {
    if (!may_touch_folder()) return;
    std::error_code ignored;
    if (!file_exists(final_) && file_exists(displaced_)) fs::rename(displaced_, final_, ignored);
    fs::remove_all(draft_, ignored);
  }

  // Removed under a name of its own: half a checkpoint never looks like a whole one.
  void discard(StepFolder folder) {
    const std::string doomed = path(folder.step, StepFolderKind::kDiscarded);
    if (file_exists(doomed)) files_.remove(doomed);
    files_.rename(path(folder.step, folder.kind), doomed);
    files_.remove(doomed);
  }

  // The new checkpoint is complete, so a failure to tidy up is reported and does not stop the run.
  template <typename Action>
  void try_to_tidy(Action action) {
    check_folder();
    try {
      action();
    } catch (const Error& e) {
      report(fmt::format("{} is saved, but: {}", final_, e.what()));
    }
  }

  void clear_leftovers() {
    for (const StepFolder& found : list_step_folders(folder_)) {
      if (found.kind == StepFolderKind::kComplete) continue;
      try_to_tidy([&] {
        if (found.kind == StepFolderKind::kDisplaced) {
          discard(found);
        } else {
          files_.remove(path(found.step, found.kind));
        }
      });
    }
  }

  void report(const std::string& message) const {
    if (options_.report) options_.report(message);
  }

  const std::string& folder_;
  const CheckpointContents& contents_;
  const SaveOptions& options_;
  ObservedFiles files_;
  const std::string final_, draft_, displaced_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  int64_t num_bytes_ = 0;  // of the files, once they are written
};

// Writes the part of a rank other than 0.
void save_part(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options) {
  if (options.check_folder) options.check_folder();
  ObservedFiles files(options);
  SaveBarrier barrier(options, files, folder, step_folder_path(folder, contents.step),
                      step_folder_path(folder, contents.step, StepFolderKind::kTemporary));
  take_part(barrier, [&] {
    barrier.wait_until_open();
    try {
      barrier.leave_files(write_part(barrier, files, contents, options));
    } catch (const Error&) {
      barrier.check();  // where the save was given up its folder is gone: that is no news
      throw;
    }
    barrier.wait_until_complete();
  });
}

void save_alone_or_with_others(const std::string& folder, const CheckpointContents& contents,
                               const SaveOptions& options) {
  if (options.group.size == 1) {
    CheckpointWriter(folder, contents, options).save();
  } else if (options.group.rank == 0) {
    CheckpointWriter(folder, contents, options).save_with_others();
  } else {
    save_part(folder, contents, options);
  }
}

bool is_id(std::string_view id) {
  return !id.empty() &&
         std::ranges::all_of(id, [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_'; });
}

}  // namespace

std::string make_save_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

void save_checkpoint(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options) {
  PARKA_REQUIRE(contents.step >= 0);
  PARKA_REQUIRE(options.keep >= 0);
  PARKA_REQUIRE(options.max_shard_bytes > 0 && options.writers > 0);
  const SaveGroup& group = options.group;
  PARKA_REQUIRE(group.rank >= 0 && group.rank < group.size);
  if (group.size == 1) {
    PARKA_REQUIRE(std::ranges::none_of(contents.tensors, is_partial));
    check_names_unique(contents.tensors);
  } else {
    PARKA_REQUIRE(is_id(group.id));
  }
  try {
    save_alone_or_with_others(folder, contents, options);
  } catch (const Error& e) {
    // The folder was good when the run began: that it is not any more is no bad input.
    if (e.code() == ExitCode::kBadInput) throw Error(ExitCode::kIo, e.what());
    throw;
  }
}

void remove_outdated_checkpoints(const std::string& folder, int64_t step, const SaveOptions& options) {
  if (!file_exists(step_folder_path(folder, step))) return;
  const CheckpointContents saved{.step = step, .state = {}};
  CheckpointWriter(folder, saved, options).remove_outdated();
}

void clear_unfinished_saves(const std::string& folder) {
  for (const StepFolder& found : list_step_folders(folder)) {
    if (found.kind != StepFolderKind::kTemporary && found.kind != StepFolderKind::kDiscarded) continue;
    try {
      remove_tree(step_folder_path(folder, found.step, found.kind));
    } catch (const Error& e) {
      log_warning("{}", e.what());
    }
  }
}

void check_run_folder_writable(const std::string& folder) {
  make_directories(folder);
  const std::string probe = (fs::path(folder) / fmt::format("{}{}", kWriteTestPrefix, make_save_id())).string();
  try {
    OutputFile file(probe);
    file.write(as_bytes("Parka checks that it can write here.\n"));
    file.sync_and_close();
    sync_directory(folder);
    remove_tree(probe);
  } catch (...) {
    std::error_code ignored;
    fs::remove(probe, ignored);
    throw;
  }
}

}  // namespace parka
