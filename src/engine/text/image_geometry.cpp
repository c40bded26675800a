#include "engine/text/image_geometry.h"

#include <cmath>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The member of that name; null where `object` is none or has it not.
json member(const json& object, const char* name) {
  return object.is_object() && object.contains(name) ? object.at(name) : json();
}

// Where they are numbers, and others than the model's.
bool differ(const json& of_data, const std::vector<double>& of_model) {
  constexpr double kRoundingError = 1e-6;
  if (!of_data.is_array() || of_data.size() != of_model.size()) return false;
  for (size_t i = 0; i < of_model.size(); ++i) {
    if (!of_data[i].is_number()) return false;
    if (std::abs(of_data[i].get<double>() - of_model[i]) > kRoundingError) return true;
  }
  return false;
}

// "crop", "pad" or "stretch": that of preprocessor_config.json or processor_config.json in the folder, as
// scripts/image_data/processor.py reads them, or else with which towers of that kind are trained.
std::string image_geometry(const fs::path& folder, TowerKind kind) {
  constexpr int64_t kMaxBytes = int64_t{1} << 30;
  for (const char* name : {"preprocessor_config.json", "processor_config.json"}) {
    const std::string path = (folder / name).string();
    if (!file_exists(path)) continue;
    json processor = json::parse(read_text(path, kMaxBytes), nullptr, /*allow_exceptions=*/false);
    if (const json nested = member(processor, "image_processor"); nested.is_object()) processor = nested;
    const json size = member(processor, "size");
    if (!size.is_object()) continue;
    if (member(processor, "do_pad") == true) return "pad";
    if (member(processor, "do_center_crop") == true && size.contains("shortest_edge")) return "crop";
    if (size.contains("height") && size.contains("width")) return "stretch";
  }
  return kind == TowerKind::kSiglip ? "stretch" : "crop";
}

}  // namespace

void warn_of_image_geometry(const Config& config) {
  if (!config.model.vision.exists()) return;
  const TowerConfig& tower = config.model.vision.tower;
  const std::string own = image_geometry(fs::path(config.checkpoint.folder) / kTokenizerFolder, tower.kind);
  for (const std::string& source : config.data.train) {
    const std::string file = expand_source(source).front();
    const json images = member(description_of(file), "images");
    if (const json geometry = member(images, "geometry"); geometry.is_string() && geometry != own) {
      const auto made = geometry.get<std::string>();
      log_warning(
          "the pictures of {} were made with --geometry {}, and the model's processor says {}; give --geometry {} to parka "
          "generate and scripts/prepare_eval.py, too: an export says {}",
          file, made, own, made, own);
    }
    for (const auto& [name, of_model] :
         {std::pair("mean", &tower.pixel_mean), std::pair("deviation", &tower.pixel_deviation)}) {
      const json of_data = member(images, name);
      if (!differ(of_data, *of_model)) continue;
      log_warning("the pictures of {} were made for pixels of {} {}, and model.vision.pixel_{} is {}; set that",
                  file, name, of_data.dump(), name, json(*of_model).dump());
    }
  }
}

}  // namespace parka
