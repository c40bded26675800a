#include "comm/launch/watchdog.h"

#include <sstream>
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

Watchdog::~Watchdog() {
  if (thread_) thread_->stop();
}

void Watchdog::start(Communicator& ranks, const std::string& host, int host_leader, Reach reach,
                     const WatchdogTimes& times) {
  const int rank = ranks.rank(), size = ranks.size();
  std::vector<std::string> names = ranks.gather_text(fmt::format("{}, pid {}", host, ::getpid()));
  for (int r = 0; r < size; ++r) names[r] = fmt::format("rank {} ({})", r, names[r]);

  std::unique_ptr<Listener> listener;
  std::string offer, problem;
  if (rank == 0) {
    try {
      listener = std::make_unique<Listener>(reach);
      offer = fmt::format("{} {} {}", random_token(), listener->port(), addresses_of(reach));
    } catch (const Error& error) {
      offer = "failed 0";  // the others must not wait for it
      problem = fmt::format("{}: {}", names[0], error.what());
    }
  }
  std::istringstream in(ranks.gather_text(offer)[0]);
  RankAddress hub_address;
  in >> hub_address.word.token >> hub_address.port;
  if (host_leader == 0) hub_address.addresses = loopback_addresses();
  for (std::string address; in >> address;) hub_address.addresses.push_back(address);

  const WaitTimes wait{.limit = times.connect};
  if (rank == 0 && listener) {
    std::vector<std::unique_ptr<LineSocket>> others = accept_ranks(*listener, hub_address.word, 1, size, wait);
    for (int r = 1; r < size; ++r) {
      if (!others[r] && problem.empty()) problem = names[r] + " has not connected to rank 0";
    }
    thread_ = make_watch_hub(std::move(others), names, times, state_);
  } else if (hub_address.port != 0) {
    Connection hub = connect_to_rank(hub_address, rank, wait);
    if (hub.socket) {
      thread_ = make_watch_client(std::move(hub.socket), rank, names, times, state_);
    } else {
      problem = fmt::format("{} cannot reach {} at any of: {} ({})", names[rank], names[0],
                            join(hub_address.addresses), hub.problem);
    }
  }
  if (!problem.empty()) {
    problem += fmt::format(", TCP port {}: open the network between the hosts for the watchdog", hub_address.port);
  } else if (thread_) {
    try {
      thread_->prepare();
    } catch (const Error& error) {
      problem = fmt::format("{}: {}", names[rank], error.what());
    }
  }
  // A rank that knows the addresses says more than rank 0: the last word counts.
  for (const std::string& word : ranks.gather_text(problem)) problem = word.empty() ? problem : word;
  if (!problem.empty()) {
    thread_.reset();  // it does not run, so that no failure can be told to it
    throw_bad_input("{}", problem);
  }
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
