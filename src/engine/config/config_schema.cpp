
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/config/config_io.h"
#include "engine/config/config_table.h"

namespace parka {
namespace {

// A field's type and limits in JSON Schema; one overload per kind of field.
ordered_json constraints(const BooleanField&) { return {{"type", "boolean"}}; }
ordered_json constraints(const IntegerField& field) {
  if (!field.choices.empty()) return {{"type", "integer"}, {"enum", field.choices}};
  return {{"type", "integer"}, {"minimum", field.range.min}, {"maximum", field.range.max}};
}
ordered_json number_within(const RealRange& range) {
  return {
      {"type", "number"}, {"minimum", range.min}, {range.max_excluded ? "exclusiveMaximum" : "maximum", range.max}};
}
ordered_json constraints(const RealField& field) { return number_within(field.range); }
ordered_json constraints(const RealListField& field) {
  return {{"type", "array"}, {"items", number_within(field.range)}};
}
ordered_json constraints(const TextField& field) {
  return {{"type", "string"}, {"minLength", field.may_be_empty ? 0 : 1}};
}
ordered_json constraints(const TextListField&) {
  return {{"type", "array"}, {"items", {{"type", "string"}, {"minLength", 1}}}};
}
ordered_json constraints(const EnumField& field) { return {{"type", "string"}, {"enum", field.names()}}; }

// The same for people.
std::string type_text(const BooleanField&) { return "true or false"; }
std::string type_text(const IntegerField& field) {
  if (!field.choices.empty()) return fmt::format("{}", fmt::join(field.choices, ", "));
  if (field.range.max == kMaxExactInteger || field.range.max == kMaxDimension) {
    return fmt::format("integer >= {}", field.range.min);
  }
  return fmt::format("integer, {} to {}", field.range.min, field.range.max);
}
std::string type_text(const RealField& field) {
  if (field.range.max == RealRange{}.max) return fmt::format("number >= {}", field.range.min);
  return fmt::format("number, {} {} {}", field.range.min, field.range.max_excluded ? "to below" : "to",
                     field.range.max);
}
std::string type_text(const RealListField& field) { return fmt::format("array of numbers >= {}", field.range.min); }
std::string type_text(const TextField&) { return "string"; }
std::string type_text(const TextListField&) { return "array of strings"; }
std::string type_text(const EnumField& field) {
  return fmt::format("`\"{}\"`", fmt::join(field.names(), "\"`, `\""));
}

Config recipe_config(Recipe recipe) {
  Config config;
  apply_recipe(recipe, config);
  return config;
}

// The node of a section in the schema: "optimizer.schedule" is /properties/optimizer/properties/schedule.
ordered_json& schema_node(ordered_json& root, std::string_view path) {
  if (path.empty()) return root;
  ordered_json& parent = schema_node(root, section_of(path));
  return parent["properties"][std::string(key_of(path))];
}

ordered_json closed_object(std::string_view description) {
  return {{"description", description},
          {"type", "object"},
          {"additionalProperties", false},
          {"properties", ordered_json::object()}};
}

std::string table_cell(std::string_view text) {
  std::string cell;
  for (const char c : text) cell += c == '|' ? std::string("\\|") : std::string(1, c);
  return cell;
}

std::string recipe_table(const ConfigTable& table) {
  std::string text =
      "\n## What the recipes set\n\n`precision.recipe` sets the defaults of the keys below; a key that is given "
      "overrides its recipe. A file that gives all of them, as the config.json of a run does, is the exception: another "
      "recipe on the command line sets them anew, but for those that are given there, too.\n\n| Key |";
  for (const auto& entry : EnumNames<Recipe>::kAll) text += fmt::format(" {} |", entry.name);
  text += "\n|---|";
  for (size_t i = 0; i < std::size(EnumNames<Recipe>::kAll); ++i) text += "---|";
  for (const ConfigField& field : table.fields) {
    if (!depends_on_recipe(field.path)) continue;
    text += fmt::format("\n| `{}` |", field.path);
    for (const auto& entry : EnumNames<Recipe>::kAll) {
      Config config = recipe_config(entry.value);
      const ordered_json value = get_field(*make_config_table(config).find(field.path));
      text += fmt::format(" {} |", value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return text + "\n";
}

}  // namespace

ordered_json config_schema() {
  Config defaults;
  const ConfigTable table = make_config_table(defaults);
  ordered_json root = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                       {"title", "Parka configuration"}};
  root.update(closed_object("One training run of Parka"));
  root["allowComments"] = true;  // for Visual Studio Code
  root["properties"]["$schema"] = {{"description", "Path or URL of this schema, for editors"}, {"type", "string"}};
  for (const ConfigSection& section : table.sections) schema_node(root, section.path) = closed_object(section.help);
  for (const ConfigField& field : table.fields) {
    std::string description(field.help);
    const bool by_recipe = depends_on_recipe(field.path);
    if (by_recipe) description += ". The default is set by precision.recipe";
    ordered_json node = {{"description", description}};
    node.update(std::visit([](const auto& target) { return constraints(target); }, field.target));
    if (field.path == "optimizer.schedule.warmup_steps") {
      node.update({{"type", {"integer", "string"}}, {"pattern", "^[0-9.]+%$"}});
    }
    if (!by_recipe) node["default"] = get_field(field);  // editors insert it
    schema_node(root, field.path) = std::move(node);
  }
  return root;
}

std::string config_reference_markdown() {
  Config defaults;
  const ConfigTable table = make_config_table(defaults);
  std::string text;
  for (const ConfigSection& section : table.sections) {
    text += fmt::format("\n## {}\n\n{}.\n\n| Key | Value | Default | Meaning |\n|---|---|---|---|\n", section.path,
                        section.help);
    for (const ConfigField& field : table.fields) {
      if (section_of(field.path) != section.path) continue;
      const std::string value =
          depends_on_recipe(field.path) ? "by recipe" : fmt::format("`{}`", get_field(field).dump());
      text += fmt::format("| `{}` | {} | {} | {} |\n", field.path,
                          std::visit([](const auto& target) { return type_text(target); }, field.target), value,
                          table_cell(field.help));
    }
  }
  return text + recipe_table(table);
}

}  // namespace parka
