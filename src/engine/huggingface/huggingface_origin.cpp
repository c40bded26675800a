#include "engine/huggingface/huggingface_origin.h"

#include <algorithm>
#include <array>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_base.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/config/config_io.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/config_reader.h"
#include "engine/huggingface/llava_config.h"

namespace parka {
namespace {

constexpr std::array<std::string_view, 18> kCarriedFiles = {"added_tokens.json",
                                                            "chat_template.jinja",
                                                            "chat_template.json",
                                                            "generation_config.json",
                                                            "merges.txt",
                                                            kPreprocessorName,
                                                            kProcessorName,
                                                            "sentencepiece.bpe.model",
                                                            "special_tokens_map.json",
                                                            "spiece.model",
                                                            "tekken.json",
                                                            "tiktoken.model",
                                                            "tokenizer.json",
                                                            "tokenizer.model",
                                                            "tokenizer.model.v3",
                                                            "tokenizer_config.json",
                                                            "vocab.json",
                                                            "vocab.txt"};

// checkpoint.init_from in the config of a checkpoint's state; empty where there is none.
std::string init_from_of(const json& state) {
  const json::json_pointer place("/config/checkpoint/init_from");
  return state.contains(place) && state.at(place).is_string() ? state.at(place).get<std::string>() : std::string();
}

// The model or run that the checkpoint in folder `at` comes from. A name may mean another model today, or in
// another folder than that in which it was given: the base of adapters is found by its checksum.
std::string source_of(const std::string& at, const json& state) {
  const std::string base = find_base(at, state);
  return base.empty() ? init_from_of(state) : base;
}

// encode_formats() in a run's copy, and HuggingFaceOrigin::max_positions.
constexpr const char *kFormatsName = "layout.json", *kMaxPositionsName = "max_positions.json";

std::optional<int64_t> max_positions_in(const json& object, const std::string& where) {
  if (!object.contains(kMaxPositionsKey)) return std::nullopt;
  return ConfigReader(object, where).integer(kMaxPositionsKey);
}

// The origin that a run has kept; nullopt for a run without.
std::optional<HuggingFaceOrigin> kept_origin(const std::string& run_folder) {
  constexpr int64_t kMostFormatsBytes = int64_t{64} << 20;
  const fs::path folder = fs::path(run_folder) / kHuggingFaceFolder;
  if (!file_exists(folder / kHuggingFaceConfigName)) return std::nullopt;
  HuggingFaceOrigin origin{folder.string()};
  if (const std::string path = folder / kFormatsName; file_exists(path)) {
    origin.formats =
        parse_formats(parse_json_text(read_text(path, kMostFormatsBytes), path, JsonComments::kRefused), path);
  }
  if (const std::string path = folder / kMaxPositionsName; file_exists(path)) {
    const std::string text = read_text(path, kMaxHuggingFaceConfigBytes);
    origin.max_positions = max_positions_in(parse_json_text(text, path, JsonComments::kRefused), path);
  }
  return origin;
}

void copy_origin(const HuggingFaceOrigin& origin, const std::string& copy) {
  remove_tree(copy + ".tmp");  // of a start that was killed
  DraftFolder draft(copy);
  std::vector<std::string> names = carried_files(origin.folder);
  names.emplace_back(kHuggingFaceConfigName);
  for (const std::string& name : names) copy_to_new_file((fs::path(origin.folder) / name).string(), draft / name);
  if (!origin.formats.empty()) {
    write_new_file(draft / kFormatsName, encode_formats(origin.formats).dump() + "\n");
  }
  if (origin.max_positions) {
    write_new_file(draft / kMaxPositionsName, json{{kMaxPositionsKey, *origin.max_positions}}.dump() + "\n");
  }
  draft.publish();
}

}  // namespace

std::vector<std::string> carried_files(const std::string& folder) {
  std::vector<std::string> names;
  for (const std::string_view name : kCarriedFiles) {
    std::error_code ignored;
    if (fs::is_regular_file(fs::path(folder) / name, ignored)) names.emplace_back(name);
  }
  return names;
}

std::string checkpoint_at(const std::string& path) {
  if (file_exists(fs::path(path) / kManifestName)) return path;
  if (!file_exists(path)) return {};
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(path);
  return checkpoints.empty() ? std::string() : checkpoints.front().path;
}

std::string follow_sources(const std::string& path, const json& state,
                           const std::function<bool(const std::string& path, const json& state)>& visit) {
  constexpr int kLongestChain = 32;  // a chain that is longer goes round
  std::string at = path;
  json here = state;
  for (int link = 0; link < kLongestChain && !visit(at, here); ++link) {
    const std::string source = source_of(at, here);
    if (source.empty()) return {};
    at = checkpoint_at(source);
    if (at.empty()) return source;
    here = read_manifest_alone(at).state;
  }
  return {};
}

std::optional<HuggingFaceOrigin> find_origin(const std::string& path, const json& state,
                                             const std::function<void(const std::string& gone)>& report) {
  std::optional<HuggingFaceOrigin> origin;
  const std::string gone = follow_sources(path, state, [&](const std::string& at, const json& here) {
    const auto formats = here.find(kFormatsKey);
    if (formats == here.end()) {
      if (const std::string run = run_folder_of(at); !run.empty()) origin = kept_origin(run);
      return origin.has_value();
    }
    origin = HuggingFaceOrigin{(fs::path(at) / kHuggingFaceFolder).string(), {}, max_positions_in(here, at)};
    if (!formats->is_null()) origin->formats = parse_formats(*formats, at);
    return true;
  });
  if (!gone.empty()) report(gone);
  return origin;
}

void check_start(const Config& config) {
  const std::string path = checkpoint_at(config.checkpoint.init_from);
  if (path.empty() || !list_checkpoints(config.checkpoint.folder).empty()) return;
  const json state = read_manifest_alone(path).state;
  const Config saved = config_of(state, path);
  const ModelConfig &before = saved.model, &now = config.model;
  if (const auto refused = model_differences(before, now).refused; !refused.empty()) {
    throw_bad_input("{}: checkpoint.init_from has the weights of another model: {}; change the config's model",
                    path, fmt::join(refused, "; "));
  }
  const auto origin = find_origin(path, state, [](const std::string&) {});
  const RopeScalingConfig& scaling = now.rope_scaling;
  int64_t positions = std::max(saved.data.sequence_length, origin ? origin->max_positions.value_or(0) : 0);
  if (scaling.kind == RopeScalingKind::kYarn)
    positions =
        std::max(positions, static_cast<int64_t>(scaling.factor * static_cast<double>(scaling.original_length)));
  const bool is_changed = before.rope_theta != now.rope_theta || before.rope_scaling != scaling;
  if (is_changed || config.data.sequence_length <= positions) return;
  log_warning(
      "data.sequence_length = {} is more than the {} positions (max_position_embeddings) of checkpoint.init_from = {}, "
      "with the same model.rope_theta and model.rope_scaling: it has to learn the others",
      config.data.sequence_length, positions, path);
}

void keep_origin(const std::string& run_folder, const std::string& init_from) {
  const std::string copy = (fs::path(run_folder) / kHuggingFaceFolder).string();
  if (init_from.empty() || file_exists(copy)) return;
  try {
    const std::string source = checkpoint_at(init_from);
    if (source.empty()) return;  // of a run that has begun
    const auto origin = find_origin(source, read_manifest_alone(source).state, [](const std::string&) {});
    if (!origin) return;
    copy_origin(*origin, copy);
    log_info("{}: a copy of what came with the imported model in {}", copy, origin->folder);
  } catch (const Error& error) {
    log_warning("what came with the imported model is not kept with the run: {}", error.what());
  }
}

}  // namespace parka
