#include "comm/launch/start_wait.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <utility>

#include "comm/launch/line_socket.h"
#include "core/error.h"
#include "core/log/log.h"
#include "core/parallel.h"

namespace parka {
namespace {

constexpr double kBetweenNotices = 60;

}  // namespace

std::thread start_without_signals(std::string_view task, std::function<void()> body) {
  return start_thread(task, [body = std::move(body)] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    body();
  });
}

WaitNotice::WaitNotice(const WaitTimes& times) : times_(times), last_(seconds_now()), next_(times.notice) {}

bool WaitNotice::goes_on(const std::function<std::string()>& what) {
  const double now = seconds_now();
  waited_ += std::min(now - std::exchange(last_, now), times_.limit / 2);
  if (waited_ >= times_.limit) return false;
  if (waited_ >= next_) {
    next_ = waited_ + kBetweenNotices;
    log_info("{}: for {:.0f} s by now, for up to {:.0f} s", what(), waited_, times_.limit);
  }
  return true;
}

WaitLimit::WaitLimit(std::string what, std::string hint, const WaitTimes& times)
    : what_(std::move(what)), hint_(std::move(hint)), times_(times) {
  thread_ = start_without_signals("watches over the start", [this] { run(); });
}

WaitLimit::~WaitLimit() { stop_thread(thread_, mutex_, changed_, over_); }

void WaitLimit::run() {
  WaitNotice notice(times_);
  while (notice.goes_on([&] { return what_; })) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(WaitNotice::kRound), [&] { return over_; })) return;
  }
  const int code = static_cast<int>(ExitCode::kRankLost);
  log_error("{}, and has done so for {:.0f} s: {}; it ends with exit code {}", what_, notice.waited(), hint_, code);
  flush_log();
  std::_Exit(code);
}

}  // namespace parka
