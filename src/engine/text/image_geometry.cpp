#include "engine/text/image_geometry.h"

#include <algorithm>
#include <cmath>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/config/data_description.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/llava_config.h"
#include "engine/text/helper_process.h"
#include "engine/text/tokenizer_files.h"
#include "model/vision/image_embedding.h"

namespace parka {
namespace {

// The member of that name; null where `object` is none or has it not.
json member(const json& object, const char* name) {
  return object.is_object() && object.contains(name) ? object.at(name) : json();
}

// True if they are numbers, and others than the model's.
bool differ(const json& of_data, const std::vector<double>& of_model) {
  constexpr double kRoundingError = 1e-6;
  if (!of_data.is_array() || of_data.size() != of_model.size()) return false;
  for (size_t i = 0; i < of_model.size(); ++i) {
    if (!of_data[i].is_number()) return false;
    if (std::abs(of_data[i].get<double>() - of_model[i]) > kRoundingError) return true;
  }
  return false;
}

// Null where it is not there, or no JSON.
json read_processor(const fs::path& path) {
  constexpr int64_t kMaxBytes = int64_t{1} << 30;
  if (!file_exists(path.string())) return nullptr;
  return parse_json_if_valid(read_text(path.string(), kMaxBytes));
}

// "crop", "pad" or "stretch": that of preprocessor_config.json or processor_config.json in the folder, as
// scripts/image_data/processor.py reads them; nullopt where there is none.
std::optional<std::string> geometry_in(const fs::path& folder) {
  for (const char* name : {kPreprocessorName, kProcessorName}) {
    const json file = read_processor(folder / name);
    const json& processor = image_processor_in(file);
    const json size = member(processor, "size");
    if (!size.is_object()) continue;
    if (member(processor, "do_pad") == true) return "pad";
    if (member(processor, "do_center_crop") == true && size.contains("shortest_edge")) return "crop";
    if (size.contains("height") && size.contains("width")) return "stretch";
  }
  return std::nullopt;
}

// The folder beside the data that has a processor; empty where there is none.
fs::path processor_beside(const std::vector<std::string>& sources) {
  for (const std::string& source : sources) {
    const fs::path folder = fs::path(expand_source(source).front()).parent_path() / kTokenizerFolder;
    if (file_exists((folder / kPreprocessorName).string())) return folder;
  }
  return {};
}

// Warns about a file whose data.json says `images`; `own` is the geometry of the model.
void warn_of_pictures(const std::string& file, const json& images, const std::string& own,
                      const TowerConfig& tower) {
  if (member(images, "count") == 0) return;  // conversations without pictures
  if (const json geometry = member(images, "geometry"); geometry.is_string() && geometry != own) {
    const auto made = geometry.get<std::string>();
    log_warning(
        "the pictures of {} were made with --geometry {}, and the model's processor says {}; give --geometry {} to parka "
        "generate and parka prepare-eval, too: an export says {}",
        file, made, own, made, own);
  }
  for (const auto& [name, of_model] :
       {std::pair("mean", &tower.pixel_mean), std::pair("deviation", &tower.pixel_deviation)}) {
    const json of_data = member(images, name);
    if (!differ(of_data, *of_model)) continue;
    log_warning("the pictures of {} were made for pixels of {} {}, and model.vision.pixel_{} is {}; set that", file,
                name, of_data.dump(), name, json(*of_model).dump());
  }
}

constexpr std::string_view kPlaceholder = "<image>";

// The texts between images.
std::vector<std::string> pieces_of(const std::string& text) {
  std::vector<std::string> pieces;
  size_t begin = 0;
  for (size_t at = 0; (at = text.find(kPlaceholder, begin)) != std::string::npos;
       begin = at + kPlaceholder.size()) {
    pieces.push_back(text.substr(begin, at - begin));
  }
  pieces.push_back(text.substr(begin));
  return pieces;
}

std::vector<std::string> helper_arguments(const std::string& geometry, const std::string& processor,
                                          const TowerConfig& tower) {
  std::vector<std::string> arguments = {"--tower", tower.kind == TowerKind::kClip ? "clip" : "siglip",
                                        "--size",  fmt::format("{}", tower.image_size),
                                        "--mean",  fmt::format("{}", fmt::join(tower.pixel_mean, ","))};
  if (!geometry.empty()) arguments.insert(arguments.end(), {"--geometry", geometry});
  if (!processor.empty()) arguments.insert(arguments.end(), {"--processor", processor});
  return arguments;
}

std::vector<uint8_t> read_pixels(const std::vector<std::string>& paths, const std::vector<std::string>& arguments,
                                 int64_t bytes_of_image) {
  PythonHelper helper("image_helper.py", arguments);
  helper.receive();  // its geometry
  std::vector<uint8_t> pixels;
  for (const std::string& path : paths) {
    const auto one = helper.ask({{"image", path}}).at("pixels").get<std::vector<uint8_t>>();
    if (static_cast<int64_t>(one.size()) != bytes_of_image) {
      throw_io("image_helper.py: {} bytes of pixels, not {}", one.size(), bytes_of_image);
    }
    pixels.insert(pixels.end(), one.begin(), one.end());
  }
  return pixels;
}

}  // namespace

std::map<std::string, std::string> processor_of_data(const Config& config,
                                                     const std::optional<std::string>& of_model) {
  if (!config.model.vision.exists()) return {};
  const fs::path beside = processor_beside(config.data.train);
  const std::optional<std::string> made = beside.empty() ? std::nullopt : geometry_in(beside);
  if (!made || (of_model && geometry_in(*of_model) == made)) return {};
  const std::string path = (beside / kPreprocessorName).string();
  json processor = read_processor(path);
  // Mean and deviation of the script's --tower are in no saved pixel; the weights have learned from the run's.
  processor["image_mean"] = config.model.vision.tower.pixel_mean;
  processor["image_std"] = config.model.vision.tower.pixel_deviation;
  std::map<std::string, std::string> files = {{kPreprocessorName, processor.dump(2) + "\n"}};
  // transformers would take the model's processor where it is nested in this file.
  if (json nesting = of_model ? read_processor(fs::path(*of_model) / kProcessorName) : json();
      nesting.is_object() && nesting.erase(kNestedProcessorKey) > 0) {
    files[kProcessorName] = nesting.dump(2) + "\n";
  }
  log_info("{}: goes with the run, whose pictures were made so", path);
  return files;
}

void warn_of_image_geometry(const Config& config) {
  if (!config.model.vision.exists()) return;
  const TowerConfig& tower = config.model.vision.tower;
  const char* usual = tower.kind == TowerKind::kSiglip ? "stretch" : "crop";
  const std::string own = geometry_in(fs::path(config.checkpoint.folder) / kTokenizerFolder).value_or(usual);
  for_each_description(config.data.train, [&](const std::string& file, const json& description) {
    warn_of_pictures(file, member(description, "images"), own, tower);
  });
}

ImagePrompt make_image_prompt(const std::string& text, const std::vector<std::string>& paths,
                              const std::string& geometry, const std::string& processor, const VisionConfig& vision,
                              TextCodec& codec) {
  std::vector<std::string> pieces = pieces_of(text);
  if (pieces.size() == 1) {
    std::string in_front;
    for (size_t i = 0; i < paths.size(); ++i) in_front += fmt::format("{}\n", kPlaceholder);
    pieces = pieces_of(in_front + text);
  }
  if (pieces.size() - 1 != paths.size()) {
    throw_bad_input("--prompt has {} {}, and there are {} --image; make them as many, or leave {} out",
                    pieces.size() - 1, kPlaceholder, paths.size(), kPlaceholder);
  }
  const std::vector<std::vector<int32_t>> ids = codec.encode_pieces(pieces);
  ImagePrompt prompt;
  prompt.images.num_slots = ImageEmbedding::num_slots(vision);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (std::ranges::count(ids[i], vision.image_token) > 0) {
      throw_bad_input("--prompt: its text has the token {}, which marks images; write it otherwise",
                      vision.image_token);
    }
    if (i > 0) {
      prompt.images.first_slots.push_back(static_cast<int64_t>(prompt.tokens.size()));
      prompt.tokens.insert(prompt.tokens.end(), static_cast<size_t>(prompt.images.num_slots),
                           static_cast<int32_t>(vision.image_token));
    }
    prompt.tokens.insert(prompt.tokens.end(), ids[i].begin(), ids[i].end());
  }
  const int64_t size = vision.tower.image_size;
  prompt.images.pixels = read_pixels(paths, helper_arguments(geometry, processor, vision.tower), 3 * size * size);
  return prompt;
}

}  // namespace parka
