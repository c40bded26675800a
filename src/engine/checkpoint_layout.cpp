#include "engine/checkpoint_layout.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "engine/file_io.h"
#include "engine/json_text.h"

namespace parka {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kFormat = "parka-checkpoint";
constexpr int64_t kVersion = 1;
constexpr std::string_view kStepPrefix = "step_";
constexpr int64_t kMaxManifestBytes = 64 << 20;

constexpr std::array<std::pair<StepFolderKind, std::string_view>, 4> kSuffixes{
    {{StepFolderKind::kComplete, ""},
     {StepFolderKind::kTemporary, ".tmp"},
     {StepFolderKind::kDisplaced, ".old"},
     {StepFolderKind::kDiscarded, ".delete"}}};

// How a manifest ends; `body` is all text before it.
std::string seal(std::string_view body) {
  Checksum checksum;
  checksum.update(as_bytes(body));
  return fmt::format(",\n  \"manifest_xxh3_128\": \"{}\"\n}}\n", checksum.hex());
}

// A typed read of one field. The messages are for a manifest whose checksum holds, so for one that another program
// wrote or a later version of Parka.
const json& field(const json& object, const char* key, json::value_t type, std::string_view where) {
  const auto it = object.find(key);
  if (it == object.end()) throw_bad_input("{}: has no \"{}\"", where, key);
  if (it->type() != type) throw_bad_input("{}: \"{}\" has the wrong type", where, key);
  return *it;
}

int64_t count(const json& object, const char* key, std::string_view where) {
  const auto value = field(object, key, json::value_t::number_unsigned, where).get<uint64_t>();
  if (value > static_cast<uint64_t>(INT64_MAX)) throw_bad_input("{}: \"{}\" is out of range", where, key);
  return static_cast<int64_t>(value);
}

std::string text(const json& object, const char* key, std::string_view where) {
  return field(object, key, json::value_t::string, where).get<std::string>();
}

}  // namespace

std::string step_folder_name(StepFolder folder) {
  for (const auto& [kind, suffix] : kSuffixes) {
    if (kind == folder.kind) return fmt::format("{}{:08}{}", kStepPrefix, folder.step, suffix);
  }
  throw_internal("unknown kind of step folder");
}

std::optional<StepFolder> parse_step_folder_name(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  StepFolder folder;
  const char* digits = name.data() + kStepPrefix.size();
  const auto [rest, error] = std::from_chars(digits, name.data() + name.size(), folder.step);
  if (error != std::errc() || folder.step < 0) return std::nullopt;
  for (const auto& [kind, suffix] : kSuffixes) {
    folder.kind = kind;
    // Compared whole, so that "step_100" or "step_+00000100" is not taken for step 100.
    if (step_folder_name(folder) == name) return folder;
  }
  return std::nullopt;
}

std::string step_folder_path(const std::string& run_folder, int64_t step, StepFolderKind kind) {
  return (fs::path(run_folder) / step_folder_name({step, kind})).string();
}

std::vector<StepFolder> list_step_folders(const std::string& run_folder) {
  std::vector<StepFolder> folders;
  std::error_code error;
  fs::directory_iterator it(run_folder, error);
  if (error == std::errc::no_such_file_or_directory) return folders;
  for (; !error && it != fs::directory_iterator(); it.increment(error)) {
    if (const auto folder = parse_step_folder_name(it->path().filename().string())) folders.push_back(*folder);
  }
  if (error) throw_open_error("list run folder", run_folder, error.value());
  std::sort(folders.begin(), folders.end(), [](const StepFolder& a, const StepFolder& b) {
    return std::make_tuple(-a.step, a.kind) < std::make_tuple(-b.step, b.kind);
  });
  return folders;
}

std::string shard_name(size_t index) { return fmt::format("shard_{}.safetensors", index); }

std::string encode_manifest(const Manifest& manifest) {
  nlohmann::ordered_json root = {
      {"format", kFormat}, {"version", kVersion}, {"step", manifest.step}, {"state", manifest.state}};
  root["files"] = nlohmann::ordered_json::array();
  for (const Manifest::File& file : manifest.files) {
    root["files"].push_back({{"name", file.name}, {"bytes", file.num_bytes}, {"xxh3_128", file.checksum}});
  }
  root["tensors"] = manifest.num_tensors;
  root["complete"] = true;
  std::string body;
  try {
    body = root.dump(2);
  } catch (const json::exception&) {
    throw_internal("the state of a checkpoint holds text that is not UTF-8");
  }
  body.resize(body.size() - std::string_view("\n}").size());  // the seal closes the object
  std::string content = body + seal(body);
  // What cannot be read back must not take the place of what can: too deep, too long.
  try {
    PARKA_REQUIRE(static_cast<int64_t>(content.size()) <= kMaxManifestBytes);
    parse_manifest(content, "new manifest");
  } catch (const Error& e) {
    throw_internal("the state of a checkpoint does not fit a manifest: {}", e.what());
  }
  return content;
}

Manifest parse_manifest(std::string_view content, std::string_view where) {
  const size_t seal_size = seal("").size();
  const std::string_view body = content.substr(0, content.size() - std::min(content.size(), seal_size));
  if (content.size() < seal_size || content.substr(body.size()) != seal(body)) {
    throw_bad_input("{}: its content does not match its own checksum: cut short or damaged", where);
  }
  const json root = parse_json_text(content, where, JsonComments::kRefused);
  if (!root.is_object() || text(root, "format", where) != kFormat) {
    throw_bad_input("{}: is not the manifest of a Parka checkpoint", where);
  }
  if (const int64_t version = count(root, "version", where); version != kVersion) {
    throw_bad_input("{}: has format version {}, this Parka reads version {}: use the Parka that wrote it", where,
                    version, kVersion);
  }
  if (!field(root, "complete", json::value_t::boolean, where).get<bool>()) {
    throw_bad_input("{}: says that the checkpoint is not complete", where);
  }
  Manifest manifest;
  manifest.step = count(root, "step", where);
  if (!root.contains("state")) throw_bad_input("{}: has no \"state\"", where);
  manifest.state = root["state"];
  for (const json& file : field(root, "files", json::value_t::array, where)) {
    if (!file.is_object()) throw_bad_input("{}: \"files\" must hold objects", where);
    const std::string name = text(file, "name", where);
    if (name != shard_name(manifest.files.size())) {
      throw_bad_input("{}: file \"{}\" where \"{}\" was expected", where, printable(name),
                      shard_name(manifest.files.size()));
    }
    manifest.files.push_back({name, count(file, "bytes", where), text(file, "xxh3_128", where)});
  }
  manifest.num_tensors = count(root, "tensors", where);
  return manifest;
}

Manifest read_manifest(const std::string& checkpoint_path) {
  const fs::path folder = checkpoint_path;
  const std::string where = (folder / kManifestName).string();
  Manifest manifest = parse_manifest(read_text(where, kMaxManifestBytes), where);
  // A folder under another name is the user's copy; a step folder must hold the step that it is named after.
  if (const auto named = parse_step_folder_name(folder.filename().string());
      named && named->step != manifest.step) {
    throw_bad_input("{}: is of step {}, its folder of step {}", where, manifest.step, named->step);
  }
  for (const Manifest::File& file : manifest.files) {
    const InputFile opened((folder / file.name).string());
    if (opened.num_bytes() != file.num_bytes) {
      throw_bad_input("{}: has {} bytes, the manifest says {}: cut short or replaced", opened.path(),
                      opened.num_bytes(), file.num_bytes);
    }
  }
  return manifest;
}

}  // namespace parka
