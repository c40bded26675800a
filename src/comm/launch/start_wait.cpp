#include "comm/launch/start_wait.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "comm/launch/line_socket.h"
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

}  // namespace parka
