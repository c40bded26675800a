#include "engine/checkpoint/checkpoint_layout.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <tuple>
#include <utility>

#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

constexpr std::string_view kFormat = "parka-checkpoint";
constexpr int64_t kVersion = 1;         // saved by one rank
constexpr int64_t kVersionOfRanks = 2;  // by several: "ranks" and "attempt" come with it, and other file names
constexpr int64_t kMaxRanks = 1 << 20;
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

// The order of the files is fixed, so that each of them has its one possible name or is refused.
void check_file_names(const Manifest& manifest, std::string_view where) {
  int rank = 0;
  size_t index = 0;
  for (const Manifest::File& file : manifest.files) {
    const std::string expected = manifest.num_ranks == 1 ? shard_name(index) : rank_shard_name(rank, index);
    bool found = file.name == expected;
    while (!found && rank + 1 < manifest.num_ranks) {  // ranks may have written nothing
      found = file.name == rank_shard_name(++rank, index = 0);
    }
    if (!found) {
      throw_bad_input("{}: file \"{}\" where \"{}\" was expected", where, printable(file.name), expected);
    }
    ++index;
  }
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

std::string run_folder_of(const std::string& checkpoint_path) {
  const fs::path normal = (fs::path(checkpoint_path) / "").lexically_normal().parent_path();
  if (!parse_step_folder_name(normal.filename().string())) return {};
  return normal.has_parent_path() ? normal.parent_path().string() : ".";
}

bool is_in_the_way(const std::string& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error)) && !fs::is_directory(path, error);
}

std::string set_aside(const std::string& path) {
  std::string aside = path + ".refused";
  std::error_code error;
  for (int i = 2; fs::exists(fs::symlink_status(aside, error)); ++i) {
    aside = fmt::format("{}.refused.{}", path, i);
  }
  rename_path(path, aside);
  return aside;
}

std::vector<StepFolder> list_step_folders(const std::string& run_folder) {
  std::vector<StepFolder> folders;
  for (const std::string& name : list_names(run_folder)) {
    if (const auto folder = parse_step_folder_name(name)) folders.push_back(*folder);
  }
  std::ranges::sort(folders, [](const StepFolder& a, const StepFolder& b) {
    return std::make_tuple(-a.step, a.kind) < std::make_tuple(-b.step, b.kind);
  });
  return folders;
}

std::string shard_name(size_t index) { return fmt::format("shard_{}.safetensors", index); }

std::string rank_shard_name(int rank, size_t index) {
  return fmt::format("rank_{:04}_shard_{}.safetensors", rank, index);
}

ordered_json encode_files(const std::vector<Manifest::File>& files) {
  auto list = ordered_json::array();
  for (const Manifest::File& file : files) {
    list.push_back({{"name", file.name}, {"bytes", file.num_bytes}, {"xxh3_128", file.checksum}});
  }
  return list;
}

std::vector<Manifest::File> parse_files(const json& files, std::string_view where) {
  std::vector<Manifest::File> parsed;
  parsed.reserve(files.size());
  for (const json& file : files) {
    const JsonReader reader(file, fmt::format("{}: \"files\"", where));
    parsed.push_back({reader.text("name"), reader.integer("bytes"), reader.text("xxh3_128")});
  }
  return parsed;
}

std::string encode_manifest(const Manifest& manifest) {
  const bool of_ranks = manifest.num_ranks > 1;
  ordered_json root = {{"format", kFormat},
                       {"version", of_ranks ? kVersionOfRanks : kVersion},
                       {"step", manifest.step},
                       {"state", manifest.state}};
  if (of_ranks) {
    root["ranks"] = manifest.num_ranks;
    root["attempt"] = manifest.attempt;
  }
  root["files"] = encode_files(manifest.files);
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
  // Metadata that cannot be read back, too deep or too long, must not replace a good checkpoint.
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
  const JsonReader reader(root, std::string(where));
  if (reader.text("format") != kFormat) reader.fail("is not the manifest of a Parka checkpoint");
  const int64_t version = reader.integer("version");
  if (version != kVersion && version != kVersionOfRanks) {
    throw UnknownVersion(
        fmt::format("{}: has format version {}, this Parka reads versions {} and {}: use the Parka that wrote it",
                    where, version, kVersion, kVersionOfRanks));
  }
  if (reader.member("complete") != true) reader.fail("\"complete\" is not true");
  Manifest manifest;
  manifest.step = reader.integer("step");
  manifest.state = reader.member("state");
  if (version == kVersionOfRanks) {
    manifest.num_ranks = reader.integer("ranks", 2, kMaxRanks);
    manifest.attempt = reader.text("attempt");
  }
  if (!reader.member("files").is_array()) reader.fail("\"files\" is not a list");
  manifest.files = parse_files(reader.member("files"), where);
  check_file_names(manifest, where);
  manifest.num_tensors = reader.integer("tensors");
  return manifest;
}

Manifest read_manifest_alone(const std::string& checkpoint_path) {
  const std::string where = (fs::path(checkpoint_path) / kManifestName).string();
  return parse_manifest(read_text(where, kMaxManifestBytes, NoPermission::kIsIo), where);
}

Manifest read_manifest(const std::string& checkpoint_path) {
  Manifest manifest = read_manifest_alone(checkpoint_path);
  const fs::path folder = checkpoint_path;
  // A folder under another name is the user's copy; a step folder must hold the step that it is named after.
  if (const auto named = parse_step_folder_name(folder.filename().string());
      named && named->step != manifest.step) {
    throw_bad_input("{}: is a manifest of step {} in a folder of step {}", (folder / kManifestName).string(),
                    manifest.step, named->step);
  }
  for (const Manifest::File& file : manifest.files) {
    const InputFile opened((folder / file.name).string(), NoPermission::kIsIo);
    if (opened.num_bytes() != file.num_bytes) {
      throw_bad_input("{}: has {} bytes, the manifest says {}: cut short or replaced", opened.path(),
                      opened.num_bytes(), file.num_bytes);
    }
  }
  return manifest;
}

}  // namespace parka
