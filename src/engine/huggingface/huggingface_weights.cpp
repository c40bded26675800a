#include "engine/huggingface/huggingface_weights.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/files/json_text.h"
#include "engine/files/safetensors.h"
#include "engine/huggingface/value_check.h"

namespace parka {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kMaxIndexBytes = 64 << 20;

std::string joined(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

// A name that an index gives must be one of a file in the model's own folder.
void check_file_name(const std::string& name, const std::string& where) {
  if (name.ends_with(".safetensors") && name.find('/') == std::string::npos &&
      std::none_of(name.begin(), name.end(), is_control)) {
    return;
  }
  throw_bad_input("{}: \"{}\" is not the name of a safetensors file in this folder", where, printable(name));
}

// The index's tensors with their files. Names are in the order of the alphabet, as transformers writes them.
std::map<std::string, std::string> parse_index(const std::string& text, const std::string& where) {
  const json root = parse_json_text(text, where, JsonComments::kRefused);
  if (!root.is_object() || !root.contains("weight_map") || !root.at("weight_map").is_object()) {
    throw_bad_input("{}: has no weight_map", where);
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : root.at("weight_map").items()) {
    if (!file.is_string()) throw_bad_input("{}: weight_map \"{}\" must be a string", where, printable(tensor));
    check_file_name(file.get_ref<const std::string&>(), where);
    files[tensor] = file.get<std::string>();
  }
  if (files.empty()) throw_bad_input("{}: its weight_map is empty", where);
  return files;
}

void open_file(const std::string& folder, const std::string& name, HuggingFaceWeights& weights) {
  InputFile file(joined(folder, name));
  SafetensorsHeader header = read_safetensors_header(file);
  constexpr int64_t kLengthBytes = 8;
  std::string text(static_cast<size_t>(header.num_bytes - kLengthBytes), '\0');
  file.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  for (const SafetensorsEntry& entry : header.tensors) {
    if (is_ignored_huggingface_tensor(entry.name)) continue;
    const auto [first, is_new] =
        weights.tensors.try_emplace(entry.name, HuggingFaceWeights::Place{weights.files.size(), entry});
    if (!is_new) {
      throw_bad_input("{}: tensor {} is in {} too", file.path(), printable(entry.name),
                      weights.layout.files[first->second.file].name);
    }
  }
  weights.layout.files.push_back({name, std::move(text), std::move(header)});
  weights.files.push_back(std::move(file));
}

void check_index(const std::map<std::string, std::string>& index, const HuggingFaceWeights& weights,
                 const std::string& where) {
  for (const auto& [tensor, file] : index) {
    if (is_ignored_huggingface_tensor(tensor)) continue;
    const auto found = weights.tensors.find(tensor);
    if (found == weights.tensors.end() || weights.layout.files[found->second.file].name != file) {
      throw_bad_input("{}: says that {} has the tensor {}, but it has not", where, file, printable(tensor));
    }
  }
}

// The order in which the safetensors library writes tensors of one format.
bool precedes(const HuggingFaceTensor* a, const HuggingFaceTensor* b) { return a->name < b->name; }

// The tensors of each file, by the rule of huggingface_hub's split_torch_state_dict_into_shards.
std::vector<std::vector<const HuggingFaceTensor*>> split_into_files(const std::vector<HuggingFaceTensor>& tensors,
                                                                    DType dtype, int64_t max_file_bytes) {
  std::vector<std::vector<const HuggingFaceTensor*>> files;
  std::vector<const HuggingFaceTensor*> current;
  int64_t filled = 0;
  for (const HuggingFaceTensor& tensor : tensors) {
    const int64_t bytes = num_bytes_of(dtype, tensor.shape);
    if (bytes > max_file_bytes) {  // a file of its own, before the one that is being filled
      files.push_back({&tensor});
      continue;
    }
    if (filled + bytes > max_file_bytes) {
      files.push_back(std::move(current));
      current.clear();
      filled = 0;
    }
    current.push_back(&tensor);
    filled += bytes;
  }
  if (!current.empty()) files.push_back(std::move(current));
  return files;
}

HuggingFaceLayout::File make_file(const std::string& name, const std::vector<const HuggingFaceTensor*>& tensors,
                                  DType dtype) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors.size());
  for (const HuggingFaceTensor* tensor : tensors) {
    entries.push_back({.name = tensor->name, .dtype = dtype, .shape = tensor->shape});
  }
  const std::string start = encode_safetensors_header(entries, {{"format", "pt"}});
  return {name, start.substr(8), parse_safetensors_header(as_bytes(start), kAnyFileBytes, name)};
}

bool has_weights(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(joined(folder, kHuggingFaceFileName), ignored) ||
         fs::exists(joined(folder, kHuggingFaceIndexName), ignored);
}

}  // namespace

