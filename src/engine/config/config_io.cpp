#include "engine/config/config_io.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/config/config_table.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

constexpr std::string_view kCommandLine = "command line";
constexpr std::string_view kSchemaKey = "$schema";  // for editors

// A key of earlier versions. Its effect with this value is now always there, so a config may still say it.
struct RemovedKey {
  std::string_view path;
  std::string_view value;  // as JSON
  bool is_free = false;    // other values meant the same bits, so a checkpoint may have had any
};
constexpr RemovedKey kRemovedKeys[] = {
    {"data.prefetch_batches", "4", true},
    {"distributed.gathered_blocks", "2", true},
    {"finetune.side_head_dim", "0"},
    {"model.rope_scaling.beta_fast", "32.0"},
    {"model.rope_scaling.beta_slow", "1.0"},
    {"model.rope_scaling.high_frequency_factor", "4.0"},
    {"model.rope_scaling.low_frequency_factor", "1.0"},
    {"model.rope_scaling.truncate", "true"},
    {"optimizer.clip_warmup_factor", "10.0"},
    {"optimizer.exp_avg_format", R"("e4m3")"},
    {"optimizer.exp_avg_sq_format", R"("e4m3")"},
    {"precision.attention_output", R"("compute")"},
    {"precision.attention_scores", R"("compute")"},
    {"precision.fast_forward", "true"},
    {"precision.fast_input_gradient", "true"},
    {"precision.fast_weight_gradient", "false"},
    {"precision.weight_copies_blocks", "0", true},
    {"reliability.replica_interval", "100", true},
    {"telemetry.imbalance_limit", "0.01", true},
    {"training.max_skipped_steps", "10", true},
    {"training.spike_sigma", "6.0"},
};

const RemovedKey* find_removed(std::string_view path) {
  const auto key = std::ranges::find(kRemovedKeys, path, &RemovedKey::path);
  return key == std::end(kRemovedKeys) ? nullptr : key;
}

// A value that earlier versions, and so the configs of their runs, called otherwise.
const json& in_todays_words(std::string_view path, const json& value) {
  static const json fp32 = "fp32";
  return path == "optimizer.master" && value == "fp32_split" ? fp32 : value;
}

// 0.03 of "3%", which is allowed for the warm-up alone.
std::optional<double> share_of_steps(std::string_view path, const json& value) {
  if (path != "optimizer.schedule.warmup_steps" || !value.is_string()) return std::nullopt;
  const std::string text = value.get<std::string>();
  char* end = nullptr;
  const double percent = std::strtod(text.c_str(), &end);
  const bool is_share = end != text.c_str() && std::string_view(end) == "%" && percent >= 0 && percent <= 100;
  return is_share ? std::optional(percent / 100) : std::nullopt;
}

// The message about a key that does not exist: the nearest one that does, where being in another section counts
// half of a wrong letter, or a whole one beside others; or the keys of its section, if nothing is near.
std::string unknown_key(const ConfigTable& table, const std::string& path) {
  const std::string parent(section_of(path));
  if (table.find(parent) != nullptr)
    return fmt::format("{}: unknown key; {} is not a section", printable(path), parent);
  if (!parent.empty() && !table.has_section(parent)) return unknown_key(table, parent);

  const std::string_view key = key_of(path);
  if (key.find("epoch") != std::string_view::npos) {
    return fmt::format("{}: unknown key; give training.steps: a run says at its start how many an epoch has",
                       printable(path));
  }
  if (key.find("learning_rate") != std::string_view::npos) {
    return fmt::format("{}: unknown key; did you mean optimizer.lr?", printable(path));
  }
  std::string nearest, siblings;
  int smallest = 2 * plausible_distance(key) + 2;
  const auto consider = [&](const std::string& candidate) {
    const bool same_section = section_of(candidate) == parent;
    if (same_section) siblings += fmt::format(" {}", key_of(candidate));
    const int letters = name_distance(key, key_of(candidate));
    const int distance = 2 * letters + (same_section ? 0 : letters > 1 ? 2 : 1);
    if (distance >= smallest) return;
    smallest = distance;
    nearest = candidate;
  };
  for (const ConfigSection& section : table.sections) consider(section.path);
  for (const ConfigField& field : table.fields) consider(field.path);
  if (!nearest.empty()) return fmt::format("{}: unknown key; did you mean {}?", printable(path), nearest);
  return fmt::format("{}: unknown key; the keys are:{}", printable(path), siblings);
}

