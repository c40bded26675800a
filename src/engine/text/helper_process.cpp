#include "engine/text/helper_process.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include "core/error.h"

namespace parka {
namespace {

// Started with one end of a socket as standard input and output, in a process group of its own; the errno of what
// failed, or 0.
int spawn(const std::vector<std::string>& command, int socket, pid_t& pid) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, socket, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, socket, STDOUT_FILENO);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  const int error = posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

std::string describe_end(int status) {
  return WIFSIGNALED(status)
             ? fmt::format("was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)))
             : fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

}  // namespace

HelperProcess::HelperProcess(const std::vector<std::string>& command)
    : name_(fmt::format("{}", fmt::join(command, " "))) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_io("cannot make a socket: {}", std::strerror(errno));
  }
  socket_ = FileDescriptor(ends[0]);
  const FileDescriptor other(ends[1]);
  if (const int error = spawn(command, other.get(), pid_); error != 0) {
    pid_ = -1;
    throw_bad_input("{}: cannot be started: {}; install Python 3, or set PARKA_PYTHON to one", command.front(),
                    std::strerror(error));
  }
}

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

}  // namespace parka
