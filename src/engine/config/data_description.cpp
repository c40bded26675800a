#include "engine/config/data_description.h"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <set>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "data/xxh3.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

using std::string_view_literals::operator""sv;

// The file's content where it is that of a data.json; null where it is not there, or what another program wrote.
// Throws Error(kBadInput) if it is cut: what it said would no longer count.
json read_description(const fs::path& path) {
  constexpr uintmax_t kMost = uintmax_t{1} << 24;  // a data set of another program may have the name, too
  std::error_code failed;
  const uintmax_t size = fs::file_size(path, failed);
  if (failed || size > kMost) return nullptr;
  json read;
  try {
    read = json::parse(read_text(path.string(), kMost), nullptr, false);
  } catch (const Error&) {
    return nullptr;
  }
  if (read.is_discarded()) {
    throw_bad_input(
        "{}: is empty or cut, and says how the token files beside it are to be read; copy it again, or move it away if "
        "it is not of parka prepare",
        path.string());
  }
  return read.is_object() && read.value("dtype", json()).is_string() ? read : nullptr;
}

std::optional<int64_t> integer_of(const json& description, const char* key) {
  const json value = description.value(key, json());
  return value.is_number_integer() ? std::optional(value.get<int64_t>()) : std::nullopt;
}

// The id that both begins and ends documents, if there is one.
std::optional<int64_t> shared_document_id(const json& description) {
  const json bos = description.value("bos", json());
  const std::optional<int64_t> eos = integer_of(description, "eos");
  return eos && bos == json::array({*eos}) ? eos : std::nullopt;
}

void check_packing(const fs::path& file, const json& description, const DataConfig& data) {
  const std::optional<int64_t> length = integer_of(description, "sequence_length");
  std::vector<std::string> wrong, wanted;
  if (description.contains("chat") && !data.loss_mask) {
    wrong.emplace_back("data.loss_mask=false");
    wanted.emplace_back("data.loss_mask=true");
  }
  if (description.contains("chat") && data.documents != DocumentMode::kSeparate) {
    wrong.emplace_back("data.documents=joined");
    wanted.emplace_back("data.documents=separate");
  }
  if (length && *length != data.sequence_length) {
    wrong.push_back(fmt::format("data.sequence_length={}", data.sequence_length));
    wanted.push_back(fmt::format("data.sequence_length={}", *length));
  }
  if (wrong.empty()) return;
  throw_bad_input(
      "{}: has conversations with questions and padding that are not to be learnt, packed for one sequence "
      "length, as {} says, and {}; set {}",
      file.string(), description_path(file).string(), fmt::join(wrong, ", "), fmt::join(wanted, ", "));
}

// Ids that begin and end documents are those that the data were made with.
void check_document_ids(const fs::path& file, const json& description, DocumentIds ids) {
  const std::optional<int64_t> eos = integer_of(description, "eos");
  if (!ids.any() || !eos || description.contains("chat")) return;
  const json bos = description.value("bos", json::array());
  const int64_t start =
      bos.is_array() && !bos.empty() && bos.front().is_number_integer() ? bos.front().get<int64_t>() : -1;
  const bool is_shared = shared_document_id(description).has_value();
  const bool fits = is_shared ? ids == DocumentIds{start, *eos}
                              : (ids.start < 0 || ids.start == start) && (ids.end < 0 || ids.end == *eos);
  if (fits) return;
  throw_bad_input(
      "{}: its documents{} end with id {}, as {} says; set data.document_start={} and data.document_end={}",
      file.string(), start < 0 ? std::string() : fmt::format(" begin with id {} and", start), *eos,
      description_path(file).string(), start, *eos);
}

}  // namespace

fs::path description_path(const fs::path& file) { return file.parent_path() / "data.json"; }

const DataDescriptions::Folder& DataDescriptions::of_folder(const fs::path& file) {
  const auto [found, is_new] = folders_.try_emplace(file.parent_path());
  Folder& folder = found->second;
  if (!is_new) return folder;
  folder.description = read_description(description_path(file));
  for (const auto& [split, about] : folder.description.items()) {
    if (!about.is_object() || !about.contains("files")) continue;
    for (const json& name : about.at("files")) {
      if (name.is_string()) folder.splits.emplace(name.get<std::string>(), split);
    }
  }
  return folder;
}

const json* DataDescriptions::of(const fs::path& file, std::string_view split) {
  const Folder& folder = of_folder(file);
  const auto found = folder.splits.find(file.filename().string());
  if (found == folder.splits.end() || (!split.empty() && found->second != split)) return nullptr;
  return &folder.description;
}

void DataDescriptions::check_content(const ReadOnlyFile& file, const std::function<std::string()>& checksum) {
  const fs::path path = file.path();
  const json& description = of_folder(path).description;
  const auto contents = description.find("contents");
  if (contents == description.end() || !contents->is_object()) return;
  const json content = contents->value(path.filename().string(), json());
  const auto differs = [&](const char* key, const json& own) { return content.value(key, own) != own; };
  if (!content.is_object()) return;
  std::string difference;
  if (differs("bytes", file.size())) {
    difference = fmt::format("size ({} bytes, there {})", file.size(), content.at("bytes").dump());
  } else if (differs("ends", fmt::format("{:016x}", xxh3_64(file.ends())))) {
    difference = "beginning or end";
  } else if (checksum && differs("checksum", checksum())) {
    difference = "checksum";
  }
  if (difference.empty()) return;
  throw_bad_input(
      "{}: its {} is not as {} says: it is cut, damaged, of another preparation or another file under this name; copy "
      "the folder again",
      file.path(), difference, description_path(path).string());
}