// Reads one JSON tree into a Config.
class ConfigReader {
 public:
  // Values of the keys in `overridden` came from the command line.
  ConfigReader(std::string_view source, std::set<std::string> overridden)
      : source_(source), overridden_(std::move(overridden)), table_(make_config_table(config_)) {}

  Config read(const json& root) {
    if (!root.is_object()) fail("expected an object of sections, got {}", describe_json(root));
    collect(root, "");
    if (!unknown_.empty()) fail("{}", describe_unknown());
    // The recipe first: what it sets must not undo a key that is given.
    for (const Given& given : given_) {
      if (given.field->path != "precision.recipe") continue;
      read_field(given);
      apply_recipe(config_.precision.recipe, config_);
    }
    for (const Given& given : given_) read_field(given);
    ScheduleConfig& schedule = config_.optimizer.schedule;
    const int64_t steps = schedule.total_steps > 0 ? schedule.total_steps : config_.training.steps;
    if (warmup_share_) schedule.warmup_steps = std::llround(*warmup_share_ * static_cast<double>(steps));
    try {
      validate(config_);
    } catch (const Error& error) {
      fail("{}", error.what());
    }
    return config_;
  }

 private:
  struct Given {
    const ConfigField* field;
    const json* value;
  };

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_bad_input("{}: {}", printable(source_), fmt::format(format, std::forward<Args>(args)...));
  }

  // Sorts the keys of `object` into given_ and unknown_.
  void collect(const json& object, const std::string& prefix) {
    for (const auto& [key, value] : object.items()) {
      const std::string path = prefix + key;
      if (path == kSchemaKey) {
        if (!value.is_string()) fail("{}: expected the path of a schema, got {}", path, describe_json(value));
      } else if (key.find('.') != std::string::npos) {
        fail("\"{}\": a key has no dots; write sections as objects, {{\"optimizer\": {{\"lr\": ...}}}}",
             printable(path));
      } else if (table_.has_section(path)) {
        if (!value.is_object()) fail("{}: expected an object, got {}", path, describe_json(value));
        collect(value, path + ".");
      } else if (const ConfigField* field = table_.find(path)) {
        given_.push_back({field, &in_todays_words(path, value)});
      } else if (const RemovedKey* removed = find_removed(path)) {
        if (value != json::parse(removed->value)) {
          fail(
              "{} = {} was removed: what {} meant is done always; remove the key, or go on with an earlier version",
              path, value.dump(), removed->value);
        }
      } else {
        unknown_.push_back(path);
      }
    }
  }

  std::string describe_unknown() const {
    constexpr size_t kMostNamed = 8;
    std::string line = unknown_key(table_, unknown_.front());
    for (size_t i = 1; i < std::min(unknown_.size(), kMostNamed); ++i) {
      line += fmt::format("{}{}", i == 1 ? " Also unknown: " : ", ", printable(unknown_[i]));
    }
    if (unknown_.size() > kMostNamed) line += fmt::format(" and {} more", unknown_.size() - kMostNamed);
    return line;
  }

  void read_field(const Given& given) {
    if (const auto share = share_of_steps(given.field->path, *given.value)) {
      warmup_share_ = share;
      return;
    }
    const std::string problem = set_field(*given.field, *given.value);
    if (problem.empty()) return;
    const std::string& path = given.field->path;
    throw_bad_input("{}: {}: {}", overridden_.contains(path) ? std::string(kCommandLine) : printable(source_), path,
                    problem);
  }

  std::string_view source_;
  std::set<std::string> overridden_;
  Config config_;
  ConfigTable table_;
  std::vector<Given> given_;
  std::vector<std::string> unknown_;  // paths
  std::optional<double> warmup_share_ = {};
};

// Adds what `object`, a part of a file, gives as overrides of another.
void add_overrides(const json& object, const std::string& prefix, const ConfigTable& table, const std::string& file,
                   std::vector<std::string>& overrides) {
  for (const auto& [key, value] : object.items()) {
    const std::string path = prefix + key;
    if (path == kSchemaKey) continue;
    if (table.has_section(path) && value.is_object()) {
      add_overrides(value, path + ".", table, file, overrides);
      continue;
    }
    const ConfigField* field = table.find(path);
    if (field == nullptr && find_removed(path) == nullptr) {
      throw_bad_input("{}: {}", printable(file), unknown_key(table, path));
    }
    const std::string problem = field == nullptr || share_of_steps(path, value) ? "" : set_field(*field, value);
    if (!problem.empty()) throw_bad_input("{}: {}: {}", printable(file), path, problem);
    overrides.push_back(fmt::format("{}={}", path, value.dump()));
  }
}

