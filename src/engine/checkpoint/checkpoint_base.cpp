#include "engine/checkpoint/checkpoint_base.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
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
// what lies beside the run of `checkpoint`, a folder, or beside a checkpoint that is of none, by that name, and
// `elsewhere`, itself or in it.
std::vector<std::string> candidates(const std::string& checkpoint, const std::string& path,
                                    const std::string& elsewhere) {
  const auto plain = [](const fs::path& p) { return (p / "").lexically_normal().parent_path(); };
  const fs::path own = plain(fs::absolute(checkpoint)), named = plain(path);
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

struct Described {
  std::string path, checksum;
};

// What describe_base() has left in a state; nothing where it is damaged.
std::optional<Described> described_in(const nlohmann::json& state) {
  const nlohmann::json& base = state.at(kBaseKey);
  const auto is_text = [&](const char* key) { return base.contains(key) && base.at(key).is_string(); };
  if (!base.is_object() || !is_text("checkpoint") || !is_text("checksum")) return std::nullopt;
  return Described{base.at("checkpoint").get<std::string>(), base.at("checksum").get<std::string>()};
}

}  // namespace

nlohmann::json describe_base(const LoadedCheckpoint& base) {
  return {{"checkpoint", recordable_path(fs::absolute(base.path()).lexically_normal().string())},
          {"checksum", manifest_checksum(base.path())}};
}

std::string find_base(const std::string& checkpoint, const nlohmann::json& state) {
  const std::optional<Described> described = state.contains(kBaseKey) ? described_in(state) : std::nullopt;
  if (!described) return {};
  const std::vector<std::string> found = candidates(checkpoint, described->path, {});
  const auto path = std::ranges::find(found, described->checksum, manifest_checksum);
  return path == found.end() ? std::string() : *path;
}

bool has_base(const LoadedCheckpoint& checkpoint) { return checkpoint.state().contains(kBaseKey); }

nlohmann::json attach_base(LoadedCheckpoint& checkpoint, const LoadGroup& group, const std::string& elsewhere) {
  if (!has_base(checkpoint)) return {};
  const std::optional<Described> described = described_in(checkpoint.state());
  if (!described)
    throw_bad_input("{}: \"{}\" in its state does not name a checkpoint", checkpoint.path(), kBaseKey);
  const std::vector<std::string> found = candidates(checkpoint.path(), described->path, elsewhere);
  if (found.empty()) {
    throw_bad_input(
        "{}: has what was trained alone, and the checkpoint with the other weights is gone: {}; put it back there, or "
        "beside this run, or to train on name its place in checkpoint.init_from",
        checkpoint.path(), described->path);
  }
  const auto path = std::ranges::find(found, described->checksum, manifest_checksum);
  if (path == found.end()) {
    throw_bad_input("{}: was trained beside other weights than {} has now; put that checkpoint back as it was",
                    checkpoint.path(), fmt::join(found, " or "));
  }
  auto base = std::make_shared<const LoadedCheckpoint>(load_checkpoint(*path, group));
  std::vector<std::string> names;
  for (const ParameterInfo& p : make_parameter_table(config_of(checkpoint, {}).model, false).all) {
    names.push_back(p.name);
  }
  nlohmann::json where = *path == described->path ? checkpoint.state().at(kBaseKey) : describe_base(*base);
  checkpoint.set_base(std::move(base), names);
  return where;
}

}  // namespace parka
