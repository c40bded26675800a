#include "engine/text/helper_process.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/ranges.h>
#include <source_dir.h>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/files/json_text.h"

namespace parka {
namespace {

// The slowest answer is the first, of a Python that has to read its packages from a busy network file system.
constexpr auto kPatience = std::chrono::seconds(300);

// scripts/ where an installation has it, or that of the source tree.
fs::path scripts_folder() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path installed = program.parent_path().parent_path() / "share/parka/scripts";
  return fs::is_directory(installed, ignored) ? installed : fs::path(PARKA_SOURCE_DIR) / "scripts";
}

// The environment of an installed program, which scripts/python_packages.py says how to make.
constexpr const char* kOwnVenv = ".local/share/parka/venv";

// PARKA_PYTHON, the environment that scripts/setup.sh makes, kOwnVenv, or python3 of PATH.
std::string python(const fs::path& scripts) {
  if (const char* given = std::getenv("PARKA_PYTHON"); given != nullptr && *given != '\0') return given;
  const char* home = std::getenv("HOME");
  for (const fs::path& folder :
       {scripts.parent_path() / ".venv", fs::path(home == nullptr ? "" : home) / kOwnVenv}) {
    if (file_exists((folder / "bin/python").string())) return (folder / "bin/python").string();
  }
  return "python3";
}

std::vector<std::string> command_of(const std::string& name, const std::vector<std::string>& arguments) {
  const fs::path scripts = scripts_folder();
  const std::string script = (scripts / name).string();
  if (!file_exists(script)) {
    throw_bad_input(
        "{}: no such file; install Parka with its scripts (docs/install.md), or start it from its checkout",
        script);
  }
  std::vector<std::string> command = {python(scripts), script};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

// Tells scripts that are started from now on what they are called, and which program starts them.
void introduce(const std::string& name) {
  std::error_code ignored;
  setenv("PARKA_COMMAND", name.c_str(), 1);
  setenv("PARKA_PROGRAM", fs::read_symlink("/proc/self/exe", ignored).c_str(), 1);
}

// `command` as exec takes it.
std::vector<char*> words_of(const std::vector<std::string>& command) {
  std::vector<char*> words;
  words.reserve(command.size() + 1);
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  return words;
}

}  // namespace

void become_python(const std::string& name, const std::string& script, const std::vector<std::string>& arguments) {
  const std::vector<std::string> command = command_of(script, arguments);
  introduce(name);
  execvp(command.front().c_str(), words_of(command).data());
  throw_bad_input("{}: cannot be started: {}; install Python 3, or set PARKA_PYTHON to one", command.front(),
                  std::strerror(errno));
}

int spawn(const std::vector<std::string>& command, int socket, pid_t& pid) {
  const std::vector<char*> arguments = words_of(command);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  sigset_t none, usual;
  sigemptyset(&none);
  sigemptyset(&usual);
  sigaddset(&usual, SIGPIPE);
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  if (socket < 0) posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO}) {
    if (socket >= 0) posix_spawn_file_actions_adddup2(&actions, socket, stream);
  }
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &usual);
  const int error = posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

FileDescriptor spawn_connected(const std::vector<std::string>& command, pid_t& pid) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_io("cannot make a socket: {}", std::strerror(errno));
  }
  FileDescriptor own(ends[0]);
  const FileDescriptor other(ends[1]);
  if (const int error = spawn(command, other.get(), pid); error != 0) {
    pid = -1;
    throw_bad_input("{}: cannot be started: {}; install Python 3, or set PARKA_PYTHON to one", command.front(),
                    std::strerror(error));
  }
  return own;
}

std::string describe_end(int status) {
  return WIFSIGNALED(status)
             ? fmt::format("was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))
             : fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

HelperProcess::HelperProcess(const std::vector<std::string>& command)
    : name_(fmt::format("{}", fmt::join(command, " "))), socket_(spawn_connected(command, pid_)) {}

HelperProcess::~HelperProcess() {
  if (pid_ < 0) return;
  shutdown(socket_.get(), SHUT_RDWR);
  if (wait_for_end(std::chrono::seconds(1))) return;
  kill(pid_, SIGKILL);
  wait_for_end(std::chrono::seconds(1));
}

bool HelperProcess::wait_for_end(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (pid_ >= 0) {
    const pid_t ended = waitpid(pid_, &status_, WNOHANG);
    if (ended == pid_ || (ended < 0 && errno != EINTR)) {
      pid_ = -1;
    } else if (std::chrono::steady_clock::now() >= deadline) {
      return false;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  return true;
}

void HelperProcess::throw_ended() {
  // It may have closed its output a moment before it ends.
  const bool ended = wait_for_end(std::chrono::seconds(1));
  throw_io("{} {}; start the command again", name_, ended ? describe_end(status_) : "has closed its output");
}

void HelperProcess::send(std::string_view line) {
  const std::string text = std::string(line) + "\n";
  for (size_t done = 0; done < text.size();) {
    // No SIGPIPE: its end is an error, not this process's.
    const ssize_t sent = ::send(socket_.get(), text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) throw_ended();
    done += static_cast<size_t>(sent);
  }
}

std::string HelperProcess::receive(std::chrono::seconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting = {socket_.get(), POLLIN, 0};
    const int ready = left.count() <= 0 ? 0 : poll(&waiting, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) throw_io("{}: does not answer for {} s; start the command again", name_, patience.count());
    char buffer[4096];
    const ssize_t count = ready < 0 ? ready : recv(socket_.get(), buffer, sizeof buffer, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw_ended();
    received_.append(buffer, static_cast<size_t>(count));
  }
  std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

Follower::Follower(const std::string& run_folder, const std::string& sinks) {
  introduce("parka follow");
  socket_ = spawn_connected(command_of("follow.py", {run_folder, "--beside", sinks}), pid_);
}

Follower::~Follower() {
  constexpr int kMostRounds = 6000;
  shutdown(socket_.get(), SHUT_RDWR);
  for (int round = 0; waitpid(pid_, nullptr, WNOHANG) == 0; ++round) {
    if (round == kMostRounds) kill(pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

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