// The value of an override, as the JSON that a file would have held.
json override_value(const ConfigField* field, const std::string& text) {
  json value = parse_json_if_valid(text);
  const bool holds_text = field != nullptr && (std::holds_alternative<TextField>(field->target) ||
                                               std::holds_alternative<EnumField>(field->target));
  if (value.is_discarded() || (holds_text && !value.is_string())) return text;
  return value;
}

// Sets one key in the tree of a file; returns its path.
std::string apply_override(json& root, const ConfigTable& table, const std::string& assignment,
                           const std::string& source) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw_bad_input("{}: \"{}\" is not an override; write section.key=value", kCommandLine, printable(assignment));
  }
  const std::string path = assignment.substr(0, equals);
  if (table.has_section(path)) {
    throw_bad_input("{}: {} is a section; override its keys one by one, as in {}.<key>=value", kCommandLine, path,
                    path);
  }
  const ConfigField* field = table.find(path);
  if (field == nullptr && find_removed(path) == nullptr) {
    throw_bad_input("{}: {}", kCommandLine, unknown_key(table, path));
  }

  json* section = &root;
  for (size_t begin = 0, dot; (dot = path.find('.', begin)) != std::string::npos; begin = dot + 1) {
    json& child = section->emplace(path.substr(begin, dot - begin), json::object()).first.value();
    if (!child.is_object()) {
      throw_bad_input("{}: {}: expected an object, got {}", printable(source), path.substr(0, dot),
                      describe_json(child));
    }
    section = &child;
  }
  (*section)[std::string(key_of(path))] = override_value(field, assignment.substr(equals + 1));
  return path;
}

ordered_json::json_pointer pointer_to(const ConfigField& field) {
  std::string pointer = "/" + field.path;
  std::ranges::replace(pointer, '.', '/');
  return ordered_json::json_pointer(pointer);
}

// Takes what recipes set out of the tree of a file that gives all of it, as the config.json of a run does, if an
// override names another recipe: it would have nothing to set otherwise.
void make_room_for_recipe(json& root, const ConfigTable& table, const std::vector<std::string>& overrides) {
  constexpr std::string_view kKey = "precision.recipe", kRecipe = "precision.recipe=";
  const auto chosen = std::find_if(overrides.rbegin(), overrides.rend(),
                                   [&](const std::string& assignment) { return assignment.starts_with(kRecipe); });
  if (chosen == overrides.rend()) return;
  const json own = root.value(json::json_pointer("/precision/recipe"), json());
  if (own.is_null() || own == override_value(table.find(kKey), chosen->substr(kRecipe.size()))) return;
  std::vector<const ConfigField*> fields;
  for (const ConfigField& field : table.fields) {
    if (!depends_on_recipe(field.path)) continue;
    if (!root.contains(json::json_pointer(pointer_to(field).to_string()))) return;
    fields.push_back(&field);
  }
  for (const ConfigField* field : fields) {
    root[std::string(section_of(field->path))].erase(std::string(key_of(field->path)));
  }
}

// Sets keys in the tree of a file; returns their paths.
std::set<std::string> apply_overrides(json& root, const std::vector<std::string>& overrides,
                                      const std::string& source) {
  if (!root.is_object()) {
    throw_bad_input("{}: expected an object of sections, got {}", printable(source), describe_json(root));
  }
  Config names_only;
  const ConfigTable table = make_config_table(names_only);
  make_room_for_recipe(root, table, overrides);
  std::set<std::string> overridden;
  for (const std::string& assignment : overrides)
    overridden.insert(apply_override(root, table, assignment, source));
  return overridden;
}

json read_config_file(const std::string& file) {
  constexpr int64_t kMaxFileBytes = int64_t{16} << 20;
  if (file.ends_with(".yaml") || file.ends_with(".yml") || file.ends_with(".toml")) {
    throw_bad_input("{}: configs are JSON files; see configs/ for examples", printable(file));
  }
  json root = parse_json_text(read_text(file, kMaxFileBytes), file);
  if (root.is_object() && root.contains("model_type") && root.contains("architectures")) {
    throw_bad_input(
        "{}: is the config of a Hugging Face model; `parka import FOLDER --out NEW` makes a checkpoint and a config of "
        "Parka from it",
        printable(file));
  }
  return root;
}

StateFormat states_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::kCoatOptimizer:
    case Recipe::kCoat:
    case Recipe::kParka: return StateFormat::kFp8Expanded;
    default: return StateFormat::kFp32;
  }
}

