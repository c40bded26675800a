#include "engine/huggingface/huggingface_weights.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/value_check.h"

namespace parka {
namespace {

constexpr int64_t kMaxIndexBytes = 64 << 20;

std::string joined(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / name).string();
}

std::string file_name(const InputFile& file) { return fs::path(file.path()).filename().string(); }

// A name that an index gives must be one of a file in the model's own folder.
void check_file_name(const std::string& name, const std::string& where) {
  if (name.ends_with(".safetensors") && name.find('/') == std::string::npos &&
      std::ranges::none_of(name, is_control)) {
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
  for (const SafetensorsEntry& entry : read_safetensors_header(file).tensors) {
    if (is_ignored_huggingface_tensor(entry.name)) continue;
    const auto [first, is_new] =
        weights.tensors.try_emplace(entry.name, HuggingFaceWeights::Place{weights.files.size(), entry});
    if (!is_new) {
      throw_bad_input("{}: tensor {} is in {} too", file.path(), printable(entry.name),
                      weights.files[first->second.file].path());
    }
  }
  weights.files.push_back(std::move(file));
}

void check_index(const std::map<std::string, std::string>& index, const HuggingFaceWeights& weights,
                 const std::string& where) {
  for (const auto& [tensor, file] : index) {
    if (is_ignored_huggingface_tensor(tensor)) continue;
    const auto found = weights.tensors.find(tensor);
    if (found == weights.tensors.end() || file_name(weights.files[found->second.file]) != file) {
      throw_bad_input("{}: says that {} has the tensor {}, but it has not", where, file, printable(tensor));
    }
  }
}

// The tensors of each file, by the rule of huggingface_hub's split_torch_state_dict_into_shards.
std::vector<std::vector<size_t>> split_into_files(const std::vector<SafetensorsEntry>& tensors,
                                                  int64_t max_file_bytes) {
  std::vector<std::vector<size_t>> files;
  std::vector<size_t> current;
  int64_t filled = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = num_bytes_of(tensors[i].dtype, tensors[i].shape);
    if (bytes > max_file_bytes) {  // a file of its own, before the one that is being filled
      files.push_back({i});
      continue;
    }
    if (filled + bytes > max_file_bytes) {
      files.push_back(std::exchange(current, {}));
      filled = 0;
    }
    current.push_back(i);
    filled += bytes;
  }
  if (!current.empty()) files.push_back(std::move(current));
  return files;
}

bool has_weights(const std::string& folder) {
  return file_exists(joined(folder, kHuggingFaceFileName)) || file_exists(joined(folder, kHuggingFaceIndexName));
}

}  // namespace

json encode_formats(const TensorFormats& formats) {
  json record = json::object();
  for (const auto& [name, dtype] : formats) record[name] = format_name(dtype);
  return record;
}

TensorFormats parse_formats(const json& record, const std::string& where) {
  TensorFormats formats;
  const auto add = [&](const json& tensors) {
    for (const auto& [name, value] : tensors.items()) {
      const json format = value.is_object() ? value.value("dtype", json()) : value;
      if (const auto dtype = parse_format_name(format.is_string() ? format.get<std::string>() : "")) {
        formats.emplace(name, *dtype);
      }
    }
  };
  try {
    if (!record.contains("files")) {
      add(record);
    } else {  // of an earlier version, which kept the headers of the files
      for (const json& file : record.at("files")) {
        add(parse_json_text(file.at("header").get_ref<const std::string&>(), where, JsonComments::kRefused));
      }
    }
    return formats;
  } catch (const json::exception& e) {
    throw_bad_input("{}: its record of the imported files was not written by Parka: {}", where, e.what());
  }
}

size_t write_huggingface_weights(const std::string& folder, const std::vector<SafetensorsEntry>& tensors,
                                 int64_t max_file_bytes,
                                 const std::function<void(size_t tensor, OutputFile& file)>& write) {
  auto files = split_into_files(tensors, max_file_bytes);
  int64_t total_bytes = 0, num_parameters = 0;
  json weight_map;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = files.size() == 1
                                 ? kHuggingFaceFileName
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    // The order of the safetensors library.
    std::sort(files[i].begin(), files[i].end(), [&](size_t a, size_t b) {
      return std::pair(-size_of(tensors[a].dtype), tensors[a].name) <
             std::pair(-size_of(tensors[b].dtype), tensors[b].name);
    });
    std::vector<SafetensorsEntry> entries;
    for (const size_t tensor : files[i]) entries.push_back(tensors[tensor]);
    OutputFile file(joined(folder, name));
    file.write(as_bytes(encode_safetensors_header(entries, {{"format", "pt"}})));
    for (const size_t tensor : files[i]) write(tensor, file);
    file.sync_and_close();
    for (const SafetensorsEntry& entry : entries) {
      weight_map[entry.name] = name;
      total_bytes += num_bytes_of(entry.dtype, entry.shape);
      num_parameters += num_elements_of(entry.shape);
    }
  }
  if (files.size() > 1) {
    const json index = {{"metadata", {{"total_parameters", num_parameters}, {"total_size", total_bytes}}},
                        {"weight_map", weight_map}};
    write_new_file(joined(folder, kHuggingFaceIndexName), index.dump(2) + "\n");
  }
  return files.size();
}

HuggingFaceWeights open_huggingface_weights(const std::string& folder) {
  if (!has_weights(folder)) {
    throw_bad_input("{}: has no {} or {}; other files of weights (pytorch_model.bin) are not read", folder,
                    kHuggingFaceFileName, kHuggingFaceIndexName);
  }
  HuggingFaceWeights weights;
  const std::string where = joined(folder, kHuggingFaceIndexName);
  const bool has_one_file = file_exists(joined(folder, kHuggingFaceFileName));
  if (has_one_file) open_file(folder, kHuggingFaceFileName, weights);
  if (has_one_file && !file_exists(where)) return weights;
  const std::map<std::string, std::string> index = parse_index(read_text(where, kMaxIndexBytes), where);
  std::set<std::string> names;
  for (const auto& [tensor, file] : index) names.insert(file);
  if (has_one_file && !names.contains(kHuggingFaceFileName)) {
    throw_bad_input(
        "{}: has {} and the files of {}, which are two sets of weights: remove those that are not meant", folder,
        kHuggingFaceFileName, kHuggingFaceIndexName);
  }
  for (const std::string& name : names) {
    if (!has_one_file || name != kHuggingFaceFileName) open_file(folder, name, weights);
  }
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
