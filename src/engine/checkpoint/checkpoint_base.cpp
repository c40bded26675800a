#include "engine/checkpoint/checkpoint_base.h"

#include <algorithm>
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

namespace parka {
namespace {

std::string manifest_path(const std::string& path) { return path + "/" + std::string(kManifestName); }

// Covers names, sizes and checksums of its files: nothing else in a manifest makes other weights.
std::string weights_checksum(const std::string& path) {
  Checksum checksum;
  checksum.update(as_bytes(encode_files(read_manifest_alone(path).files).dump()));
  return checksum.hex();
}

bool is_there(const std::string& path) { return file_exists(manifest_path(path)); }

struct Described {
  std::string path, checksum;
  std::string from_run;  // the path from the run's folder; empty in checkpoints of earlier versions
};

// Absolute, without dots or a slash at the end.
fs::path plain(const fs::path& path) { return (fs::absolute(path) / "").lexically_normal().parent_path(); }

// The run of a checkpoint, or a checkpoint that is of none.
fs::path run_of(const std::string& checkpoint) {
  const fs::path own = plain(checkpoint);
  return run_folder_of(own).empty() ? own : own.parent_path();
}

// The places where the base may lie: its old one, the same relative to the run, or beside the run by its name.
std::vector<std::string> usual_places(const std::string& checkpoint, const Described& base) {
  const fs::path run = run_of(checkpoint), named = plain(base.path);
  const fs::path within = run_folder_of(named).empty() ? "" : named.parent_path().filename();
  std::vector<std::string> places = {base.path};
  if (!base.from_run.empty()) places.push_back((run / base.from_run).lexically_normal().string());
  const fs::path beside = run.parent_path() / within / named.filename();
  if (beside != run) places.push_back(beside.string());
  return places;
}

// The checkpoints that the base may be: in the usual places, and at `elsewhere`, itself or in it.
std::vector<std::string> candidates(const std::string& checkpoint, const Described& base,
                                    const std::string& elsewhere) {
  std::vector<std::string> all = usual_places(checkpoint, base);
  if (!elsewhere.empty()) {
    const fs::path given = plain(elsewhere);
    all.insert(all.end(), {given.string(), (given / plain(base.path).filename()).string()});
  }
  std::vector<std::string> found;
  for (const std::string& candidate : all) {
    const auto is_same = [&](const std::string& other) { return fs::equivalent(candidate, other); };
    if (is_there(candidate) && std::ranges::none_of(found, is_same)) found.push_back(candidate);
  }
  return found;
}

// Earlier versions described the whole manifest.
bool has_weights_of(const std::string& path, const Described& base) {
  if (checksum_of(ReadOnlyFile(manifest_path(path))) == base.checksum) return true;
  try {
    return weights_checksum(path) == base.checksum;
  } catch (const Error& error) {  // its manifest is damaged
    if (error.code() != ExitCode::kBadInput) throw;
    return false;
  }
}

// The first of the candidates that has the described weights.
std::optional<std::string> first_same(const std::vector<std::string>& found, const Described& base) {
  const auto same =
      std::ranges::find_if(found, [&](const std::string& path) { return has_weights_of(path, base); });
  return same == found.end() ? std::nullopt : std::optional(*same);
}

// The description that describe_base() has left in a state; nothing if it is damaged.
std::optional<Described> described_in(const json& state) {
  const json& base = state.at(kBaseKey);
  const auto is_text = [&](const char* key) { return base.contains(key) && base.at(key).is_string(); };
  if (!base.is_object() || !is_text("checkpoint") || !is_text("checksum")) return std::nullopt;
  return Described{base.at("checkpoint").get<std::string>(), base.at("checksum").get<std::string>(),
                   is_text("from_run") ? base.at("from_run").get<std::string>() : std::string()};
}

}  // namespace

json describe_base(const LoadedCheckpoint& base, const std::string& run) {
  const fs::path path = plain(base.path());
  return {{"checkpoint", recordable_path(path.string())},
          {"from_run", recordable_path(path.lexically_relative(plain(run)).string())},
          {"checksum", weights_checksum(base.path())}};
}

std::string find_base(const std::string& checkpoint, const json& state) {
  const std::optional<Described> described = state.contains(kBaseKey) ? described_in(state) : std::nullopt;
  if (!described) return {};
  return first_same(candidates(checkpoint, *described, {}), *described).value_or("");
}

bool has_base(const LoadedCheckpoint& checkpoint) { return checkpoint.state().contains(kBaseKey); }

void attach_base(LoadedCheckpoint& checkpoint, Communicator& ranks, const std::string& elsewhere) {
  if (!has_base(checkpoint)) return;
  const std::optional<Described> described = described_in(checkpoint.state());
  if (!described)
    throw_bad_input("{}: \"{}\" in its state does not name a checkpoint", checkpoint.path(), kBaseKey);
  const std::vector<std::string> found = candidates(checkpoint.path(), *described, elsewhere);
  if (found.empty()) {
    std::vector<std::string> places = usual_places(checkpoint.path(), *described);
    places.erase(std::unique(places.begin(), places.end()), places.end());
    const std::string not_it =
        !elsewhere.empty() && file_exists(elsewhere)
            ? fmt::format(", and checkpoint.init_from = {} neither is it nor has it", elsewhere)
            : "";
    throw_bad_input(
        "{}: has what was trained alone, and the checkpoint with the other weights is gone{}; put it back as {}, or name "
        "its place (parka train, eval and generate: --set checkpoint.init_from=FOLDER; export: --base FOLDER)",
        checkpoint.path(), not_it, fmt::join(places, " or "));
  }
  const std::optional<std::string> path = first_same(found, *described);
  if (!path) {
    throw_bad_input("{}: was trained beside other weights than {} has now; put that checkpoint back as it was",
                    checkpoint.path(), fmt::join(found, " or "));
  }
  auto base = std::make_shared<const LoadedCheckpoint>(load_checkpoint(*path, ranks));
  std::vector<std::string> names;
  for (const ParameterInfo& p : make_parameter_table(config_of(checkpoint).model, false).all) {
    names.push_back(p.name);
  }
  checkpoint.set_base(std::move(base), names);
}

}  // namespace parka
