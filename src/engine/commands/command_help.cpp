#include "engine/commands/command_help.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "core/log/log.h"
#include "engine/config/config_table.h"

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

// The word that stands for an option's value: "INT", "FILE", "{bf16,fp16,fp32}"; empty for a flag.
std::string value_name(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  // With what is checked: "INT:INT in [1 - 1000]", "N:INT in [1 - 8]", "TEXT:{a,b}".
  std::string type = option.get_type_name();
  type.resize(std::min(type.find(":INT in ["), type.size()));
  for (const char* plain : {"INT:", "UINT:", "FLOAT:", "TEXT:"}) {
    if (!type.starts_with(plain)) continue;
    const size_t colon = type.find(':');
    return type[colon + 1] == '{' ? type.substr(colon + 1) : type.substr(0, colon);
  }
  return type;
}

std::string value_part(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  const bool is_list = option.get_expected_max() == CLI::detail::expected_max_vector_size;
  return fmt::format(" {}{}{}", value_name(option), is_list ? " ..." : "",
                     option.get_required() ? " REQUIRED" : "");
}

// `help` with lines that the terminal would break broken between words; what continues a line is indented by
// `indent`.
std::string wrapped(const std::string& help, size_t indent) {
  const size_t columns = terminal_columns(STDOUT_FILENO);
  constexpr size_t kLeastText = 20;
  if (columns < indent + kLeastText) return help;
  std::string text;
  size_t column = 0;
  for (size_t at = 0; at < help.size();) {
    const size_t end = std::min(help.find_first_of(" \n", at), help.size());
    if (column + (end - at) > columns && column > indent) {
      while (!text.empty() && text.back() == ' ') text.pop_back();
      text += '\n' + std::string(indent, ' ');
      column = indent;
    }
    const size_t next = std::min(end + 1, help.size());
    text.append(help, at, next - at);
    column = end < help.size() && help[end] == '\n' ? 0 : column + next - at;
    at = next;
  }
  return text;
}

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override { return value_part(*option); }
  std::string make_option_desc(const CLI::Option* option) const override { return description_of(*option); }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return wrapped(CLI::Formatter::make_option(option, is_positional), get_column_width());
  }
  std::string make_description(const CLI::App* app) const override {
    return wrapped(CLI::Formatter::make_description(app), 0);
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return wrapped(CLI::Formatter::make_subcommand(command), get_column_width());
  }
};

// The words that nothing takes, in the order of the command line: CLI11 2.1 lists them backwards.
std::vector<std::string> unexpected_words(const CLI::App& app, const std::vector<std::string>& arguments) {
  std::vector<std::string> left = app.remaining(/*recurse=*/true), words;
  for (const std::string& argument : arguments) {
    const auto found = std::ranges::find(left, argument);
    if (found == left.end()) continue;
    words.push_back(argument);
    left.erase(found);
  }
  return words;
}

// The innermost command that was given: "config show" of `parka config show x.json`.
const CLI::App& given_command(const CLI::App& app, std::string& name) {
  const std::vector<CLI::App*> given = app.get_subcommands();
  if (given.empty()) return app;
  name += " " + given.front()->get_name();
  return given_command(*given.front(), name);
}

// The option of the command that may be meant by "--stepz=3", or the key of a config by "--lr"; empty: neither.
std::string nearest_option(const CLI::App& command, const std::string& word) {
  std::vector<std::string> names, shown;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back(name);
      shown.push_back("--" + name);
    }
  }
  Config config;
  const ConfigTable table = make_config_table(config);
  if (command.get_option_no_throw("--set") != nullptr) {
    for (const ConfigField& field : table.fields) {
      names.emplace_back(key_of(field.path));
      shown.push_back(fmt::format("--{}=VALUE", field.path));
    }
  }
  const std::string given = word.substr(2, word.find('=') - 2);
  const auto found = std::ranges::find(names, nearest_name(given, names));
  return found == names.end() ? "" : shown[static_cast<size_t>(found - names.begin())];
}

