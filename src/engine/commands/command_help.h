#pragma once
#include <memory>
#include <string>

namespace CLI {
class App;
class FormatterBase;
}  // namespace CLI

// The tree of commands and options, as text: for `--help` and for `parka man`.
namespace parka {

// For CLI::App::formatter(): an option's line ends with its default and with the option that it needs.
std::shared_ptr<CLI::FormatterBase> make_help_formatter();

// The man page parka(1) of a program with these commands, as roff.
std::string man_page(const CLI::App& app, const std::string& version);

}  // namespace parka
