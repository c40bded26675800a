#pragma once
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "engine/files/file_io.h"
#include "engine/files/json.h"

namespace parka {

// Replaces this process by one of the Python files in scripts/, which calls itself `name` in what it prints. Throws
// Error(kBadInput) if there is no Python or no such file.
[[noreturn]] void become_python(const std::string& name, const std::string& script,
                                const std::vector<std::string>& arguments);

// Starts a program in a process group of its own, with the usual signals. Its standard input and output are
// `socket`; -1: it has no input, and this process's output. Returns the errno of what failed, or 0.
int spawn(const std::vector<std::string>& command, int socket, pid_t& pid);
// The same with a socket of its own, of which this is the other end. Throws Error(kBadInput) if it cannot be
// started.
FileDescriptor spawn_connected(const std::vector<std::string>& command, pid_t& pid);
std::string describe_end(int status);  // as waitpid() gives it

// A child process that answers lines on its standard output with lines on its standard input. When its input ends,
// with this object or its process, it has to end. A terminal's Ctrl-C does not reach it.
class HelperProcess {
 public:
  // `command` is the program, found along PATH, and its arguments. Throws Error(kBadInput) if it cannot be started.
  explicit HelperProcess(const std::vector<std::string>& command);
  HelperProcess& operator=(HelperProcess&&) = delete;
  ~HelperProcess();  // waits for its end, and kills it if it takes longer than a second

  // `line` has no line end.
  void send(std::string_view line);
  // Its next line, without the line end. Throws Error(kIo) if it has ended, or does not answer for so long.
  std::string receive(std::chrono::seconds patience);

 private:
  [[noreturn]] void throw_ended();
  bool wait_for_end(std::chrono::milliseconds patience);  // whether it has ended

  std::string name_;  // for messages
  pid_t pid_ = -1;    // -1 once it has ended
  FileDescriptor socket_{-1};
  int status_ = 0;  // as waitpid() gives it, then
  std::string received_;
};

// `parka follow` beside a run, which it sends to `sinks`. It ends with this object, or its process.
class Follower {
 public:
  Follower(const std::string& run_folder, const std::string& sinks);
  Follower& operator=(Follower&&) = delete;
  ~Follower();  // waits until the last records are sent, but no more than a minute

 private:
  pid_t pid_ = -1;
  FileDescriptor socket_{-1};  // its standard input
};

// A process of one of the Python files in scripts/ that answers lines of JSON. All functions throw Error(kBadInput)
// for what the user can fix, and Error(kIo) if the process dies.
class PythonHelper {
 public:
  // `script` is the name in scripts/. Throws Error(kBadInput) also if Python is missing.
  PythonHelper(const std::string& script, const std::vector<std::string>& arguments);

  // The next answer, an object.
  json receive();
  json ask(const json& request);

 private:
  std::string script_;
  HelperProcess process_;
};

}  // namespace parka
