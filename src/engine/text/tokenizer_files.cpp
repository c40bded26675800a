#include "engine/text/tokenizer_files.h"

#include <algorithm>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/text/image_geometry.h"

namespace parka {
namespace {

bool has_tokenizer(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / kTokenizerName, ignored);
}

std::string kept_tokenizer(const Config& config) {
  return (fs::path(config.checkpoint.folder) / kTokenizerFolder).string();
}

// The tokenizer of data.tokenizer; empty if it is not given, or gone while the run has its copy.
std::string named_tokenizer(const Config& config) {
  const std::string& path = config.data.tokenizer;
  if (path.empty() || (!file_exists(path) && has_tokenizer(kept_tokenizer(config)))) return {};
  return open_tokenizer(path, "data.tokenizer");
}

// The tokenizer of the model which the run starts from. A run does not end because a tokenizer cannot be found.
std::optional<std::string> tokenizer_of_model(const Config& config) {
  try {
    const std::string source = checkpoint_at(config.checkpoint.init_from);
    if (!source.empty()) return find_tokenizer(source, read_manifest_alone(source).state);
  } catch (const Error& error) {
    log_warning("no tokenizer is kept with the run: {}", error.what());
  }
  return std::nullopt;
}

// The tokenizer that parka prepare has left beside the first file of data.train.
std::optional<std::string> tokenizer_of_data(const Config& config) {
  if (config.data.train.empty()) return std::nullopt;
  const fs::path beside = fs::path(config.data.train.front()).parent_path() / kTokenizerFolder;
  return has_tokenizer(beside) ? std::optional(beside.string()) : std::nullopt;
}

bool is_same_file(const fs::path& a, const fs::path& b) {
  return checksum_of(ReadOnlyFile(a.string())) == checksum_of(ReadOnlyFile(b.string()));
}

bool is_copy(const std::string& copy, const std::string& source) {
  const std::vector<std::string> names = carried_files(source);
  return carried_files(copy) == names && std::ranges::all_of(names, [&](const std::string& name) {
           return is_same_file(fs::path(source) / name, fs::path(copy) / name);
         });
}

json read_without(const std::string& path, const std::set<std::string>& keys) {
  constexpr int64_t kMaxBytes = int64_t{1} << 30;
  return parse_json_if_valid(read_text(path, kMaxBytes), keys);
}

// Only what the functions below look at: a vocabulary is long.
json read_outline(const std::string& path) {
  json outline = read_without(path, {"model", "post_processor"});
  return outline.is_object() ? outline : json::object();
}

// But for the tokens put around a text, in which a copy of parka prepare may differ.
bool is_same_tokenizer(const std::string& a, const std::string& b) {
  if (is_same_file(a, b)) return true;
  const json one = read_without(a, {"post_processor"});
  return one.is_object() && one == read_without(b, {"post_processor"});
}

bool have_same_tokenizer(const fs::path& one, const fs::path& other) {
  return has_tokenizer(one) && has_tokenizer(other) &&
         is_same_tokenizer(one / kTokenizerName, other / kTokenizerName);
}

json read_if_there(const fs::path& path) {
  return file_exists(path.string()) ? read_outline(path.string()) : json::object();
}

// The files that parka prepare changes for data made for a model: template, and tokens at ends.
std::set<std::string> changed_by_data(const std::string& of_model, const std::string& of_data) {
  std::set<std::string> names = {"chat_template.jinja", "generation_config.json"};
  if (!is_same_file(fs::path(of_model) / kTokenizerName, fs::path(of_data) / kTokenizerName)) {
    names.insert({kTokenizerName, "tokenizer_config.json"});
  }
  return names;
}

// The id of a token, which tokenizer_config.json names as a string or as an object with one; null if it is unknown.
json id_of(const json& token, const json& tokenizer) {
  const json text = token.is_object() ? token.value("content", json()) : token;
  const json added = tokenizer.value("added_tokens", json::array());
  for (const json& entry : added) {
    if (entry.is_object() && entry.value("content", json()) == text) return entry.value("id", json());
  }
  return {};
}

struct KeptFile {
  fs::path source;
  std::string text = {};  // in place of the source's, where it is not empty
};

// The files that a run keeps, by name: those of `source`, or where that is empty of the model and the data.
std::map<std::string, KeptFile> files_of_tokenizer(const Config& config, const std::string& source) {
  std::map<std::string, KeptFile> files;
  const auto take = [&](const std::string& folder, const std::optional<std::set<std::string>>& names = {}) {
    for (const std::string& name : carried_files(folder)) {
      if (!names || names->contains(name)) files[name] = {fs::path(folder) / name};
    }
  };
  if (!source.empty()) {
    take(source);
    return files;
  }
  const std::optional<std::string> model = tokenizer_of_model(config), data = tokenizer_of_data(config);
  if (!model && !data) return files;
  if (model) take(*model);
  if (data && !model) {
    take(*data);
  } else if (data && have_different_tokenizers(*model, *data)) {
    log_warning("{}: differs from the tokenizer of the model, {}, which the run keeps", *data, *model);
  } else if (data) {
    take(*data, changed_by_data(*model, *data));
  }
  for (const auto& [name, text] : processor_of_data(config, model)) files[name].text = text;
  return files;
}

// What text has would cut documents everywhere.
void warn_of_document_ids(const Config& config) {
  const DocumentIds ids = config.data.document_ids();
  const std::string folder = ids.any() ? tokenizer_of_run(config) : "";
  const std::map<int32_t, std::string> special = folder.empty() ? decltype(special)() : special_tokens(folder);
  if (special.empty()) return;
  const std::map<int64_t, std::string> tokens = tokens_of(folder);
  for (const auto& [key, id] : {std::pair{"document_start", ids.start}, {"document_end", ids.end}}) {
    if (special.contains(static_cast<int32_t>(id)) || !tokens.contains(id)) continue;
    log_warning("data.{} = {} is {} in {}, as text may have it within a document; set the id of a special token",
                key, id, printable(json(tokens.at(id)).dump()), folder);
  }
}

}  // namespace

