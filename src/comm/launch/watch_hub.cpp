#include <algorithm>
#include <utility>

#include "comm/launch/watch_thread.h"

namespace parka {
namespace {

// The watchdog of rank 0, which receives the reports of all ranks and decides.
class WatchHub final : public WatchThread {
 public:
  WatchHub(std::vector<std::unique_ptr<LineSocket>> others, std::vector<std::string> names,
           const WatchdogTimes& times, RankState& state)
      : WatchThread(0, names, times, state),
        others_(std::move(others)),
        roll_(std::move(names), times, seconds_now()) {}
  ~WatchHub() override { stop(); }

 private:
  void run() override {
    double next_beat = seconds_now();
    for (;;) {
      const Requests requests = take_requests();
      if (requests.stop) return;
      const double now = seconds_now();
      if (requests.stall_seconds) roll_.set_stall_seconds(*requests.stall_seconds);
      if (requests.failure) roll_.failed(rank_, requests.failure->code, requests.failure->message, now);
      if (requests.leave) roll_.left(rank_);
      if (roll_.all_left()) return;
      if (now >= next_beat) {
        beat(now);
        next_beat = now + times_.beat;
      }
      std::vector<int> descriptors = {wake_fd()};
      for (const auto& other : others_) descriptors.push_back(other ? other->fd() : -1);
      wait_readable(descriptors, std::min(next_beat - now, times_.settle));
      clear_wake();
      listen();
      const double heard_all = seconds_now();
      if (was_asleep(heard_all)) roll_.forgive(heard_all);
      if (const std::optional<Verdict> verdict = roll_.verdict(heard_all)) {
        return conclude(*verdict, [&] { tell_all(*verdict); });
      }
    }
  }

  void beat(double now) {
    const RankReport report = state_.report();
    roll_.heard(rank_, report, now);
    const std::string line = beat_line(report);
    for (const auto& other : others_) {
      if (other && !other->closed()) other->send(line);
    }
  }

  void listen() {
    for (size_t r = 0; r < others_.size(); ++r) {
      if (!others_[r] || others_[r]->closed()) continue;
      hear(static_cast<int>(r), *others_[r]);
    }
  }

  void hear(int rank, LineSocket& socket) {
    for (const std::string& line : socket.receive()) {
      const WatchMessage message = parse_watch_line(line);
      const double now = seconds_now();
      switch (message.kind) {
        case WatchMessage::Kind::kBeat: roll_.heard(rank, message.report, now); break;
        case WatchMessage::Kind::kFail:
          roll_.failed(rank, message.verdict.code, message.verdict.message, now);
          break;
        case WatchMessage::Kind::kBye:
          roll_.left(rank);
          socket.close();
          return;
        default: break;
      }
    }
    if (socket.closed()) roll_.lost(rank, seconds_now());
  }

  // Returns when all other ranks have read it and ended; does not wait for ranks that hang.
  void tell_all(const Verdict& verdict) {
    constexpr double kLongest = 1;
    const std::string line = end_line(verdict);
    for (const auto& other : others_) {
      if (!other || other->closed()) continue;
      other->send(line);
      other->end_sending();
    }
    const double end = seconds_now() + kLongest;
    for (;;) {
      std::vector<int> open;
      for (const auto& other : others_) {
        if (!other || other->closed()) continue;
        other->receive();
        if (!other->closed()) open.push_back(other->fd());
      }
      if (open.empty() || seconds_now() >= end) return;
      wait_readable(open, end - seconds_now());
    }
  }

  std::vector<std::unique_ptr<LineSocket>> others_;
  RollCall roll_;
};

}  // namespace

std::unique_ptr<WatchThread> make_watch_hub(std::vector<std::unique_ptr<LineSocket>> others,
                                            std::vector<std::string> names, const WatchdogTimes& times,
                                            RankState& state) {
  return std::make_unique<WatchHub>(std::move(others), std::move(names), times, state);
}

}  // namespace parka
