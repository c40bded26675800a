#include "comm/launch/local_ranks.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/launch/rendezvous.h"
#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

// From the first failure of a rank until the others, which hear of it at once, are killed.
constexpr double kGraceSeconds = 10;
constexpr std::array kForwarded = {SIGTERM, SIGUSR1, SIGINT, SIGHUP};

// The process that has started the ranks and does nothing but watch them.
class RankParent {
 public:
  // `signals` are blocked: those that are forwarded, and SIGCHLD.
  RankParent(const std::vector<pid_t>& ranks, const sigset_t& signals) : signals_(signals) {
    for (const pid_t pid : ranks) ranks_.push_back({pid, {}, false});
  }

  int wait_for_all() {
    while (collect() > 0) {
      const int signal = next_signal();
      if (signal == SIGTSTP) {
        pause();
      } else if (signal > 0 && signal != SIGCHLD) {
        tell_all(signal);
      }
      if (kill_at_ && seconds_now() >= *kill_at_) kill_the_rest();
    }
    return exit_code();
  }

  void kill_the_rest() {
    for (Rank& rank : ranks_) rank.is_killed = rank.is_killed || !rank.code;
    tell_all(SIGKILL);
    kill_at_.reset();
  }

 private:
  struct Rank {
    pid_t pid;
    std::optional<int> code;  // once it has ended
    bool is_killed;           // by this process
  };

  // Takes note of ranks that have ended; the number of those that have not.
  int collect() {
    int running = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      int status = 0;
      if (!rank.code && ::waitpid(rank.pid, &status, WNOHANG) == rank.pid) {
        rank.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        if (WIFSIGNALED(status)) {
          log_error("rank {} (pid {}) was ended by signal {} ({})", r, rank.pid, WTERMSIG(status),
                    strsignal(WTERMSIG(status)));
        }
        if (*rank.code != 0 && !kill_at_ && !rank.is_killed) kill_at_ = seconds_now() + kGraceSeconds;
      }
      running += rank.code ? 0 : 1;
    }
    return running;
  }

  // Waits until one comes or the rest must be killed; 0: none.
  int next_signal() const {
    if (!kill_at_) return std::max(0, ::sigwaitinfo(&signals_, nullptr));
    const double seconds = std::max(0.0, *kill_at_ - seconds_now());
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_nsec = static_cast<long>(1e9 * (seconds - std::floor(seconds)));
    return std::max(0, ::sigtimedwait(&signals_, nullptr, &limit));
  }

  void tell_all(int signal) const {
    for (const Rank& rank : ranks_) {
      if (!rank.code) ::kill(rank.pid, signal);
    }
  }

  // The ranks do not see a terminal's Ctrl-Z. This process stops too, where something can continue it again.
  void pause() const {
    tell_all(SIGSTOP);
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTSTP);
    ::raise(SIGTSTP);
    ::sigprocmask(SIG_UNBLOCK, &stop, nullptr);
    ::sigprocmask(SIG_BLOCK, &stop, nullptr);
    tell_all(SIGCONT);
  }

  int exit_code() const {
    // Ranks that end because another one did have kRankLost, or had to be killed.
    int code = 0;
    const auto weight = [](const Rank& rank) {
      if (rank.is_killed || *rank.code == 0) return 0;
      return *rank.code == static_cast<int>(ExitCode::kRankLost) ? 1 : *rank.code <= 128 ? 2 : 3;
    };
    int most = 0;
    for (const Rank& rank : ranks_) {
      if (weight(rank) <= most) continue;
      most = weight(rank);
      code = *rank.code;
    }
    return code;
  }

  std::vector<Rank> ranks_;
  const sigset_t signals_;
  std::optional<double> kill_at_;
};

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// In a process group of its own a rank gets a terminal's Ctrl-C once: from its parent. For the terminal it is in
// the background, and may write and read there all the same (`stty tostop`).
void become_rank(pid_t parent, const sigset_t& mask) {
  ::setpgid(0, 0);
  std::signal(SIGTTOU, SIG_IGN);
  std::signal(SIGTTIN, SIG_IGN);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) std::_Exit(128 + SIGKILL);  // it has died meanwhile
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
}

}  // namespace

int run_local_ranks(int size, const std::function<int(LocalRank)>& body) {
  LocalRank local{.rank = 0,
                  .size = size,
                  .token = random_token(),
                  .port = 0,
                  .listener = std::make_shared<Listener>(Reach::kThisHost)};
  local.port = local.listener->port();
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int signal : kForwarded) sigaddset(&signals, signal);
  sigaddset(&signals, SIGCHLD);
  if (!is_ignored(SIGTSTP)) sigaddset(&signals, SIGTSTP);
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody can wait for a process
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  std::fflush(nullptr);  // or every rank would print it once more
  const pid_t self = ::getpid();
  std::vector<pid_t> ranks;
  for (local.rank = 0; local.rank < size; ++local.rank) {
    const pid_t pid = ::fork();
    if (pid < 0) {
      const int reason = errno;
      RankParent parent(ranks, signals);
      parent.kill_the_rest();
      parent.wait_for_all();
      throw_bad_input("cannot start rank {} of {}: {}; raise the limit of processes (ulimit -u)", local.rank, size,
                      std::strerror(reason));
    }
    if (pid == 0) {
      become_rank(self, before);
      if (local.rank != 0) local.listener.reset();
      return body(std::move(local));
    }
    ranks.push_back(pid);
  }
  local.listener.reset();
  return RankParent(ranks, signals).wait_for_all();
}

}  // namespace parka
