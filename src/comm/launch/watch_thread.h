#pragma once
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/launch/line_socket.h"
#include "comm/launch/roll_call.h"
#include "comm/launch/watchdog.h"

// The thread of the watchdog. On rank 0 it receives the reports of all ranks and decides; elsewhere it reports to
// rank 0. They exchange lines of text:
//   both:             beat STEP CALLS REACHED FINISHED WHAT    a heartbeat
//   other to rank 0:  fail CODE RANK COMMON MESSAGE            this rank has failed
//                     bye                                      this rank is done
//   rank 0 to other:  end CODE RANK COMMON MESSAGE             the verdict
namespace parka {

std::string beat_line(const RankReport& report);
std::string verdict_line(const char* kind, const Verdict& verdict);

struct WatchMessage {
  enum class Kind { kUnknown, kBeat, kFail, kBye, kEnd };
  Kind kind = Kind::kUnknown;
  RankReport report;  // kBeat
  Verdict verdict;    // kFail, kEnd
};
WatchMessage parse_watch_line(const std::string& line);

class WatchThread {
 public:
  // `peers[r]` is the connection to rank r: on rank 0 to all others, elsewhere to rank 0 alone. Throws
  // Error(kBadInput) if the system allows no further thread. It does nothing before start().
  WatchThread(int rank, std::vector<std::string> names, std::vector<std::unique_ptr<LineSocket>> peers,
              const WatchdogTimes& times, RankState& state);
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  void start();
  Verdict fail(ExitCode code, const std::string& message);
  void leave();
  void set_stall_seconds(double seconds);

 private:
  // The requests of the training thread or its collectives since the last call.
  struct Requests {
    bool stop = false, leave = false;
    std::optional<Verdict> failure;  // reported once
    std::optional<double> stall_seconds;
  };
  Requests take_requests();
  void wake() const;

  bool decides() const { return rank_ == 0; }
  void run();
  void beat(double now);
  void tell(const std::string& line) const;
  // Rank 0's verdict, if it has come.
  std::optional<Verdict> listen();
  std::optional<Verdict> hear(int rank, LineSocket& peer);
  // Tells it to all, and returns when they have read it and closed; does not wait for ranks that hang.
  void part_with(const std::string& line, double seconds);
  // Logs the verdict and ends the process. If the training thread waits in fail(), hands the verdict to it instead.
  void conclude(const Verdict& verdict);
  void announce(const Verdict& verdict) const;
  // True if this thread, or the whole process, was not running for so long that it cannot judge the silence of
  // others.
  bool was_asleep(double now);

  const int rank_;
  const std::vector<std::string> names_;
  const WatchdogTimes times_;
  RankState& state_;
  std::vector<std::unique_ptr<LineSocket>> peers_;
  RollCall roll_;  // of all ranks, or of rank 0 alone

  int wake_fd_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Requests requests_;
  bool started_ = false, waits_for_verdict_ = false, done_ = false, told_failure_ = false;
  std::optional<Verdict> verdict_;
  double last_run_;
};

}  // namespace parka
