#include "comm/launch/meeting.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include <unistd.h>

#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

constexpr double kConnectTrySeconds = 3;  // for one address
constexpr const char *kWelcome = "welcome", *kTaken = "taken";

}  // namespace

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

std::string host_key() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}", name.data(), boot);
}

namespace {

using Ranks = std::vector<std::unique_ptr<LineSocket>>;

// Receives the connections to a port, and finds the ranks among them.
class Reception {
 public:
  Reception(const Listener& listener, const std::string& token, int first, int size)
      : listener_(listener), token_(token), first_(first), ranks_(static_cast<size_t>(size)) {}

  // Waits for at most `seconds` for somebody to come or to speak.
  void receive(double seconds) {
    std::vector<int> descriptors = {is_full_ ? -1 : listener_.fd()};
    for (const Stranger& stranger : strangers_) descriptors.push_back(stranger.socket->fd());
    wait_readable(descriptors, seconds);
    let_in();
    for (Stranger& stranger : strangers_) {
      const std::vector<std::string> lines = stranger.socket->receive();
      if (lines.empty() && !stranger.socket->closed()) continue;
      if (!lines.empty() && !stranger.socket->closed()) hear(lines[0], stranger.socket);
      stranger.socket.reset();
    }
    std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.socket; });
    // Who has ended since may be started again.
    for (std::unique_ptr<LineSocket>& rank : ranks_) {
      if (rank && rank->has_ended()) rank.reset();
    }
  }

  Ranks& ranks() { return ranks_; }
  bool is_complete() const {
    return std::all_of(ranks_.begin() + first_, ranks_.end(), [](const auto& rank) { return rank != nullptr; });
  }

 private:
  struct Stranger {
    std::unique_ptr<LineSocket> socket;
    double came;
  };

  // Where the process can have no more connections, those who have said nothing for a while make room.
  void let_in() {
    try {
      while (std::unique_ptr<LineSocket> socket = listener_.accept()) {
        strangers_.push_back({std::move(socket), seconds_now()});
      }
      is_full_ = false;
    } catch (const Error&) {
      if (strangers_.empty()) throw;
      is_full_ = true;
      const double long_ago = seconds_now() - kConnectTrySeconds;
      std::erase_if(strangers_, [&](const Stranger& stranger) { return stranger.came < long_ago; });
    }
  }

  void hear(const std::string& line, std::unique_ptr<LineSocket>& stranger) {
    std::istringstream in(line);
    std::string its_token;
    int rank = -1;
    in >> its_token >> rank;
    if (its_token != token_ || rank < first_ || rank >= static_cast<int>(ranks_.size())) return;
    std::unique_ptr<LineSocket>& place = ranks_[static_cast<size_t>(rank)];
    if (place && !place->has_ended()) {
      stranger->send(kTaken);
      if (!std::exchange(told_of_second_, true)) {
        log_warning("a second process came as rank {} and was sent away; give every process a rank of its own",
                    rank);
      }
      return;
    }
    stranger->send(kWelcome);
    place = std::move(stranger);
  }

  const Listener& listener_;
  const std::string& token_;
  const int first_;
  Ranks ranks_;
  std::vector<Stranger> strangers_;
  bool is_full_ = false, told_of_second_ = false;
};

// Has the listener's answer; sets `to.problem` where that is no welcome.
void introduce(Connection& to, const std::string& token, int rank, int other) {
  to.socket->send(fmt::format("{} {}", token, rank));
  const double answer_by = seconds_now() + kConnectTrySeconds;
  while (!to.socket->closed() && seconds_now() < answer_by) {
    wait_readable({to.socket->fd()}, answer_by - seconds_now());
    const std::vector<std::string> lines = to.socket->receive();
    if (lines.empty()) continue;
    if (lines[0] == kWelcome && !to.socket->closed()) return;
    if (lines[0] == kTaken) {
      throw_bad_input("rank {} has a connection with another rank {}: give every process a rank of its own", other,
                      rank);
    }
    break;
  }
  // A port of the same number on another network, a run of another size, a run before this.
  to = {nullptr, Connection::Failure::kOther,
        fmt::format("somebody answers who is not rank {} of this run", other)};
}

}  // namespace

std::string missing_ranks(const Ranks& ranks, int first) {
  constexpr int kShown = 16;
  std::vector<std::string> missing;
  for (size_t r = static_cast<size_t>(first); r < ranks.size(); ++r) {
    if (!ranks[r]) missing.push_back(std::to_string(r));
  }
  const size_t more = missing.size() > kShown ? missing.size() - kShown : 0;
  missing.resize(missing.size() - more);
  return join(missing) + (more > 0 ? fmt::format(" and {} more", more) : "");
}

Ranks accept_ranks(const Listener& listener, const std::string& token, int first, int size,
                   const WaitTimes& times) {
  Reception reception(listener, token, first, size);
  WaitNotice notice(times);
  const auto goes_on = [&] {
    return notice.goes_on([&] {
      return fmt::format("rank {} waits on TCP port {} for the ranks that have not come, {}", first - 1,
                         listener.port(), missing_ranks(reception.ranks(), first));
    });
  };
  while (!reception.is_complete() && goes_on()) reception.receive(WaitNotice::kRound);
  return std::move(reception.ranks());
}

Connection connect_to_rank(const RankAddress& to, int rank, const WaitTimes& times) {
  WaitNotice notice(times);
  Connection last;
  for (;;) {
    for (const std::string& address : to.addresses) {
      last = connect_to(address, to.port, kConnectTrySeconds);
      if (last.socket) introduce(last, to.token, rank, to.rank);
      if (last.socket || (to.is_open && last.failure == Connection::Failure::kRefused)) return last;
      const bool goes_on = notice.goes_on([&] {
        return fmt::format("rank {} waits for rank {} at {}, TCP port {} ({})", rank, to.rank, address, to.port,
                           last.problem);
      });
      if (!goes_on) return last;
    }
    wait_readable({}, WaitNotice::kRound);
  }
}

std::vector<std::string> loopback_addresses() { return {"127.0.0.1", "::1"}; }

std::string addresses_of(Reach reach) { return reach == Reach::kNetwork ? join(own_addresses()) : ""; }

std::string join(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

}  // namespace parka
