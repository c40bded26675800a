#include "engine/text/text_tokenizer.h"

#include <cstdlib>
#include <filesystem>

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

std::vector<std::string> helper_command(const std::string& folder, TextTokenizer::Use use) {
  const fs::path scripts = scripts_folder();
  const std::string script = (scripts / "tokenizer_helper.py").string();
  if (!file_exists(script)) {
    throw_bad_input("{}: no such file, and text needs it; install Parka with its scripts, or give --prompt-tokens",
                    script);
  }
  std::vector<std::string> command = {python(scripts), script, folder};
  if (use == TextTokenizer::Use::kChat) command.emplace_back("--chat");
  return command;
}

}  // namespace

TextTokenizer::TextTokenizer(const std::string& folder, Use use) : helper_(helper_command(folder, use)) {
  stop_tokens_ = receive().at("stop").get<std::vector<int32_t>>();
}

json TextTokenizer::receive() {
  const std::string line = helper_.receive(kPatience);
  json answer = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) throw_io("tokenizer_helper.py: \"{}\" is no answer of it", printable(line));
  if (answer.contains("error")) throw Error(ExitCode::kBadInput, answer.at("error").get<std::string>());
  return answer;
}

json TextTokenizer::ask(const json& request) {
  std::string line;
  try {
    line = request.dump();
  } catch (const json::type_error&) {
    throw_bad_input("the text {} is not UTF-8; convert it",
                    printable(request.begin()->dump(-1, ' ', false, json::error_handler_t::replace)));
  }
  helper_.send(line);
  return receive();
}

std::vector<int32_t> TextTokenizer::encode(const std::string& text) {
  auto ids = ask({{"encode", text}}).at("ids").get<std::vector<int32_t>>();
  if (ids.empty())
    throw_bad_input("the prompt is empty and the tokenizer has no token to begin with; give --prompt");
  return ids;
}

std::vector<int32_t> TextTokenizer::encode_chat(const json& messages) {
  return ask({{"chat", messages}}).at("ids").get<std::vector<int32_t>>();
}

void TextTokenizer::begin(const std::vector<int32_t>& prompt) { ask({{"begin", prompt}}); }

std::string TextTokenizer::next(int32_t token) { return ask({{"token", token}}).at("text").get<std::string>(); }

std::string TextTokenizer::end() { return ask({{"end", true}}).at("text").get<std::string>(); }

}  // namespace parka