void DataDescriptions::check_complete(const std::string& pattern, const std::vector<std::string>& files) {
  std::map<fs::path, std::string> folders;  // a file in each that its data.json describes
  for (const fs::path file : files) {
    if (of(file) != nullptr) folders.emplace(file.parent_path(), file.string());
  }
  for (const fs::path file : files) {
    const auto found = folders.find(file.parent_path());
    if (found == folders.end() || of(file) != nullptr) continue;
    throw_bad_input(
        "{}: \"{}\" takes it with {}, and {} lists that one alone; move it away if it is of another preparation, or "
        "list files by their names",
        file.string(), pattern, found->second, description_path(file).string());
  }
  for (const auto& [folder, described] : folders) {
    for (const auto& [name, split] : of_folder(described).splits) {
      const fs::path listed = folder / name;
      if (fnmatch(pattern.c_str(), listed.c_str(), FNM_PATHNAME | FNM_PERIOD) != 0 || file_exists(listed)) continue;
      throw_bad_input("{}: no such file, and {} lists it with {}; copy it, too, or list files by their names",
                      listed.string(), description_path(described).string(), described);
    }
  }
}

void DataDescriptions::warn_of_others() const {
  for (const auto& [path, folder] : folders_) {
    const std::string file = description_path(path / "file").string();
    if (!folder.splits.empty() || !file_exists(file)) continue;
    log_warning(
        "{}: describes no token files, as that of parka prepare does, so it tells nothing of those beside it; "
        "move it away, or copy theirs",
        file);
  }
}

void check_described_type(const fs::path& file, const json& description, TokenType type) {
  for (const char* key : {"vocab_size", "eos", "sequence_length", "bos"}) {
    const json value = description.value(key, json(0));
    const bool is_list =
        value.is_array() && std::ranges::all_of(value, [](const json& id) { return id.is_number_integer(); });
    if (value.is_number_integer() || (key == "bos"sv && is_list)) continue;
    throw_bad_input("{}: \"{}\" is no integer, as parka prepare writes it; copy the folder again",
                    description_path(file).string(), key);
  }
  if (description.at("dtype") == name_of(type)) return;
  throw_bad_input("{}: its ids are {}, as {} says, and would be read as {}; set data.token_dtype, or --dtype",
                  file.string(), description.at("dtype").get<std::string>(), description_path(file).string(),
                  name_of(type));
}

std::vector<std::string> overrides_of_data(const std::string& folder, int64_t eval_interval) {
  if (!fs::exists(folder)) throw_bad_input("--data {}: no such folder; `parka prepare` makes one", folder);
  const json description = read_description(fs::path(folder) / "data.json");
  if (description.is_null()) {
    throw_bad_input("--data {}: has no data.json of `parka prepare`; list token files in data.train instead",
                    folder);
  }
  // Weights of a config are those of its own files.
  std::vector<std::string> overrides = {"data.token_dtype=" + description.at("dtype").get<std::string>(),
                                        "data.weights=[]"};
  for (const char* split : {"train", "eval"}) {
    json files = json::array();
    const json about = description.value(split, json::object());
    for (const json& name : about.value("files", json::array()))
      files.push_back((fs::path(folder) / name).string());
    overrides.push_back(fmt::format("data.{}={}", split, files.dump()));
    if (split == "eval"sv && !files.empty() && eval_interval > 0) {
      overrides.push_back(fmt::format("training.eval_interval={}", eval_interval));
    }
  }
  if (const auto length = integer_of(description, "sequence_length")) {
    overrides.push_back(fmt::format("data.sequence_length={}", *length));
  }
  if (description.contains("chat")) {
    overrides.insert(overrides.end(), {"data.loss_mask=true", "data.documents=separate"});
  }
  return overrides;
}

void warn_of_vocabulary(const fs::path& file, const json& description, int64_t vocab_size) {
  const std::optional<int64_t> described = integer_of(description, "vocab_size");
  if (!described || *described <= vocab_size) return;
  log_warning(
      "{}: its tokenizer has {} ids, as {} says, more than model.vocab_size = {}; set model.vocab_size={} in a new model, "
      "or the run ends at the first id that is too large",
      file.string(), *described, description_path(file).string(), vocab_size,
      integer_of(description, "padded_vocab_size").value_or(*described));
}

void check_described(const fs::path& file, const json& description, const Config& config) {
  const DataConfig& data = config.data;
  check_described_type(file, description, data.token_dtype);
  check_packing(file, description, data);
  check_document_ids(file, description, data.document_ids());
}

std::string described_text(const json& description, const char* key) {
  const auto found = description.find(key);
  return found != description.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string described_tokenizer(const json& description) {
  const std::string checksum = described_text(description, "tokenizer_sha256");
  return checksum.empty() && described_text(description, "tokenizer") == "bytes" ? "bytes" : checksum;
}

void for_each_description(const std::vector<std::string>& sources,
                          const std::function<void(const std::string& file, const json&)>& called) {
  DataDescriptions descriptions;
  std::set<fs::path> told;
  for (const std::string& source : sources) {
    for (const std::string& file : expand_source(source, true)) {
      const fs::path folder = fs::path(file).parent_path();
      if (told.contains(folder)) continue;
      const json* description = descriptions.of(file);
      if (description == nullptr) continue;
      told.insert(folder);
      called(file, *description);
    }
  }
}

}  // namespace parka
