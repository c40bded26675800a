#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "engine/config/config.h"
#include "engine/files/json.h"

namespace parka {

// The file of a config that is named by itself or by its folder, which then has a config.json: that of a run, or of
// an imported model. Throws Error(kBadInput) for a folder without one.
std::string config_file(const std::string& path);

// The configuration that `root` describes: defaults, then the defaults of precision.recipe, then the keys given.
// Throws Error(kBadInput) with one line, `source: key path: what was given, what is allowed`, for any error: an
// unknown key, a wrong type, a value out of range, a combination that validate() refuses.
Config parse_config(const json& root, std::string_view source);

// The same from a JSON file, or from the config.json of a folder. The file may hold // comments, and at its root
// "$schema". With overrides of single keys: "optimizer.lr=1e-3", "data.train=[\"a\",\"b\"]". A value is read as
// JSON; if it is none, or the key holds text, it is a string. The last override of a key counts.
Config load_config(const std::string& path, const std::vector<std::string>& overrides);

// The keys that a config file gives, as overrides of another: where a run has several configs, the later wins.
std::vector<std::string> overrides_of(const std::string& path);

// parse_config with overrides as above.
Config override_config(json root, const std::vector<std::string>& overrides, const std::string& source);

// A checkpoint's config without keys of earlier versions whose values all meant the same bits.
json without_removed_keys(json config);

// Every key with its value, independent of recipe and defaults. parse_config of it gives the same Config.
ordered_json to_json(const Config& config);

// The same for a comparison: a line `section.key: value` for each key.
std::string to_lines(const Config& config);

// Throws Error(kBadInput) if a value is out of range or two contradict each other; says which to change.
void validate(const Config& config);

// A JSON Schema (draft 2020-12) of the config file, for editors: configs/parka.schema.json. Keys whose default the
// recipe decides have none there. Only validate() has the rules across fields.
ordered_json config_schema();

// The reference in docs/config.md: every key with its type, range, default and meaning, and what the recipes set.
std::string config_reference_markdown();

// A hash, 32 hexadecimal digits, of everything that decides the bits of a run: model, formats, optimizer and
// schedule, data order (files by name, without their folder), batch and seeds. It leaves out folders, intervals,
// training.steps, evaluation, sharding, and options that are documented to give the same bits.
std::string config_hash(const Config& config);

// How the config that resumes differs from a checkpoint's; each entry is one line with the key and both values.
struct ResumeDifferences {
  std::vector<std::string> refused;  // the checkpoint does not fit, or the data position would lose its meaning
  // Fits where masters and moments are rounded to other formats (engine/checkpoint/checkpoint_states.h).
  std::vector<std::string> converted;
  std::vector<std::string> allowed;  // fits, but the run continues differently: to be logged
};
ResumeDifferences resume_differences(const Config& saved, const Config& now);

// The same for two models, for a new run with the weights of `saved`: rotary frequencies may differ, but nothing
// else that weights depend on. Both lists are empty if the models compute the same.
ResumeDifferences model_differences(const ModelConfig& saved, const ModelConfig& now);

// The differences, one line each, with which the weights of `saved` would be left out in part, or be those of
// another model: keys of `model` as above, and of `finetune` but for the base's format.
std::vector<std::string> weight_differences(const Config& saved, const Config& now);

// The differing keys that decide how fast a run is, one line each with both values.
enum class SpeedOf : uint8_t {
  kRun,     // of all ranks
  kOneGpu,  // of its work in a block and a micro-batch: not how many there are, nor how ranks share the model
};
std::vector<std::string> speed_differences(const Config& measured, const Config& wanted, SpeedOf speed);

// A config file with overrides, to which others can be added. One tree of all keys would not do: where a change
// names another recipe, overridden keys stay, and those of a file that gives all of a recipe's do not.
class GivenConfig {
 public:
  // From a file's JSON.
  GivenConfig(json file, std::vector<std::string> overrides = {}, std::string source = "config");
  static GivenConfig read(const std::string& path, const std::vector<std::string>& overrides);

  // The result of load_config() with more overrides. Throws Error(kBadInput) if these are not valid.
  Config with(const std::vector<std::string>& more) const;

 private:
  json file_;
  std::vector<std::string> overrides_;
  std::string source_;
};

// The keys that a config file gives, with overrides as load_config() takes them and nothing else, in the order of
// docs/config.md: written to a file, it is the same config. Comments are lost.
ordered_json given_keys(const std::string& path, const std::vector<std::string>& overrides);

// True if one of the overrides gives this key.
bool is_overridden(const std::vector<std::string>& overrides, const std::string& key);

// Writes them to a file.
void write_given_keys(const std::string& written, const std::string& path,
                      const std::vector<std::string>& overrides);
// Throws Error if write_given_keys() would, or would replace the config that it reads. An empty name is fine.
void require_config_writable(const std::string& written, const std::string& path);

// Sets every key that depends on precision.recipe: section precision, and optimizer.states, master and gradient.
void apply_recipe(Recipe recipe, Config& config);

// True if recipes set the key, of which `path` is the dotted name, to different values.
bool depends_on_recipe(const std::string& path);

}  // namespace parka
