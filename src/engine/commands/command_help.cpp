#include "engine/commands/command_help.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace parka {
namespace {

// Its default as text; empty where it has none that says anything.
std::string default_text(const CLI::Option& option) {
  const std::string text = option.get_default_str();
  return text == "[]" || text == "{}" ? "" : text;
}

std::string description_of(const CLI::Option& option) {
  std::string notes = default_text(option);
  if (!notes.empty()) notes = "default: " + notes;
  for (const CLI::Option* needed : option.get_needs()) {
    notes += fmt::format("{}needs {}", notes.empty() ? "" : "; ", needed->get_name());
  }
  return option.get_description() + (notes.empty() ? "" : fmt::format(" ({})", notes));
}

std::string value_part(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  const bool is_list = option.get_expected_max() == CLI::detail::expected_max_vector_size;
  return fmt::format(" {}{}{}", value_name(option), is_list ? " ..." : "",
                     option.get_required() ? " REQUIRED" : "");
}

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override { return value_part(*option); }
  std::string make_option_desc(const CLI::Option* option) const override { return description_of(*option); }
};

// Text as roff prints it: no line begins with a request, and a hyphen is the character of the command line.
std::string roff(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    const bool begins_line = escaped.empty() || escaped.back() == '\n';
    if (begins_line && (c == '.' || c == '\'')) escaped += "\\&";
    escaped += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  }
  return escaped;
}

std::string roff_options(const CLI::App& app) {
  std::string page;
  for (const CLI::Option* option : app.get_options()) {
    const std::string names = option->get_positional() ? option->get_name(true) : option->get_name(false, true);
    page += fmt::format(".TP\n\\fB{}\\fR\\fI{}\\fR\n{}\n", roff(names), roff(value_part(*option)),
                        roff(description_of(*option)));
  }
  return page;
}

// A command with its options; those of commands that have commands themselves are their commands'.
std::string roff_command(const CLI::App& command, const std::string& parents) {
  const std::string name = parents + " " + command.get_name();
  std::string page = fmt::format(".SS {}\n{}\n", roff(name), roff(command.get_description()));
  const std::vector<const CLI::App*> subcommands = command.get_subcommands([](const CLI::App*) { return true; });
  if (subcommands.empty()) page += roff_options(command);
  for (const CLI::App* subcommand : subcommands) page += roff_command(*subcommand, name);
  return page;
}

}  // namespace

std::string value_name(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  const std::string type = option.get_type_name();  // with what is checked: "INT:INT in [1 - 1000]", "TEXT:{a,b}"
  for (const char* plain : {"INT:", "UINT:", "FLOAT:", "TEXT:"}) {
    if (!type.starts_with(plain)) continue;
    const size_t colon = type.find(':');
    return type[colon + 1] == '{' ? type.substr(colon + 1) : type.substr(0, colon);
  }
  return type;
}

std::shared_ptr<CLI::FormatterBase> make_help_formatter() { return std::make_shared<HelpFormatter>(); }

std::string man_page(const CLI::App& app, const std::string& version) {
  std::string page = fmt::format(
      ".TH PARKA 1 \"\" \"parka {}\" \"User Commands\"\n"
      ".SH NAME\nparka \\- train language models with FP8 optimizer states and activations\n"
      ".SH SYNOPSIS\n.B parka\n[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGUMENTS\\fR]\n"
      ".SH DESCRIPTION\n{}\n.SH OPTIONS\n{}.SH COMMANDS\n",
      version, roff(app.get_description()), roff_options(app));
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    page += roff_command(*command, "parka");
  }
  const std::string footer = app.get_footer();
  return page + ".SH NOTES\n" + roff(footer.substr(std::min(footer.find_first_not_of('\n'), footer.size()))) + "\n";
}

}  // namespace parka
