#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/config/config.h"
#include "engine/files/json.h"

// A Config as a flat table of its fields, each with a pointer to its member. Everything that treats all fields
// alike (reading, printing, limits, schema, documentation, comparison) is a loop over this table.
namespace parka {

struct BooleanField {
  bool* value;
};
struct IntegerField {
  int64_t* value;
  IntegerRange range;
  std::vector<int64_t> choices;  // empty: everything in range
};
struct RealField {
  double* value;
  RealRange range;
};
struct TextField {
  std::string* value;
  bool may_be_empty = false;
};
struct TextListField {
  std::vector<std::string>* value;
};
struct RealListField {
  std::vector<double>* value;
  RealRange range;  // of each
};
struct EnumField {
  struct Choice {
    uint8_t value;
    std::string_view name;
  };
  uint8_t* value;  // the enum's bytes
  std::vector<Choice> choices;

  std::vector<std::string> names() const;
};

struct ConfigField {
  std::string path;  // "optimizer.schedule.kind"
  std::string_view help;
  Effects effects;
  std::variant<BooleanField, IntegerField, RealField, TextField, TextListField, RealListField, EnumField> target;
};

struct ConfigSection {
  std::string path;  // "optimizer.schedule"
  std::string_view help;
};

struct ConfigTable {
  std::vector<ConfigSection> sections;
  std::vector<ConfigField> fields;  // in the order of the structs

  const ConfigField* find(std::string_view path) const;  // null when there is none
  bool has_section(std::string_view path) const;
};

// The section that a field or section lies in: "optimizer.schedule" of "optimizer.schedule.kind"; empty for "seed".
std::string_view section_of(std::string_view path);
// Its last part: "lr" of "optimizer.lr".
std::string_view key_of(std::string_view path);

// The table of `config`, which must outlive it.
ConfigTable make_config_table(Config& config);

// Sets the field to a JSON value of the right type and within its limits. Otherwise leaves it unchanged and returns
// the reason ("expected a number, got a string \"abc\""); an empty string means success.
std::string set_field(const ConfigField& field, const json& value);

// The field's value as JSON.
ordered_json get_field(const ConfigField& field);

// The integer that a JSON value is; 1e3 and 16.0 are integers, too, as in JSON Schema. nullopt for others.
std::optional<int64_t> exact_integer(const json& value);

// A JSON value in a one-line message: `a string "abc"`, `1.5`, `an array`.
std::string describe_json(const json& value);

// The edit distance of `a` and `b`, where swapped neighbours count one. Only the first 64 letters of each count.
int edit_distance(std::string_view a, std::string_view b);

// The distance of `given` from a name that may be meant: the edit distance, or 1 if `given` is a part of the name.
int name_distance(std::string_view given, std::string_view name);

// The largest name_distance at which the name is likely to be meant.
int plausible_distance(std::string_view given);

// The first of the names nearest to `given`, or an empty string when none is plausible.
std::string nearest_name(std::string_view given, const std::vector<std::string>& names);

}  // namespace parka
