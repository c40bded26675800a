#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/collective_counter.h"
#include "core/error.h"

namespace parka {

// In seconds.
struct WatchdogTimes {
  double beat = 1;       // between two heartbeats of a rank
  double silence = 20;   // without a heartbeat, until a rank counts as hung
  double stall = 600;    // without progress while others wait, until a rank counts as hung
  double settle = 0.25;  // from the first failure to the verdict, for reports that may explain it
  double connect = 30;   // at the start, for all ranks to connect to rank 0
};

// A rank's report about itself with every heartbeat.
struct RankReport {
  int64_t step = 0;
  uint64_t calls = 0;  // of heartbeat()
  CollectiveCounts collectives;
  std::string what;  // "backward blocks.3"

  bool operator==(const RankReport&) const = default;
};

// "in step 12, backward blocks.3, in collective 513"; outside of steps only report.what.
std::string describe(const RankReport& report);

// Why a run ends; the same on all ranks.
struct Verdict {
  ExitCode code = ExitCode::kRankLost;
  int rank = 0;         // the rank to blame
  bool common = false;  // all ranks failed with this message
  std::string message;  // what that rank threw, or "rank 1 (node2, pid 4242) died, last heard of in step 12"
};

// Rank 0's knowledge of all ranks, and its conclusions. Time is in seconds of any steady clock. Has no thread
// and no network.
class RollCall {
 public:
  // `names`: how messages name the ranks, such as "rank 1 (node2, pid 4242)".
  RollCall(std::vector<std::string> names, const WatchdogTimes& times, double now);

  void heard(int rank, const RankReport& report, double now);
  // The rank threw an Error, or reports that its collectives have failed.
  void failed(int rank, ExitCode code, const std::string& message, double now);
  // Its connection closed without goodbye.
  void lost(int rank, double now);
  void left(int rank);  // it said goodbye
  bool all_left() const;
  // Rank 0 itself was not running for a while: silence in that time means nothing.
  void forgive(double now);
  void set_stall_seconds(double seconds) { times_.stall = seconds; }

  // The verdict, if the run must end. Call it after every event and periodically.
  std::optional<Verdict> verdict(double now) const;

 private:
  enum class State { kAlive, kFailed, kLost, kLeft };
  struct Rank {
    std::string name;
    State state = State::kAlive;
    RankReport report;
    double heard = 0;     // last beat
    double advanced = 0;  // last beat that differed from the one before
    ExitCode code = ExitCode::kOk;
    std::string message;
  };

  Verdict worst_news() const;
  std::optional<Verdict> silence(double now) const;
  std::optional<Verdict> stall(double now) const;

  std::vector<Rank> ranks_;
  WatchdogTimes times_;
  std::optional<double> first_bad_news_;
};

}  // namespace parka
