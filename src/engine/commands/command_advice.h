#pragma once
#include <string>
#include <vector>

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace parka {

// Says what is wrong with a command line that CLI11 could not read, and what to do about it. `arguments` were
// parsed, without the program.
std::string describe_parse_error(const CLI::App& app, const CLI::ParseError& error,
                                 const std::vector<std::string>& arguments);

}  // namespace parka
