#include "comm/launch/watch_thread.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "comm/launch/start_wait.h"
#include "core/log/log.h"

namespace parka {
namespace {

// Longest wait of the training thread for a verdict on its own failure, in seconds: rank 0 answers at once, or is
// lost.
constexpr double kVerdictSeconds = 10;

std::string rest_of(std::istringstream& in) {
  std::string text;
  std::getline(in >> std::ws, text);
  return text;
}

}  // namespace

std::string beat_line(const RankReport& report) {
  return fmt::format("beat {} {} {} {} {}", report.step, report.calls, report.collectives.reached,
                     report.collectives.finished, report.what);
}

std::string verdict_line(const char* kind, const Verdict& verdict) {
  return fmt::format("{} {} {} {} {}", kind, static_cast<int>(verdict.code), verdict.rank, verdict.common ? 1 : 0,
                     verdict.message);
}

WatchMessage parse_watch_line(const std::string& line) {
  using Kind = WatchMessage::Kind;
  std::istringstream in(line);
  std::string kind;
  in >> kind;
  WatchMessage message;
  if (kind == "beat") {
    message.kind = Kind::kBeat;
    RankReport& report = message.report;
    in >> report.step >> report.calls >> report.collectives.reached >> report.collectives.finished;
    report.what = rest_of(in);
  } else if (kind == "bye") {
    message.kind = Kind::kBye;
  } else if (kind == "fail" || kind == "end") {
    message.kind = kind == "end" ? Kind::kEnd : Kind::kFail;
    Verdict& verdict = message.verdict;
    int code = 0;
    in >> code >> verdict.rank >> verdict.common;
    verdict.code = static_cast<ExitCode>(code);
    verdict.message = rest_of(in);
  }
  return message;
}

WatchThread::WatchThread(int rank, std::vector<std::string> names, std::vector<std::unique_ptr<LineSocket>> peers,
                         const WatchdogTimes& times, RankState& state)
    : rank_(rank),
      names_(std::move(names)),
      times_(times),
      state_(state),
      peers_(std::move(peers)),
      roll_(decides() ? names_ : std::vector{names_[0]}, times, seconds_now()),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      last_run_(seconds_now()) {
  if (wake_fd_ < 0) throw_bad_input("the watchdog has no file descriptor left; raise the limit (ulimit -n)");
  thread_ = start_without_signals("watches over the ranks", [this] {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return started_ || requests_.stop; });
    }
    run();
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  });
}

WatchThread::~WatchThread() {
  {
    std::lock_guard lock(mutex_);
    requests_.stop = true;
    changed_.notify_all();
  }
  wake();
  thread_.join();
  ::close(wake_fd_);
}

void WatchThread::start() {
  std::lock_guard lock(mutex_);
  started_ = true;
  changed_.notify_all();
}

void WatchThread::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof(one));
}

Verdict WatchThread::fail(ExitCode code, const std::string& message) {
  std::unique_lock lock(mutex_);
  const Verdict own = {code, rank_, false, message};
  requests_.failure = own;
  waits_for_verdict_ = true;
  wake();
  changed_.wait_for(lock, std::chrono::duration<double>(kVerdictSeconds), [&] { return done_; });
  // A rank that has lost another one says the same as one whose watchdog hears of it first.
  if (code == ExitCode::kRankLost && verdict_ && verdict_->rank != rank_) announce(*verdict_);
  return verdict_.value_or(own);
}

void WatchThread::leave() {
  std::unique_lock lock(mutex_);
  requests_.leave = true;
  wake();
  changed_.wait(lock, [&] { return done_; });
}

void WatchThread::set_stall_seconds(double seconds) {
  std::lock_guard lock(mutex_);
  requests_.stall_seconds = seconds;
}

WatchThread::Requests WatchThread::take_requests() {
  const std::string broken = state_.failure();
  std::lock_guard lock(mutex_);
  Requests taken = requests_;
  requests_.failure.reset();
  requests_.stall_seconds.reset();
  if (!broken.empty() && !taken.failure && !told_failure_) {
    const std::string& name = names_[static_cast<size_t>(rank_)];
    taken.failure = {ExitCode::kRankLost, rank_, false, fmt::format("{}: {}", name, broken)};
  }
  told_failure_ = told_failure_ || taken.failure.has_value();
  return taken;
}

