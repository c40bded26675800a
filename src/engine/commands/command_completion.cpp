#include "engine/commands/command_completion.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/commands/command_help.h"
#include "engine/config/config_table.h"

namespace parka {
namespace {

using Commands = std::vector<const CLI::App*>;

Commands commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// Its options without the positional arguments.
std::vector<const CLI::Option*> named_options(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return option->nonpositional(); });
}

bool takes_overrides(const CLI::App& app) { return app.get_option_no_throw("--set") != nullptr; }

// "bf16 fp16 fp32" of an option that takes one of these; empty for others.
std::string listed_values(const CLI::Option& option) {
  std::string values = value_name(option);
  if (!values.starts_with('{')) return "";
  values = values.substr(1, values.size() - 2);
  std::replace(values.begin(), values.end(), ',', ' ');
  return values;
}

std::vector<std::string> config_keys() {
  Config config;
  std::vector<std::string> keys;
  for (const ConfigField& field : make_config_table(config).fields) keys.push_back(field.path);
  return keys;
}

// What may follow a command, as branches of `case`: its commands and options, and the values of these.
struct BashBranches {
  std::string commands;  // the word that makes a command of its parent's name
  std::string words;     // by command
  std::string values;    // by command and the option before
};

void add_bash_branches(const CLI::App& app, const std::string& name, BashBranches& branches) {
  std::vector<std::string> words;
  for (const CLI::App* command : commands_of(app)) words.push_back(command->get_name());
  for (const CLI::Option* option : named_options(app)) {
    for (const std::string& long_name : option->get_lnames()) words.push_back("--" + long_name);
    const std::string values = listed_values(*option);
    if (values.empty()) continue;
    branches.values +=
        fmt::format("    \"{} --{}\") values=\"{}\" ;;\n", name, option->get_lnames().front(), values);
  }
  branches.words += fmt::format("    \"{}\") words=\"{}{}\" ;;\n", name, fmt::join(words, " "),
                                takes_overrides(app) ? " $keys" : "");
  for (const CLI::App* command : commands_of(app)) {
    const std::string whole = name.empty() ? command->get_name() : name + " " + command->get_name();
    branches.commands += fmt::format("      \"{} {}\") command=\"{}\" ;;\n", name, command->get_name(), whole);
    add_bash_branches(*command, whole, branches);
  }
  for (const CLI::Option* option : app.get_options([](const CLI::Option* o) { return o->get_positional(); })) {
    const std::string values = listed_values(*option);
    if (!values.empty()) branches.values += fmt::format("    \"{0} {0}\") values=\"{1}\" ;;\n", name, values);
  }
}

}  // namespace

std::string completion_script(const CLI::App& app) {
  BashBranches branches;
  add_bash_branches(app, "", branches);
  std::vector<std::string> keys;
  for (const std::string& key : config_keys()) keys.push_back("--" + key + "=");
  return fmt::format(
      R"(# bash completion for parka, made by `parka completion bash`
_parka() {{
  local cur=$2 previous=$3 command="" words="" values="" i
  local keys="{0}"
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$command ${{COMP_WORDS[i]}}" in
{1}    esac
  done
  case "$command $previous" in
{2}  esac
  case "$command" in
{3}  esac
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$cur"))
  elif [[ $cur == -* || $words != -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    [[ ${{#COMPREPLY[@]}} -ne 1 || ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
  fi
}}
complete -o default -F _parka parka
)",
      fmt::join(keys, " "), branches.commands, branches.values, branches.words);
}

}  // namespace parka