std::optional<std::string> find_tokenizer(const std::string& path, const json& state) {
  std::optional<std::string> found;
  follow_sources(path, state, [&](const std::string& at, const json&) {
    std::vector<fs::path> places = {fs::path(at) / kHuggingFaceFolder, fs::path(at) / kTokenizerFolder};
    if (const std::string run = run_folder_of(at); !run.empty()) places.push_back(fs::path(run) / kTokenizerFolder);
    const auto place = std::ranges::find_if(places, has_tokenizer);
    if (place != places.end()) found = place->string();
    return found.has_value();
  });
  return found;
}

bool have_different_tokenizers(const std::string& one, const std::string& other) {
  return has_tokenizer(one) && has_tokenizer(other) && !have_same_tokenizer(one, other);
}

std::string open_tokenizer(const std::string& path, const std::string& where) {
  const fs::path given = path;
  const fs::path folder = given.filename() == kTokenizerName ? given.parent_path() : given;
  if (!has_tokenizer(folder)) {
    throw_bad_input("{}: {} is not a folder with a {}; name the folder of a Hugging Face tokenizer", where, path,
                    kTokenizerName);
  }
  refuse_lfs_pointer(InputFile((folder / kTokenizerName).string()));
  return folder.empty() ? "." : folder.string();
}

std::map<int32_t, std::string> special_tokens(const std::string& folder) {
  const json outline = read_outline((fs::path(folder) / kTokenizerName).string());
  std::map<int32_t, std::string> tokens;
  for (const json& token : outline.value("added_tokens", json::array())) {
    const json id = token.is_object() ? token.value("id", json()) : json();
    if (!id.is_number_integer() || token.value("special", json()) != true) continue;
    const json content = token.value("content", json());
    if (content.is_string()) tokens.emplace(id.get<int32_t>(), content.get<std::string>());
  }
  return tokens;
}

std::map<int64_t, std::string> tokens_of(const std::string& folder) {
  const json file = read_without((fs::path(folder) / kTokenizerName).string(), {"post_processor"});
  std::map<int64_t, std::string> tokens;
  const auto add = [&](const json& id, const json& token) {
    if (id.is_number_integer() && token.is_string()) tokens[id.get<int64_t>()] = token.get<std::string>();
  };
  const json::json_pointer vocabulary("/model/vocab");
  if (file.contains(vocabulary)) {
    int64_t next = 0;  // of a list of tokens with their scores
    for (const auto& [token, id] : file.at(vocabulary).items()) {
      id.is_array() && !id.empty() ? add(next++, id.front()) : add(id, token);
    }
  }
  for (const json& token : file.is_object() ? file.value("added_tokens", json::array()) : json::array()) {
    if (token.is_object()) add(token.value("id", json()), token.value("content", json()));
  }
  return tokens;
}

std::string checksum_of_tokens(const std::string& folder) {
  Checksum checksum;
  for (const auto& [id, token] : tokens_of(folder)) checksum.update(as_bytes(fmt::format("{} {}\n", id, token)));
  return checksum.hex();
}

