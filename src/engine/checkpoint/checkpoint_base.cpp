#include "engine/checkpoint/checkpoint_base.h"

#include <filesystem>
#include <memory>
#include <utility>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/files/file_io.h"
#include "model/parameter_table.h"

namespace fs = std::filesystem;

namespace parka {
namespace {

// The manifest has the checksums of all files.
std::string manifest_checksum(const LoadedCheckpoint& checkpoint) {
  return checksum_of(ReadOnlyFile(checkpoint.path() + "/" + std::string(kManifestName)));
}

bool is_there(const std::string& path) { return file_exists(path + "/" + std::string(kManifestName)); }

// Where a base lies that is named by `path`: there, or, when both runs have moved together, beside the run of
// `checkpoint` as it was. Empty: nowhere.
std::string find_base(const LoadedCheckpoint& checkpoint, const std::string& path) {
  if (is_there(path)) return path;
  const fs::path named(path), runs = fs::absolute(checkpoint.path()).parent_path().parent_path();
  const std::string beside = (runs / named.parent_path().filename() / named.filename()).string();
  return is_there(beside) ? beside : "";
}

}  // namespace

nlohmann::json describe_base(const LoadedCheckpoint& base) {
  return {{"checkpoint", fs::absolute(base.path()).lexically_normal().string()},
          {"checksum", manifest_checksum(base)}};
}

bool has_base(const LoadedCheckpoint& checkpoint) { return checkpoint.state().contains(kBaseKey); }

void attach_base(LoadedCheckpoint& checkpoint, const LoadGroup& group) {
  if (!has_base(checkpoint)) return;
  const nlohmann::json& described = checkpoint.state().at(kBaseKey);
  const bool is_known = described.is_object() && described.contains("checkpoint") &&
                        described.contains("checksum") && described.at("checkpoint").is_string() &&
                        described.at("checksum").is_string();
  if (!is_known) throw_bad_input("{}: \"{}\" in its state does not name a checkpoint", checkpoint.path(), kBaseKey);
  const auto named = described.at("checkpoint").get<std::string>();
  const std::string path = find_base(checkpoint, named);
  if (path.empty()) {
    throw_bad_input(
        "{}: has what was trained alone, and the checkpoint with the other weights is gone: {}; put it back there, or "
        "beside this run",
        checkpoint.path(), named);
  }
  auto base = std::make_shared<const LoadedCheckpoint>(load_checkpoint(path, group));
  if (manifest_checksum(*base) != described.at("checksum").get<std::string>()) {
    throw_bad_input("{}: was trained beside other weights than {} has now; put that checkpoint back as it was",
                    checkpoint.path(), path);
  }
  std::vector<std::string> names;
  for (const ParameterInfo& p : make_parameter_table(config_of(checkpoint, {}).model, false).all) {
    names.push_back(p.name);
  }
  checkpoint.set_base(std::move(base), names);
}

}  // namespace parka