// The names that other programs give things. The word is an option without what follows "=", or empty for words
// that are no options; the command is empty where it is any.
struct OtherName {
  std::string_view command, word, advice;
};
constexpr OtherName kOtherNames[] = {
    {"train", "--resume", "the same command goes on from the newest checkpoint by itself"},
    {"train", "--continue", "the same command goes on from the newest checkpoint by itself"},
    {"train", "--resume-from-checkpoint", "the same command goes on from the newest checkpoint by itself"},
    {"generate", "", "give the prompt as --prompt TEXT"},
    {"generate", "--max-tokens", "give --tokens N"},
    {"generate", "--max-new-tokens", "give --tokens N"},
    {"", "--epochs", "give --training.steps=N; a run says at its start how many steps an epoch has"},
    {"", "--num-train-epochs", "give --training.steps=N; a run says at its start how many steps an epoch has"},
    {"", "--max-steps", "give --training.steps=N"},
    {"", "--learning-rate", "give --optimizer.lr=RATE"},
    {"", "--batch-size",
     "give --training.global_batch_size=N, of which --training.micro_batch_size=N go at a time"},
    {"", "--device", "give --device.kind=cpu or --device.kind=cuda"},
};

// What other programs have as commands.
constexpr std::pair<std::string_view, std::string_view> kOtherCommands[] = {
    {"finetune", "`parka import MODEL --finetune lora` writes a config for parka train"},
    {"chat", "parka generate RUN --chat"},
    {"sample", "parka generate RUN"},
    {"init", "parka config new"},
    {"serve", "`parka export` writes a folder for vLLM or llama.cpp"},
};

// Empty for what is not in the table.
std::string_view advice_for(const CLI::App& command, std::string word) {
  word = word.starts_with('-') ? word.substr(0, word.find('=')) : "";
  std::ranges::replace(word, '_', '-');
  const bool takes_keys = command.get_option_no_throw("--set") != nullptr;
  for (const OtherName& other : kOtherNames) {
    const bool is_of_command = other.command.empty() ? takes_keys : other.command == command.get_name();
    if (is_of_command && other.word == word) return other.advice;
  }
  return {};
}

// A message of CLI11's, in other words where it is about a value that no check has looked at.
std::string plain(const std::string& message) {
  const std::string_view converts = "Could not convert: ";
  const size_t equals = message.find(" = "), colon = message.find(": ");
  if (message.starts_with(converts) && equals != std::string::npos) {
    const std::string option = message.substr(converts.size(), equals - converts.size());
    return fmt::format("{}: got {}; it must be a whole number", option, message.substr(equals + 3));
  }
  if (message.ends_with(" missing")) return message.substr(0, colon) + ": has no value";
  return message;
}

}  // namespace

std::shared_ptr<CLI::FormatterBase> make_help_formatter() { return std::make_shared<HelpFormatter>(); }

std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error,
                                 const std::vector<std::string>& arguments) {
  std::string name = "parka";
  const CLI::App& command = given_command(app, name);
  const std::vector<std::string> unexpected = unexpected_words(app, arguments);
  if (unexpected.empty() || dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr) {
    return fmt::format("{}; see {} --help", plain(error.what()), name);
  }
  const std::string& first = unexpected.front();
  if (const std::string_view advice = advice_for(command, first); !advice.empty()) {
    return fmt::format("nothing takes {}; {}", fmt::join(unexpected, " "), advice);
  }
  std::string nearest;
  if (first.starts_with("--") && first.size() > 2) {
    nearest = nearest_option(command, first);
    if (nearest == first.substr(0, first.find('='))) {
      return fmt::format("nothing takes {} before the command; give {} after {}", first, nearest, name);
    }
  } else if (&command == &app && !first.starts_with('-')) {
    std::vector<std::string> commands;
    for (const CLI::App* one : app.get_subcommands([](const CLI::App*) { return true; })) {
      commands.push_back(one->get_name());
    }
    for (const auto& [word, advice] : kOtherCommands) {
      if (word == first) return fmt::format("nothing takes {}; {}", fmt::join(unexpected, " "), advice);
    }
    nearest = nearest_name(first, commands);
  }
  return fmt::format(
      "nothing takes {}; {}", fmt::join(unexpected, " "),
      nearest.empty() ? fmt::format("see {} --help", name) : fmt::format("{}: did you mean {}?", first, nearest));
}

}  // namespace parka
