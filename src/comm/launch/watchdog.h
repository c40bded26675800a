#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/collective_counter.h"
#include "comm/communicator.h"
#include "comm/launch/roll_call.h"

namespace parka {
class WatchThread;

// What collectives that run beside the host tell the watchdog, which asks from its own thread once a beat.
class CollectiveProbe {
 public:
  virtual ~CollectiveProbe() = default;
  virtual CollectiveCounts counts() const = 0;
  virtual std::string failure() = 0;  // why they cannot go on; empty: nothing is wrong
};

// What a rank reports; told by the thread that trains, read by the watchdog's.
class RankState {
 public:
  void at(int64_t step, std::string_view what);
  void probe(CollectiveProbe* probe);
  RankReport report();
  std::string failure();

  CollectiveCounter host_collectives;

 private:
  std::mutex mutex_;
  RankReport report_;
  CollectiveProbe* probe_ = nullptr;
};

// Sees to it that a run of several ranks ends when one of them cannot go on: dies, hangs, or throws an Error. A
// thread of every rank tells rank 0 once a second, over TCP, what the rank is doing. Rank 0 names the rank that
// is to blame and tells all others, whose threads log one line and end their process at once, whatever the rest of
// it is waiting for. Should rank 0 itself be lost, all others see that. In a run of one rank nothing of this
// exists.
class Watchdog {
 public:
  Watchdog();
  ~Watchdog();

  // All ranks must call it together. `host` names this one in messages; `host_leader` is the lowest rank of its
  // host. Throws the same Error on all ranks when one cannot reach rank 0.
  void start(Communicator& ranks, const std::string& host, int host_leader, const WatchdogTimes& times);
  // How long a rank may stand still while others wait for it. Counts on rank 0.
  void set_stall_seconds(double seconds);

  // What this rank does from now on: the step, counted from 1, and "forward" or "saving a checkpoint"; step 0 is
  // outside of steps, "loading a checkpoint". Also says that the rank gets on: work that takes long should call it
  // now and then. Cheap.
  void at(int64_t step, std::string_view what) { state_.at(step, what); }

  CollectiveCounter& host_collectives() { return state_.host_collectives; }
  // Adds collectives that run beside the host. Must be taken back, with nullptr, before it ends.
  void probe(CollectiveProbe* probe) { state_.probe(probe); }

  // This rank cannot go on. Tells rank 0 and returns what it concludes; the caller must end the process with that.
  Verdict fail(ExitCode code, const std::string& message);
  // This rank is done. Returns, on rank 0, when all others are done too. The process must end soon.
  void leave();

 private:
  RankState state_;
  std::unique_ptr<WatchThread> thread_;
};

}  // namespace parka
