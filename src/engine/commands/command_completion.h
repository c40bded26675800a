#pragma once
#include <string>

namespace CLI {
class App;
}

namespace parka {

// A script that lets a shell ("bash", "zsh" or "fish") complete commands, options, the values that an option lists,
// and keys of configs where a command takes overrides of them.
std::string completion_script(const CLI::App& app, const std::string& shell);

}  // namespace parka