void WatchThread::run() {
  constexpr double kGoodbyeSeconds = 2;
  double next_beat = seconds_now();
  for (;;) {
    const Requests requests = take_requests();
    if (requests.stop) return;
    const double now = seconds_now();
    if (requests.stall_seconds) roll_.set_stall_seconds(*requests.stall_seconds);
    if (const auto& failure = requests.failure) {
      if (decides()) {
        roll_.failed(rank_, failure->code, failure->message, now);
      } else {
        tell(verdict_line("fail", *failure));
      }
    }
    // Rank 0 closes the connection after it has read that.
    if (requests.leave && !decides()) return part_with("bye", kGoodbyeSeconds);
    if (requests.leave) roll_.left(rank_);
    if (roll_.all_left()) return;
    if (now >= next_beat) {
      beat(now);
      next_beat = now + times_.beat;
    }
    std::vector<int> descriptors = {wake_fd_};
    for (const auto& peer : peers_) descriptors.push_back(peer ? peer->fd() : -1);
    wait_readable(descriptors, std::min(next_beat - now, times_.settle));
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t read = ::read(wake_fd_, &count, sizeof(count));
    std::optional<Verdict> verdict = listen();
    const double heard_all = seconds_now();
    if (was_asleep(heard_all)) roll_.forgive(heard_all);
    if (!verdict) {
      verdict = roll_.verdict(heard_all);
      // If rank 0 wakes up again, it must not think that this rank died first.
      if (verdict && !decides()) tell(verdict_line("fail", *verdict));
    }
    if (verdict) return conclude(*verdict);
  }
}

void WatchThread::beat(double now) {
  const RankReport report = state_.report();
  if (decides()) roll_.heard(rank_, report, now);
  tell(beat_line(report));
}

void WatchThread::tell(const std::string& line) const {
  for (const auto& peer : peers_) {
    if (peer && !peer->closed()) peer->send(line);
  }
}

std::optional<Verdict> WatchThread::listen() {
  std::optional<Verdict> verdict;
  for (size_t r = 0; r < peers_.size() && !verdict; ++r) {
    if (peers_[r] && !peers_[r]->closed()) verdict = hear(static_cast<int>(r), *peers_[r]);
  }
  return verdict;
}

std::optional<Verdict> WatchThread::hear(int rank, LineSocket& peer) {
  using Kind = WatchMessage::Kind;
  for (const std::string& line : peer.receive()) {
    const WatchMessage message = parse_watch_line(line);
    const double now = seconds_now();
    if (message.kind == Kind::kBeat) roll_.heard(rank, message.report, now);
    if (message.kind == Kind::kEnd && !decides()) return message.verdict;
    if (message.kind == Kind::kFail && decides()) {
      roll_.failed(rank, message.verdict.code, message.verdict.message, now);
    }
    if (message.kind == Kind::kBye) {
      roll_.left(rank);
      peer.close();
      return std::nullopt;
    }
  }
  if (peer.closed()) roll_.lost(rank, seconds_now());
  return std::nullopt;
}

void WatchThread::part_with(const std::string& line, double seconds) {
  tell(line);
  for (const auto& peer : peers_) {
    if (peer) peer->end_sending();
  }
  const double end = seconds_now() + seconds;
  for (;;) {
    std::vector<int> open;
    for (const auto& peer : peers_) {
      if (peer) peer->receive();
      if (peer && !peer->closed()) open.push_back(peer->fd());
    }
    if (open.empty() || seconds_now() >= end) return;
    wait_readable(open, end - seconds_now());
  }
}

void WatchThread::conclude(const Verdict& verdict) {
  constexpr double kLongest = 1;
  {
    std::lock_guard lock(mutex_);
    if (waits_for_verdict_) verdict_ = verdict;
  }
  if (!verdict_) announce(verdict);
  if (decides()) part_with(verdict_line("end", verdict), kLongest);
  if (verdict_) return;
  flush_log();
  std::_Exit(static_cast<int>(verdict.code));
}

void WatchThread::announce(const Verdict& verdict) const {
  const int code = static_cast<int>(verdict.code);
  if (verdict.code == ExitCode::kRankLost) {
    log_error("{}; rank {} ends with exit code {}", verdict.message, rank_, code);
  } else if (!verdict.common) {
    // The number comes from another process.
    const auto blamed = static_cast<size_t>(verdict.rank);
    const std::string name = blamed < names_.size() ? names_[blamed] : fmt::format("rank {}", verdict.rank);
    log_error("{} failed: {}; rank {} ends with its exit code {}", name, verdict.message, rank_, code);
  }
}

bool WatchThread::was_asleep(double now) {
  return now - std::exchange(last_run_, now) > times_.beat + times_.silence / 4;
}

}  // namespace parka