MasterForm master_of(Recipe recipe) {
  switch (recipe) {
    case Recipe::kFp32: return MasterForm::kNone;
    default: return MasterForm::kFp32;
  }
}

std::string value_text(Config& config, const std::string& path) {
  return get_field(*make_config_table(config).find(path)).dump();
}

}  // namespace

Config parse_config(const json& root, std::string_view source) { return ConfigReader(source, {}).read(root); }

Config override_config(json root, const std::vector<std::string>& overrides, const std::string& source) {
  std::set<std::string> overridden = apply_overrides(root, overrides, source);
  return ConfigReader(source, std::move(overridden)).read(root);
}

json without_removed_keys(json config) {
  for (const RemovedKey& key : kRemovedKeys) {
    const auto section = config.is_object() ? config.find(section_of(key.path)) : config.end();
    if (key.is_free && section != config.end() && section->is_object()) section->erase(key_of(key.path));
  }
  return config;
}

std::string config_file(const std::string& path) {
  if (!is_folder(path)) {
    if (!file_exists(path)) {
      throw_bad_input("{}: no such config; `parka config new` writes one, and configs/ has those of known models",
                      printable(path));
    }
    return path;
  }
  const std::string file = (std::filesystem::path(path) / "config.json").string();
  if (!file_exists(file))
    throw_bad_input("{}: is a folder without a config.json; name a config file; token files go with --data",
                    printable(path));
  return file;
}

std::vector<std::string> overrides_of(const std::string& path) {
  const std::string file = config_file(path);
  const json root = read_config_file(file);
  if (!root.is_object()) {
    throw_bad_input("{}: expected an object of sections, got {}", printable(file), describe_json(root));
  }
  Config scratch;
  std::vector<std::string> overrides;
  add_overrides(root, "", make_config_table(scratch), file, overrides);
  return overrides;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  const std::string file = config_file(path);
  return override_config(read_config_file(file), overrides, file);
}

GivenConfig::GivenConfig(json file, std::vector<std::string> overrides, std::string source)
    : file_(std::move(file)), overrides_(std::move(overrides)), source_(std::move(source)) {}

GivenConfig GivenConfig::read(const std::string& path, const std::vector<std::string>& overrides) {
  const std::string file = config_file(path);
  return {read_config_file(file), overrides, file};
}

Config GivenConfig::with(const std::vector<std::string>& more) const {
  std::vector<std::string> all = overrides_;
  all.insert(all.end(), more.begin(), more.end());
  return override_config(file_, all, source_);
}

bool is_overridden(const std::vector<std::string>& overrides, const std::string& key) {
  return std::ranges::any_of(overrides,
                             [&](const std::string& override) { return override.starts_with(key + "="); });
}

ordered_json given_keys(const std::string& path, const std::vector<std::string>& overrides) {
  const std::string file = config_file(path);
  json root = read_config_file(file);
  apply_overrides(root, overrides, file);
  const ordered_json given = root;
  ordered_json result = ordered_json::object();
  Config names_only;
  for (const ConfigField& field : make_config_table(names_only).fields) {
    const auto pointer = pointer_to(field);
    if (given.contains(pointer)) result[pointer] = given.at(pointer);
  }
  return result;
}

void write_given_keys(const std::string& written, const std::string& path,
                      const std::vector<std::string>& overrides) {
  write_output(written, given_keys(path, overrides).dump(2) + "\n");
}

void require_config_writable(const std::string& written, const std::string& path) {
  check_output(written, {config_file(path)});
}

ordered_json to_json(const Config& config) {
  Config copy = config;
  ordered_json root = ordered_json::object();
  for (const ConfigField& field : make_config_table(copy).fields) root[pointer_to(field)] = get_field(field);
  return root;
}

std::string to_lines(const Config& config) {
  Config copy = config;
  std::string lines;
  for (const ConfigField& field : make_config_table(copy).fields) {
    lines += fmt::format("{}: {}\n", field.path, get_field(field).dump());
  }
  return lines;
}

void apply_recipe(Recipe recipe, Config& config) {
  config.precision = precision_recipe(recipe);
  config.optimizer.states = states_of(recipe);
  config.optimizer.master = master_of(recipe);
  config.optimizer.gradient = DType::kF32;
}

bool depends_on_recipe(const std::string& path) {
  Config standard;
  if (path == "precision.recipe") return false;
  const std::string value = value_text(standard, path);
  return std::ranges::any_of(EnumNames<Recipe>::kAll, [&](const auto& entry) {
    Config config;
    apply_recipe(entry.value, config);
    return value_text(config, path) != value;
  });
}

}  // namespace parka
