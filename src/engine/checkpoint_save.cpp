#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include <unistd.h>

#include "core/error.h"
#include "engine/checkpoint.h"
#include "engine/checkpoint_layout.h"
#include "engine/file_io.h"
#include "engine/json_text.h"

namespace parka {
namespace {

namespace fs = std::filesystem;

constexpr size_t kWritePieceBytes = 256 << 10;

// The steps of a save that change the file system; each is announced to the observer before it is taken.
class ObservedFiles {
 public:
  explicit ObservedFiles(const SaveOptions& options) : observer_(options.observer) {}

  void make_directory(const std::string& path) {
    announce("make", path);
    parka::make_directory(path);
  }
  void sync_directory(const std::string& path) {
    announce("sync", path);
    parka::sync_directory(path);
  }
  void rename(const std::string& from, const std::string& to) {
    announce("rename", from);
    rename_path(from, to);
  }
  void remove(const std::string& path) {
    announce("remove", path);
    remove_tree(path);
  }

  // Creates a file with what `produce` passes to its argument, and makes its content durable.
  Manifest::File write_file(const fs::path& path, const std::function<void(const ByteSink&)>& produce) {
    announce("create", path);
    OutputFile file(path);
    produce([&](ByteSpan bytes) {
      while (!bytes.empty()) {
        const ByteSpan piece = bytes.first(std::min(kWritePieceBytes, bytes.size()));
        announce("write", path);
        file.write(piece);
        bytes = bytes.subspan(piece.size());
      }
    });
    announce("sync", path);
    file.sync();
    file.close();
    return {path.filename().string(), file.num_bytes(), file.checksum()};
  }

 private:
  void announce(std::string_view action, const std::string& path) {
    if (observer_) observer_(fmt::format("{} {}", action, path));
  }

  const std::function<void(std::string_view)>& observer_;
};

// As std::filesystem::exists, without its exceptions: what cannot be examined fails in the next step on it.
bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

void check_names_unique(const std::vector<HostTensor>& tensors) {
  std::set<std::string_view> names;
  for (const HostTensor& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw_internal("two tensors have the name \"{}\"", printable(tensor.name));
  }
}

// Cuts the list where the next tensor would make a file larger than `max_bytes`.
std::vector<std::vector<const HostTensor*>> split_into_shards(const std::vector<HostTensor>& tensors,
                                                              int64_t max_bytes) {
  std::vector<std::vector<const HostTensor*>> shards;
  int64_t filled = 0;
  for (const HostTensor& tensor : tensors) {
    const auto bytes = static_cast<int64_t>(tensor.bytes.size());
    if (shards.empty() || (bytes > max_bytes - filled && !shards.back().empty())) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(&tensor);
    filled += bytes;
  }
  return shards;
}

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
    make_directories(folder_);
    restore_displaced();
    try {
      files_.remove(draft_);
      write_draft();
      publish();
    } catch (...) {
      undo();
      throw;
    }
    clear_leftovers();
    remove_outdated();
  }

 private:
  std::string path(int64_t step, StepFolderKind kind) const { return step_folder_path(folder_, step, kind); }

  // A run that died between the two renames of publish() left the only copy of a step under its .old name.
  void restore_displaced() {
    for (const StepFolder& found : list_step_folders(folder_)) {
      const std::string proper = path(found.step, StepFolderKind::kComplete);
      if (found.kind == StepFolderKind::kDisplaced && !exists(proper)) {
        files_.rename(path(found.step, found.kind), proper);
      }
    }
  }

  void write_draft() {
    files_.make_directory(draft_);
    Manifest manifest{.step = contents_.step,
                      .state = contents_.state,
                      .files = {},
                      .num_tensors = static_cast<int64_t>(contents_.tensors.size())};
    for (const auto& shard : split_into_shards(contents_.tensors, options_.max_shard_bytes)) {
      manifest.files.push_back(
          files_.write_file(fs::path(draft_) / shard_name(manifest.files.size()),
                            [&](const ByteSink& sink) { write_safetensors(shard, {}, sink); }));
    }
    const std::string text = encode_manifest(manifest);
    files_.write_file(fs::path(draft_) / kManifestName, [&](const ByteSink& sink) { sink(as_bytes(text)); });
    files_.sync_directory(draft_);
  }

  // Gives the draft its name. An earlier save of the same step stays loadable until then, as .old.
  void publish() {
    if (exists(final_)) {
      if (exists(displaced_)) discard({contents_.step, StepFolderKind::kDisplaced});
      files_.rename(final_, displaced_);
    }
    files_.rename(draft_, final_);
    files_.sync_directory(folder_);
  }

  // Takes back a failed save as far as the file system lets it; the error that led here is what the user gets to
  // see.
  void undo() noexcept {
    std::error_code ignored;
    if (!exists(final_) && exists(displaced_)) fs::rename(displaced_, final_, ignored);
    fs::remove_all(draft_, ignored);
  }

  // Removed under a name of its own: half a checkpoint never looks like a whole one.
  void discard(StepFolder folder) {
    const std::string doomed = path(folder.step, StepFolderKind::kDiscarded);
    if (exists(doomed)) files_.remove(doomed);
    files_.rename(path(folder.step, folder.kind), doomed);
    files_.remove(doomed);
  }

  // The new checkpoint is complete, so a failure to tidy up is reported and does not stop the run.
  template <typename Action>
  void try_to_tidy(Action action) {
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

  void remove_outdated() {
    if (options_.keep == 0) return;
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

  void report(const std::string& message) const {
    if (options_.report) options_.report(message);
  }

  const std::string& folder_;
  const CheckpointContents& contents_;
  const SaveOptions& options_;
  ObservedFiles files_;
  const std::string final_, draft_, displaced_;
};

}  // namespace

void save_checkpoint(const std::string& folder, const CheckpointContents& contents, const SaveOptions& options) {
  PARKA_REQUIRE(contents.step >= 0);
  PARKA_REQUIRE(options.keep >= 0);
  PARKA_REQUIRE(options.max_shard_bytes > 0);
  check_names_unique(contents.tensors);
  CheckpointWriter(folder, contents, options).save();
}

void check_run_folder_writable(const std::string& folder) {
  make_directories(folder);
  const std::string probe = (fs::path(folder) / fmt::format(".write_test_{}", ::getpid())).string();
  remove_tree(probe);
  try {
    OutputFile file(probe);
    file.write(as_bytes("Parka checks that it can write here.\n"));
    file.sync();
    file.close();
    sync_directory(folder);
    remove_tree(probe);
  } catch (...) {
    std::error_code ignored;
    fs::remove(probe, ignored);
    throw;
  }
}

}  // namespace parka
