#include "engine/commands/command_completion.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/commands/command_help.h"
#include "engine/config/config_table.h"
#include "engine/files/shell_word.h"

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

// What comes before the details, for lists that have one line for each entry.
std::string short_description(const std::string& text) {
  size_t end = text.size();
  for (const char* details : {". ", "; ", ": ", " ("}) end = std::min(end, text.find(details));
  return text.substr(0, end);
}

std::vector<std::string> config_keys() {
  Config config;
  std::vector<std::string> keys;
  for (const ConfigField& field : make_config_table(config).fields) keys.push_back(field.path);
  return keys;
}

// ---- bash ----

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

std::string bash_script(const CLI::App& app) {
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

// ---- zsh ----

// `_arguments` takes brackets and colons in a specification for its own.
std::string zsh_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) escaped += c == '[' || c == ']' || c == ':' ? std::string("\\") + c : std::string(1, c);
  return escaped;
}

std::string zsh_specification(const CLI::Option& option, const std::string& name) {
  const std::string values = listed_values(option);
  const std::string value = option.get_type_size() == 0 ? ""
                            : values.empty()            ? fmt::format(":{}:_files", zsh_text(value_name(option)))
                                                        : fmt::format(":value:({})", values);
  return quoted(fmt::format("*{}{}[{}]{}", name, value.empty() ? "" : "=",
                            zsh_text(short_description(option.get_description())), value));
}

std::string zsh_arguments(const CLI::App& app, const std::string& indent) {
  std::string text = indent + "_arguments";
  for (const CLI::Option* option : named_options(app)) {
    for (const std::string& name : option->get_lnames()) {
      text += fmt::format(" \\\n{}  {}", indent, zsh_specification(*option, "--" + name));
    }
  }
  if (takes_overrides(app)) text += fmt::format(" \\\n{}  \"${{_parka_keys[@]}}\"", indent);
  return text;
}

// The function of a command: its options, then files, a listed value, or the commands below it.
std::string zsh_function(const CLI::App& app, const std::string& name) {
  std::string text = fmt::format("{}() {{\n", name), below;
  const Commands commands = commands_of(app);
  if (commands.empty()) {
    std::string values;
    for (const CLI::Option* option : app.get_options([](const CLI::Option* o) { return o->get_positional(); })) {
      values = listed_values(*option);
    }
    text += zsh_arguments(app, "  ") +
            fmt::format(" \\\n    {}\n}}\n", quoted(values.empty() ? "*:file:_files" : ":value:(" + values + ")"));
    return text;
  }
  text += "  local context state line\n  local -a commands\n  commands=(\n";
  std::string branches;
  for (const CLI::App* command : commands) {
    const std::string description = short_description(command->get_description());
    text += fmt::format("    {}\n", quoted(command->get_name() + ":" + zsh_text(description)));
    branches += fmt::format("        {0}) {1}_{0} ;;\n", command->get_name(), name);
    below += zsh_function(*command, name + "_" + command->get_name());
  }
  text += "  )\n" + zsh_arguments(app, "  ") + " \\\n    '1:command:->command' '*::argument:->argument'\n";
  text += fmt::format(
      "  case $state in\n    command) _describe command commands ;;\n    argument)\n      case $words[1] in\n{}      esac ;;\n  esac\n}}\n",
      branches);
  return below + text;
}

// The file is the function _parka when zsh completes for the first time, or is sourced.
std::string zsh_script(const CLI::App& app) {
  std::string keys;
  for (const std::string& key : config_keys()) keys += fmt::format("  '*--{}=:value:'\n", key);
  return fmt::format(R"(#compdef parka
# zsh completion for parka, made by `parka completion zsh`
typeset -ga _parka_keys
_parka_keys=(
{})
{}if [ "$funcstack[1]" = "_parka" ]; then
  _parka "$@"
else
  compdef _parka parka
fi
)",
                     keys, zsh_function(app, "_parka"));
}

// ---- fish ----

void add_fish_lines(const CLI::App& app, const std::string& condition, std::string& script) {
  const std::string begin = fmt::format("complete -c parka -n {}", quoted(condition));
  for (const CLI::Option* option : named_options(app)) {
    const std::string values = listed_values(*option);
    const std::string value = option->get_type_size() == 0 ? ""
                              : values.empty()             ? " -r"
                                                           : " -x -a " + quoted(values);
    for (const std::string& name : option->get_lnames()) {
      script += fmt::format("{} -l {}{} -d {}\n", begin, name, value,
                            quoted(short_description(option->get_description())));
    }
  }
  for (const CLI::Option* option : app.get_options([](const CLI::Option* o) { return o->get_positional(); })) {
    const std::string values = listed_values(*option);
    if (!values.empty()) script += fmt::format("{} -f -a {}\n", begin, quoted(values));
  }
  if (takes_overrides(app)) script += begin + " -a \"$parka_keys\"\n";
  std::vector<std::string> names;
  for (const CLI::App* command : commands_of(app)) names.push_back(command->get_name());
  for (const CLI::App* command : commands_of(app)) {
    script += fmt::format(
        "complete -c parka -f -n {} -a {} -d {}\n",
        quoted(fmt::format("{}; and not __fish_seen_subcommand_from {}", condition, fmt::join(names, " "))),
        command->get_name(), quoted(short_description(command->get_description())));
    add_fish_lines(*command, "__fish_seen_subcommand_from " + command->get_name(), script);
  }
}

std::string fish_script(const CLI::App& app) {
  std::string script = "# fish completion for parka, made by `parka completion fish`\nset -g parka_keys";
  for (const std::string& key : config_keys()) script += " --" + key + "=";
  script += "\n";
  add_fish_lines(app, "__fish_use_subcommand", script);
  return script;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
  if (shell == "zsh") return zsh_script(app);
  return shell == "fish" ? fish_script(app) : bash_script(app);
}

}  // namespace parka
