#include <utility>

#include "comm/launch/watch_thread.h"

namespace parka {
namespace {

// The watchdog of a rank other than 0.
class WatchClient final : public WatchThread {
 public:
  WatchClient(std::unique_ptr<LineSocket> hub, int rank, std::vector<std::string> names, const WatchdogTimes& times,
              RankState& state)
      : WatchThread(rank, std::move(names), times, state), hub_(std::move(hub)) {}
  ~WatchClient() override { stop(); }

 private:
  void run() override {
    double next_beat = seconds_now();
    heard_ = next_beat;
    for (;;) {
      const Requests requests = take_requests();
      if (requests.stop) return;
      if (requests.failure) hub_->send(fail_line(requests.failure->code, requests.failure->message));
      if (requests.leave) return say_goodbye();
      const double now = seconds_now();
      if (now >= next_beat) {
        hub_->send(beat_line(state_.report()));
        next_beat = now + times_.beat;
      }
      wait_readable({hub_->fd(), wake_fd()}, next_beat - now);
      clear_wake();
      if (const std::optional<Verdict> verdict = listen()) return conclude(*verdict);
    }
  }

  // Rank 0's verdict, or this rank's own if rank 0 is lost.
  std::optional<Verdict> listen() {
    for (const std::string& line : hub_->receive()) {
      const WatchMessage message = parse_watch_line(line);
      heard_ = seconds_now();
      if (message.kind == WatchMessage::Kind::kBeat) report_ = message.report;
      if (message.kind == WatchMessage::Kind::kEnd) return message.verdict;
    }
    if (hub_->closed()) return lost(fmt::format("{} died, last heard of {}", names_[0], describe(report_)));
    const double now = seconds_now();
    if (was_asleep(now)) heard_ = now;
    const double silent = now - heard_;
    if (silent <= times_.silence) return std::nullopt;
    const Verdict verdict = lost(
        fmt::format("{} has sent nothing for {:.0f} s, last heard of {}: it hangs, or its host or network is down",
                    names_[0], silent, describe(report_)));
    // If rank 0 wakes up again, it must not think that this rank died first.
    hub_->send(fail_line(verdict.code, verdict.message));
    return verdict;
  }

  static Verdict lost(const std::string& message) { return {ExitCode::kRankLost, 0, false, message}; }

  // Rank 0 closes the connection after it has read that.
  void say_goodbye() {
    constexpr double kLongest = 2;
    hub_->send("bye");
    hub_->end_sending();
    const double end = seconds_now() + kLongest;
    while (!hub_->closed() && seconds_now() < end) {
      wait_readable({hub_->fd()}, end - seconds_now());
      hub_->receive();
    }
  }

  std::unique_ptr<LineSocket> hub_;
  double heard_ = 0;
  RankReport report_;  // the last of rank 0
};

}  // namespace

std::unique_ptr<WatchThread> make_watch_client(std::unique_ptr<LineSocket> hub, int rank,
                                               std::vector<std::string> names, const WatchdogTimes& times,
                                               RankState& state) {
  return std::make_unique<WatchClient>(std::move(hub), rank, std::move(names), times, state);
}

}  // namespace parka
