#include "engine/checkpoint/checkpoint_base.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "model/parameter_table.h"

namespace fs = std::filesystem;

namespace parka {
namespace {

// The manifest has the checksums of all files.
std::string manifest_checksum(const std::string& path) {
  return checksum_of(ReadOnlyFile(path + "/" + std::string(kManifestName)));
}

bool is_there(const std::string& path) { return file_exists(path + "/" + std::string(kManifestName)); }

// The checkpoints that a base may be that is named by `path`: what lies there, and, when both have moved together,
// what lies beside the run of `checkpoint`, or beside a checkpoint that is of none, by that name, and `elsewhere`,
// itself or in it.
std::vector<std::string> candidates(const LoadedCheckpoint& checkpoint, const std::string& path,
                                    const std::string& elsewhere) {
  const auto plain = [](const fs::path& p) { return (p / "").lexically_normal().parent_path(); };
  const fs::path own = plain(fs::absolute(checkpoint.path())), named = plain(path);
  const fs::path beside = (run_folder_of(own).empty() ? own : own.parent_path()).parent_path();
  const fs::path within = run_folder_of(named).empty() ? "" : named.parent_path().filename();
  std::vector<std::string> all = {path, (beside / within / named.filename()).string()};
  if (!elsewhere.empty()) {
    const fs::path given = plain(fs::absolute(elsewhere));
    all.insert(all.end(), {given.string(), (given / named.filename()).string()});
  }
  std::vector<std::string> found;
  for (const std::string& candidate : all) {
    const auto is_same = [&](const std::string& other) { return fs::equivalent(candidate, other); };
    if (is_there(candidate) && std::ranges::none_of(found, is_same)) found.push_back(candidate);
  }
  return found;
}

}  // namespace

nlohmann::json describe_base(const LoadedCheckpoint& base) {
  return {{"checkpoint", recordable_path(fs::absolute(base.path()).lexically_normal().string())},
          {"checksum", manifest_checksum(base.path())}};
}

bool has_base(const LoadedCheckpoint& checkpoint) { return checkpoint.state().contains(kBaseKey); }

nlohmann::json attach_base(LoadedCheckpoint& checkpoint, const LoadGroup& group, const std::string& elsewhere) {
  if (!has_base(checkpoint)) return {};
  const nlohmann::json& described = checkpoint.state().at(kBaseKey);
  const bool is_known = described.is_object() && described.contains("checkpoint") &&
                        described.contains("checksum") && described.at("checkpoint").is_string() &&
                        described.at("checksum").is_string();
  if (!is_known) throw_bad_input("{}: \"{}\" in its state does not name a checkpoint", checkpoint.path(), kBaseKey);
  const auto named = described.at("checkpoint").get<std::string>();
  const std::vector<std::string> found = candidates(checkpoint, named, elsewhere);
  if (found.empty()) {
    throw_bad_input(
        "{}: has what was trained alone, and the checkpoint with the other weights is gone: {}; put it back there, or "
        "beside this run, or to train on name its place in checkpoint.init_from",
        checkpoint.path(), named);
  }
  const auto path = std::ranges::find(found, described.at("checksum").get<std::string>(), manifest_checksum);
  if (path == found.end()) {
    throw_bad_input("{}: was trained beside other weights than {} has now; put that checkpoint back as it was",
                    checkpoint.path(), fmt::join(found, " or "));
  }
  auto base = std::make_shared<const LoadedCheckpoint>(load_checkpoint(*path, group));
  std::vector<std::string> names;
  for (const ParameterInfo& p : make_parameter_table(config_of(checkpoint, {}).model, false).all) {
    names.push_back(p.name);
  }
  nlohmann::json where = *path == named ? described : describe_base(*base);
  checkpoint.set_base(std::move(base), names);
  return where;
}

}  // namespace parka
