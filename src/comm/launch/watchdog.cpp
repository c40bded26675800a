#include "comm/launch/watchdog.h"

#include <utility>
#include <vector>

#include <unistd.h>

#include "comm/launch/rendezvous.h"
#include "comm/launch/watch_thread.h"
#include "core/heartbeat.h"

namespace parka {
void RankState::probe(CollectiveProbe* probe) {
  std::lock_guard lock(mutex_);
  probe_ = probe;
}

RankReport RankState::report() {
  std::lock_guard lock(mutex_);
  const Heartbeat beat = last_heartbeat();
  RankReport report{beat.step, beat.count, host_collectives.counts(), beat.what};
  if (probe_ != nullptr) {
    const CollectiveCounts more = probe_->counts();
    report.collectives.reached += more.reached;
    report.collectives.finished += more.finished;
  }
  return report;
}

std::string RankState::failure() {
  std::lock_guard lock(mutex_);
  return probe_ == nullptr ? std::string() : probe_->failure();
}

Watchdog::Watchdog() = default;

Watchdog::~Watchdog() = default;

void Watchdog::start(Communicator& ranks, const std::string& host, Reach reach, const WatchdogTimes& times) {
  const Gather gather = [&](const std::string& text) { return ranks.gather_text(text); };
  std::vector<std::string> names = gather(fmt::format("{}, pid {}", host, ::getpid()));
  for (size_t r = 0; r < names.size(); ++r) names[r] = fmt::format("rank {} ({})", r, names[r]);
  const std::string own_name = names[static_cast<size_t>(ranks.rank())];
  auto peers = connect_ranks(gather, ranks.rank(), 0, 1, reach, times.connect);
  std::unique_ptr<WatchThread> thread;
  std::string problem;
  try {
    thread = std::make_unique<WatchThread>(ranks.rank(), std::move(names), std::move(peers), times, state_);
  } catch (const Error& error) {
    problem = fmt::format("{}: {}", own_name, error.what());
  }
  agree_on_no_problem(gather, problem);
  thread_ = std::move(thread);  // until all have one, no failure can be told to it
  thread_->start();
}

void Watchdog::set_stall_seconds(double seconds) {
  if (thread_) thread_->set_stall_seconds(seconds);
}

Verdict Watchdog::fail(ExitCode code, const std::string& message) {
  if (thread_) return thread_->fail(code, message);
  return {code, 0, true, message};
}

void Watchdog::leave() {
  if (thread_) thread_->leave();
}

}  // namespace parka