std::string tokenizer_of_run(const Config& config) {
  if (const std::string kept = kept_tokenizer(config); has_tokenizer(kept)) return kept;
  if (std::string named = named_tokenizer(config); !named.empty()) return named;
  const std::optional<std::string> model = tokenizer_of_model(config);
  return model ? *model : tokenizer_of_data(config).value_or("");
}

void check_tokenizer(const Config& config) {
  warn_of_document_ids(config);
  const std::string named = named_tokenizer(config);
  const std::string run =
      named.empty() && !file_exists(kept_tokenizer(config)) ? tokenizer_of_model(config).value_or("") : named;
  struct Made {
    std::string file, tokenizer, folder;
    json chat;  // the name of a template; null for text
  };
  std::optional<Made> first;
  for_each_description(config.data.train, [&](const std::string& file, const json& description) {
    const Made made = {file, described_tokenizer(description),
                       (fs::path(file).parent_path() / kTokenizerFolder).string(),
                       description.value("chat", json())};
    if (made.tokenizer.empty()) return;
    const bool is_bytes = made.tokenizer == "bytes";
    if (!run.empty() && !is_bytes && !has_tokenizer(made.folder)) {
      throw_bad_input(
          "{}: was made with a tokenizer whose copy {} is missing, and nothing else tells whether it is that of the "
          "run, {}; copy the folder, too",
          file, made.folder, run);
    }
    if (!run.empty() && (is_bytes || !have_same_tokenizer(run, made.folder))) {
      throw_bad_input("{}: was made with {}, and the run would have {}, to which its ids mean other texts; {}",
                      file, is_bytes ? "the tokenizer of bytes" : made.folder, run,
                      is_bytes ? (named.empty() ? "" : "take data.tokenizer out, or ") +
                                     ("prepare the data with --tokenizer " + run)
                               : "set data.tokenizer=" + made.folder + ", or prepare the data with the other");
    }
    if (!first) first = made;
    if (first->chat.is_string() && made.chat.is_string() && first->chat != made.chat) {
      log_warning("{}: its conversations have the template {}, and those of {} have {}; the model learns both",
                  file, made.chat.dump(), first->file, first->chat.dump());
    }
    if (made.tokenizer == first->tokenizer) return;
    if (is_bytes || first->tokenizer == "bytes" || !have_same_tokenizer(first->folder, made.folder)) {
      throw_bad_input(
          "data.train: {} was made with another tokenizer than {}, and their ids mean other texts; prepare both with "
          "one --tokenizer, or copy the folder {} of each if these are the same",
          file, first->file, kTokenizerFolder);
    }
  });
}

void check_present_tokenizer(const Config& config) {
  const auto is_there = [](const std::string& path) { return path.empty() || file_exists(path); };
  if (is_there(config.data.tokenizer) && is_there(config.checkpoint.init_from)) check_tokenizer(config);
}

void keep_tokenizer(const Config& config) {
  const std::string copy = kept_tokenizer(config);
  const std::string source = named_tokenizer(config);
  if (file_exists(copy)) {
    if (!source.empty() && !is_copy(copy, source)) {
      log_warning("{}: differs from data.tokenizer {} and stays as it is; remove it to take the other", copy,
                  source);
    }
    return;
  }
  const std::map<std::string, KeptFile> files = files_of_tokenizer(config, source);
  if (files.empty()) return;
  remove_tree(copy + ".tmp");  // of a start that was killed
  DraftFolder draft(copy);
  for (const auto& [name, file] : files) {
    if (file.text.empty()) {
      copy_to_new_file(file.source.string(), draft / name);
    } else {
      write_new_file(draft / name, file.text);
    }
  }
  draft.publish();
  log_info("{}: a copy of the tokenizer in {}", copy, files.at(kTokenizerName).source.parent_path().string());
}

json special_token_ids(const std::string& folder) {
  const json generation = read_if_there(fs::path(folder) / "generation_config.json");
  json config = read_if_there(fs::path(folder) / "tokenizer_config.json");
  if (!config.contains("added_tokens_decoder")) {  // a folder of an older form
    config.update(read_if_there(fs::path(folder) / "special_tokens_map.json"));
  }
  const json tokenizer = read_if_there(fs::path(folder) / kTokenizerName);
  json ids;
  for (const std::string name : {"bos_token", "eos_token", "pad_token"}) {
    json id = generation.value(name + "_id", json());
    ids[name + "_id"] = id.is_null() ? id_of(config.value(name, json()), tokenizer) : std::move(id);
  }
  return ids;
}

}  // namespace parka
