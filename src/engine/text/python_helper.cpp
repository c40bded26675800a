#include "engine/text/python_helper.h"

#include <cstdlib>
#include <filesystem>

#include <source_dir.h>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The slowest answer is the first, of a Python that has to read its packages from a busy network file system.
constexpr auto kPatience = std::chrono::seconds(300);

// scripts/ where an installation has it, or that of the source tree.
fs::path scripts_folder() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path installed = program.parent_path().parent_path() / "share/parka/scripts";
  return fs::is_directory(installed, ignored) ? installed : fs::path(PARKA_SOURCE_DIR) / "scripts";
}

// PARKA_PYTHON, the environment that scripts/setup.sh makes, or python3 of PATH.
std::string python(const fs::path& scripts) {
  if (const char* given = std::getenv("PARKA_PYTHON"); given != nullptr && *given != '\0') return given;
  const std::string own = (scripts.parent_path() / ".venv/bin/python").string();
  return file_exists(own) ? own : "python3";
}

std::vector<std::string> command_of(const std::string& name, const std::vector<std::string>& arguments) {
  const fs::path scripts = scripts_folder();
  const std::string script = (scripts / name).string();
  if (!file_exists(script)) {
    throw_bad_input(
        "{}: no such file, and text and images need it; install Parka with its scripts, or give "
        "--prompt-tokens",
        script);
  }
  std::vector<std::string> command = {python(scripts), script};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

}  // namespace

PythonHelper::PythonHelper(const std::string& script, const std::vector<std::string>& arguments)
    : script_(script), process_(command_of(script, arguments)) {}

json PythonHelper::receive() {
  const std::string line = process_.receive(kPatience);
  json answer = parse_json_if_valid(line);
  if (!answer.is_object()) throw_io("{}: \"{}\" is no answer of it", script_, printable(line));
  if (answer.contains("error")) throw Error(ExitCode::kBadInput, answer.at("error").get<std::string>());
  return answer;
}

json PythonHelper::ask(const json& request) {
  std::string line;
  try {
    line = request.dump();
  } catch (const json::type_error&) {
    throw_bad_input("the text {} is not UTF-8; convert it",
                    printable(request.begin()->dump(-1, ' ', false, json::error_handler_t::replace)));
  }
  process_.send(line);
  return receive();
}

}  // namespace parka
