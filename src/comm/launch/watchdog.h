#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/collective_counter.h"
#include "comm/communicator.h"
#include "comm/launch/roll_call.h"

namespace parka {
class WatchThread;
enum class Reach;

// The state of collectives that run asynchronously. The watchdog's thread reads it at every heartbeat.
class CollectiveProbe {
 public:
  virtual ~CollectiveProbe() = default;
  virtual CollectiveCounts counts() const = 0;
  virtual std::string failure() = 0;  // why they failed; empty: they did not
};

// The collectives of a rank, which it reports beside its heartbeat. The watchdog's thread reads them.
class RankState {
 public:
  void probe(CollectiveProbe* probe);
  RankReport report();
  std::string failure();

  CollectiveCounter host_collectives;

 private:
  std::mutex mutex_;
  CollectiveProbe* probe_ = nullptr;
};

// Ends a run of several ranks when one of them dies, hangs, or throws an Error. A thread of every rank reports to
// rank 0 once a second, over TCP, what heartbeat() was told. Rank 0 decides which rank is to blame and tells all
// others. Their threads log one line and end their process at once, whatever it is waiting for. If rank 0 itself is
// lost, the others detect it. A run of one rank has no such thread.
class Watchdog {
 public:
  Watchdog();
  ~Watchdog();

  // All ranks must call it together. `host` names this rank's host in messages, `reach` is from where ranks come to
  // rank 0. Throws the same Error on all ranks if one cannot reach it.
  void start(Communicator& ranks, const std::string& host, Reach reach, const WatchdogTimes& times);
  // How long a rank may make no progress while others wait for it. Only rank 0's value counts.
  void set_stall_seconds(double seconds);

  CollectiveCounter& host_collectives() { return state_.host_collectives; }
  // Adds collectives that run asynchronously. Must be reset, with nullptr, before `probe` is destroyed.
  void probe(CollectiveProbe* probe) { state_.probe(probe); }

  // This rank has failed. Tells rank 0 and returns its verdict, with which the caller must end the process. If
  // `code` is kRankLost and another rank is to blame, the verdict is logged.
  Verdict fail(ExitCode code, const std::string& message);
  // This rank is done; its process must end soon. On rank 0 this returns when all other ranks are done too.
  void leave();

 private:
  RankState state_;
  std::unique_ptr<WatchThread> thread_;
};

}  // namespace parka
