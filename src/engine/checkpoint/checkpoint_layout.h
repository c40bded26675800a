#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "engine/checkpoint/checkpoint.h"

// The layout of a run folder on disk, shared by the code that saves and the code that loads:
//   step_00000100/            a complete checkpoint
//     shard_0.safetensors     tensors, split at a size; rank_0003_shard_0.safetensors where several ranks saved
//     manifest.json           everything else, and a checksum of every file, of itself too
//   step_00000200.tmp/        being written, or left by a run that died: never loaded
//     attempt_<id>/           what becomes step_00000200 when several ranks save it together
//     attempt_<id>.ranks/     how they agree: see save_barrier.h
//   step_00000100.old/        complete; displaced while step 100 is saved again, loaded where its successor is
//                             missing
//   step_00000100.delete/     being removed: never loaded
//   step_00000100.refused     could not be loaded, or was not a folder: never loaded, never removed
namespace parka {

inline constexpr std::string_view kManifestName = "manifest.json";
// Prefix of the files with which a start tests the run folder; a killed start leaves one.
inline constexpr std::string_view kWriteTestPrefix = ".write_test_";

enum class StepFolderKind : uint8_t { kComplete, kTemporary, kDisplaced, kDiscarded };

struct StepFolder {
  int64_t step = 0;
  StepFolderKind kind = StepFolderKind::kComplete;
};

std::string step_folder_name(StepFolder folder);
// The inverse; nullopt for a name that Parka does not give.
std::optional<StepFolder> parse_step_folder_name(std::string_view name);
std::string step_folder_path(const std::string& run_folder, int64_t step,
                             StepFolderKind kind = StepFolderKind::kComplete);
// The run folder that a checkpoint lies in, by its name; empty if it is none of a run's.
std::string run_folder_of(const std::string& checkpoint_path);
// True if something that is not a folder has the name `path`: a file, or a dangling link.
bool is_in_the_way(const std::string& path);
// Renames `path` to <path>.refused, or .refused.2 and so on if that exists; returns the new name.
std::string set_aside(const std::string& path);
// All of them in a run folder, newest first. A missing run folder is empty; a file in its place is kBadInput.
std::vector<StepFolder> list_step_folders(const std::string& run_folder);

std::string shard_name(size_t index);                 // of a checkpoint that one rank saved
std::string rank_shard_name(int rank, size_t index);  // of one that several did

struct Manifest {
  struct File {
    std::string name;  // in the checkpoint's folder
    int64_t num_bytes = 0;
    std::string checksum;  // Checksum::hex()
  };

  int64_t step = 0;
  json state;
  std::vector<File> files;
  int64_t num_tensors = 0;   // whole ones, in however many pieces
  int64_t num_ranks = 1;     // that saved it
  std::string attempt = {};  // SaveGroup::id of the save, where several ranks took part
};

// The list of files as the manifest and the notes of ranks that save together have it.
ordered_json encode_files(const std::vector<Manifest::File>& files);
// The inverse. Throws Error(kBadInput), whose message begins with `where`.
std::vector<Manifest::File> parse_files(const json& files, std::string_view where);

// A manifest is whole and of a version that this Parka does not know: bad input, and no damage.
class UnknownVersion : public Error {
 public:
  explicit UnknownVersion(const std::string& message) : Error(ExitCode::kBadInput, message) {}
};

// The text of manifest.json. Its last line is a checksum of all before it, so that any changed byte shows.
std::string encode_manifest(const Manifest& manifest);
// Throws Error(kBadInput), whose message begins with `where`, unless `text` is what encode_manifest wrote;
// UnknownVersion where that of a later Parka may have.
Manifest parse_manifest(std::string_view text, std::string_view where);

// Reads a checkpoint's manifest.
Manifest read_manifest_alone(const std::string& checkpoint_path);
// Reads a checkpoint's manifest and checks that its files are there, of the sizes that it says.
Manifest read_manifest(const std::string& checkpoint_path);

}  // namespace parka
