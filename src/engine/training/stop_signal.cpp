#include "engine/training/stop_signal.h"

#include <atomic>
#include <csignal>

#include <unistd.h>

#include "core/error.h"

namespace parka {
namespace {

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

void end(int) { _exit(static_cast<int>(ExitCode::kStopped)); }

void remember(int signal) {
  received.store(signal);
  // A second Ctrl-C means now.
  if (signal == SIGINT) std::signal(SIGINT, SIG_DFL);
}

void answer_stop_signals(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  for (int signal : {SIGTERM, SIGUSR1, SIGINT}) sigaction(signal, &action, nullptr);
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

}  // namespace

void end_on_stop_signals() { answer_stop_signals(end); }

void catch_stop_signals() {
  answer_stop_signals(remember);
  std::signal(SIGPIPE, SIG_IGN);  // what the log then cannot write is lost, and nothing else
}

int stop_signal() { return received.load(); }

}  // namespace parka
