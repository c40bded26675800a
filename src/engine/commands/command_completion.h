#pragma once
#include <string>

namespace CLI {
class App;
}

namespace parka {

// A script that lets bash complete commands, options, the values that an option lists, and keys of configs where a
// command takes overrides of them.
std::string completion_script(const CLI::App& app);

}  // namespace parka
