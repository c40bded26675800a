#include "engine/checkpoint/saved_state.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/ranges.h>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

JsonReader state_of(const json& state, const std::string& path) { return {state, path + ": its state"}; }
JsonReader state_of(const LoadedCheckpoint& checkpoint) { return state_of(checkpoint.state(), checkpoint.path()); }

// True if file_differences() can compare with it.
bool is_file(const json& file) {
  return file.is_object() && file.contains("name") && file.contains("bytes") && file.contains("fingerprint");
}

// A step applies at most one update, reads one global batch, and goes through no more than one epoch.
void check_progress(const LoadedCheckpoint& checkpoint, const SavedProgress& progress) {
  const int64_t step = checkpoint.step(), batch = config_of(checkpoint).training.global_batch_size;
  const auto [epoch, consumed] = progress.position;
  if (progress.applied_steps <= step && progress.skipped_in_a_row <= step - progress.applied_steps &&
      consumed % batch == 0 && epoch <= step && consumed / batch <= step - epoch) {
    return;
  }
  throw_bad_input(
      "{}: its state says {} steps with batches of {} sequences, {} updates, {} steps skipped since, sequence {} of "
      "epoch {}: these contradict each other; resume from an earlier checkpoint (move this one away)",
      checkpoint.path(), step, batch, progress.applied_steps, progress.skipped_in_a_row, consumed, epoch);
}

double last_norm(const LoadedCheckpoint& checkpoint) {
  const auto found = checkpoint.state().find("last_norm");
  if (found == checkpoint.state().end()) return 0;
  const double norm = found->is_number() ? found->get<double>() : -1;
  if (norm >= 0 && std::isfinite(norm)) return norm;
  throw_bad_input("{}: \"last_norm\" in its state is not a norm of gradients", checkpoint.path());
}

std::vector<SpikeGuard::Step> recent_steps(const LoadedCheckpoint& checkpoint) {
  std::vector<SpikeGuard::Step> steps;
  const auto found = checkpoint.state().find("recent_steps");
  if (found == checkpoint.state().end()) return steps;
  const auto is_step = [](const json& entry) {
    return entry.is_array() && entry.size() == 2 && entry[0].is_number() && entry[1].is_number();
  };
  if (!found->is_array() || !std::ranges::all_of(*found, is_step)) {
    throw_bad_input("{}: \"recent_steps\" in its state is not a list of losses and gradient norms",
                    checkpoint.path());
  }
  for (const json& entry : *found) steps.push_back({entry[0].get<double>(), entry[1].get<double>()});
  return steps;
}

// The value of an enum that `section` has under `key`; `otherwise` where there is none, or one that is unknown.
template <typename Enum>
Enum enum_in(const json& section, const char* key, Enum otherwise) {
  for (const auto& [value, name] : EnumNames<Enum>::kAll) {
    if (section.contains(key) && section.at(key) == json(name)) return value;
  }
  return otherwise;
}

// Earlier versions did not refuse keys without meaning beside a fine-tuning method, and ignored them.
json without_unused_keys(json config) {
  if (!config.is_object() || !config.contains("finetune") || !config["finetune"].is_object()) return config;
  const json given = config["finetune"];
  const FinetuneConfig defaults;
  const FinetuneMethod method = enum_in(given, "method", defaults.method);
  const Downsampling downsample = enum_in(given, "downsample", defaults.downsample);
  for (const auto& item : given.items()) {
    if (!is_used_by(method, downsample, item.key())) config["finetune"].erase(item.key());
  }
  return config;
}

// Recipes may set keys of precision that a run's version did not have: it computed without them.
json with_values_of_its_version(json config) {
  if (!config.is_object() || !config.contains("precision")) return config;
  json& precision = config["precision"];
  // Every version writes all of its keys; what was written by hand means today's recipe.
  if (!precision.is_object() || !precision.contains("gemm")) return config;
  const json defaults = to_json(Config());
  for (const auto& [key, value] : defaults.at("precision").items()) precision.emplace(key, value);
  return config;
}

json saved_config(const json& state, const std::string& path) {
  json config = without_removed_keys(state_of(state, path).member("config"));
  return with_values_of_its_version(without_unused_keys(std::move(config)));
}

}  // namespace

Config config_of(const json& state, const std::string& path) {
  return override_config(saved_config(state, path), {}, path);
}

Config config_of(const LoadedCheckpoint& checkpoint) { return config_of(checkpoint.state(), checkpoint.path()); }

Config inference_config_of(const LoadedCheckpoint& checkpoint, const std::vector<std::string>& overrides) {
  json undivided = saved_config(checkpoint.state(), checkpoint.path());
  const Config saved = override_config(undivided, {}, checkpoint.path());
  undivided.erase("distributed");
  if (undivided.contains("precision")) undivided["precision"].erase("offload_weights");
  Config config = override_config(undivided, overrides, checkpoint.path());
  const std::vector<std::string> differences = weight_differences(saved, config);
  if (differences.empty()) return config;
  throw_bad_input("{}: its weights are of another model than the overrides ask for: {}", checkpoint.path(),
                  fmt::join(differences, "; "));
}

int64_t max_positions_of(const LoadedCheckpoint& checkpoint, int64_t otherwise) {
  if (!checkpoint.state().contains(kMaxPositionsKey)) return otherwise;
  return state_of(checkpoint).integer(kMaxPositionsKey);
}

SavedProgress read_progress(const LoadedCheckpoint& checkpoint) {
  if (!checkpoint.state().contains("data")) {
    throw_bad_input(
        "{}: is an imported model, which has weights but no run to resume; start one with checkpoint.init_from",
        checkpoint.path());
  }
  const json& data = checkpoint.state().at("data");
  const JsonReader state = state_of(checkpoint), position(data, state.where() + ": \"data\"");
  SavedProgress progress;
  progress.applied_steps = state.integer("applied_steps");
  if (state.has("skipped_in_a_row")) progress.skipped_in_a_row = state.integer("skipped_in_a_row");
  progress.position = {position.integer("epoch"), position.integer("consumed")};
  const json& fingerprint = position.member("fingerprint");
  if (!fingerprint.is_number_unsigned()) {
    throw_bad_input("{}: \"fingerprint\" in its state is not a fingerprint", checkpoint.path());
  }
  progress.fingerprint = fingerprint.get<uint64_t>();
  check_progress(checkpoint, progress);
  progress.last_norm = last_norm(checkpoint);
  progress.recent_steps = recent_steps(checkpoint);
  progress.source_sequences = data.value("source_sequences", json());
  if (!data.contains("files")) return progress;
  progress.files = data.at("files");
  if (!progress.files.is_array() || !std::ranges::all_of(progress.files, is_file)) {
    throw_bad_input("{}: \"files\" in its state does not describe token files", checkpoint.path());
  }
  return progress;
}

}  // namespace parka
