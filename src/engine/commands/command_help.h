#pragma once
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class FormatterBase;
class ParseError;
}  // namespace CLI

// The tree of commands and options, as text: for `--help`, and for what does not fit it.
namespace parka {

// For CLI::App::formatter(): an option's line ends with its default and with the option that it needs.
std::shared_ptr<CLI::FormatterBase> make_help_formatter();

// Says what is wrong with a command line that CLI11 could not read, and what to do. `arguments` lack the program.
std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error,
                                 const std::vector<std::string>& arguments);

}  // namespace parka