HuggingFaceLayout make_huggingface_layout(const std::vector<HuggingFaceTensor>& tensors, DType dtype,
                                          int64_t max_file_bytes, int64_t num_parameters) {
  auto files = split_into_files(tensors, dtype, max_file_bytes);
  HuggingFaceLayout layout;
  int64_t total_bytes = 0;
  json weight_map;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = files.size() == 1
                                 ? kHuggingFaceFileName
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    std::sort(files[i].begin(), files[i].end(), precedes);
    for (const HuggingFaceTensor* tensor : files[i]) {
      weight_map[tensor->name] = name;
      total_bytes += num_bytes_of(dtype, tensor->shape);
    }
    layout.files.push_back(make_file(name, files[i], dtype));
  }
  if (files.size() > 1) {
    const json index = {{"metadata", {{"total_parameters", num_parameters}, {"total_size", total_bytes}}},
                        {"weight_map", weight_map}};
    layout.index_text = index.dump(2) + "\n";
  }
  return layout;
}

json encode_layout(const HuggingFaceLayout& layout) {
  json files = json::array();
  for (const HuggingFaceLayout::File& file : layout.files) {
    files.push_back({{"name", file.name}, {"header", file.header_text}});
  }
  return {{"files", files}, {"index", layout.index_text}};
}

HuggingFaceLayout parse_layout(const json& state, const std::string& where) {
  try {
    HuggingFaceLayout layout;
    layout.index_text = state.at("index").get<std::string>();
    for (const json& file : state.at("files")) {
      HuggingFaceLayout::File parsed{file.at("name").get<std::string>(), file.at("header").get<std::string>(), {}};
      check_file_name(parsed.name, where);
      parsed.header =
          parse_safetensors_header(as_bytes(with_header_length(parsed.header_text)), kAnyFileBytes, where);
      layout.files.push_back(std::move(parsed));
    }
    return layout;
  } catch (const json::exception& e) {
    throw_bad_input("{}: its record of the imported files was not written by Parka: {}", where, e.what());
  }
}

HuggingFaceWeights open_huggingface_weights(const std::string& folder) {
  if (!has_weights(folder)) {
    throw_bad_input("{}: has no {} or {}; other files of weights (pytorch_model.bin) are not read", folder,
                    kHuggingFaceFileName, kHuggingFaceIndexName);
  }
  HuggingFaceWeights weights;
  std::error_code ignored;
  if (fs::exists(joined(folder, kHuggingFaceFileName), ignored)) {  // preferred by transformers, too
    open_file(folder, kHuggingFaceFileName, weights);
    return weights;
  }
  const std::string where = joined(folder, kHuggingFaceIndexName);
  weights.layout.index_text = read_text(where, kMaxIndexBytes);
  const std::map<std::string, std::string> index = parse_index(weights.layout.index_text, where);
  std::set<std::string> names;
  for (const auto& [tensor, file] : index) names.insert(file);
  for (const std::string& name : names) open_file(folder, name, weights);
  check_index(index, weights, where);
  return weights;
}

void name_tied_embedding(HuggingFaceWeights& weights, const std::string& embedding, const std::string& head) {
  if (weights.tensors.contains(embedding) || !weights.tensors.contains(head)) return;
  auto place = weights.tensors.extract(head);
  place.key() = place.mapped().entry.name = embedding;
  weights.tensors.insert(std::move(place));
}

void check_huggingface_weights(const HuggingFaceWeights& weights, const std::vector<HuggingFaceTensor>& tensors,
                               std::string_view head, const std::string& folder) {
  std::set<std::string_view> names;
  const auto check = [&](const HuggingFaceTensor& tensor, const SafetensorsEntry& entry, const std::string& path) {
    if (entry.shape != tensor.shape) {
      throw_bad_input("{}: {} is [{}], {} wants [{}]", path, entry.name, fmt::join(entry.shape, ", "),
                      kHuggingFaceConfigName, fmt::join(tensor.shape, ", "));
    }
    if (!is_plain_float(entry.dtype)) {
      throw_bad_input("{}: {} is in {}; F32, BF16 and F16 are read", path, entry.name, name_of(entry.dtype));
    }
    names.insert(entry.name);
  };
  for (const HuggingFaceTensor& tensor : tensors) {
    const auto found = weights.tensors.find(tensor.name);
    if (found == weights.tensors.end()) refuse_missing(folder, tensor.name, names_in(weights.tensors));
    check(tensor, found->second.entry, weights.files[found->second.file].path());
  }
  for (const auto& [name, place] : weights.tensors) {
    if (names.contains(name)) continue;
    const std::string& path = weights.files[place.file].path();
    if (name != head) {
      throw_bad_input("{}: has a tensor {} that this architecture does not have", path, printable(name));
    }
    check(embedding_of(tensors), place.entry, path);  // tied: compared with the embedding where that is copied
  }
}

}  // namespace parka
