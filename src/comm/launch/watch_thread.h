#pragma once
#include <condition_variable>
#include <functional>
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
//   other to rank 0:  fail CODE MESSAGE                        this rank has failed
//                     bye                                      this rank is done
//   rank 0 to other:  end CODE RANK COMMON MESSAGE             the verdict
namespace parka {

std::string beat_line(const RankReport& report);
std::string fail_line(ExitCode code, const std::string& message);
std::string end_line(const Verdict& verdict);

struct WatchMessage {
  enum class Kind { kUnknown, kBeat, kFail, kBye, kEnd };
  Kind kind = Kind::kUnknown;
  RankReport report;  // kBeat
  Verdict verdict;    // kEnd; kFail has only its code and message
};
WatchMessage parse_watch_line(const std::string& line);

class WatchThread {
 public:
  WatchThread(int rank, std::vector<std::string> names, const WatchdogTimes& times, RankState& state);
  virtual ~WatchThread();  // stop() must have been called
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  // Creates the thread, which does nothing yet. Throws Error(kBadInput) if the system allows no further thread.
  void prepare();
  void start();
  void stop();

  Verdict fail(ExitCode code, const std::string& message);
  void leave();
  void set_stall_seconds(double seconds);

 protected:
  struct Failure {
    ExitCode code;
    std::string message;
  };

  // The requests of the training thread or its collectives since the last call.
  struct Requests {
    bool stop = false, leave = false;
    std::optional<Failure> failure;  // reported once
    std::optional<double> stall_seconds;
  };
  Requests take_requests();

  virtual void run() = 0;
  // Logs the verdict and ends the process. If the training thread waits in fail(), hands the verdict to it instead;
  // run() must then return.
  void conclude(const Verdict& verdict, const std::function<void()>& before_the_end = {});
  // True if this thread, or the whole process, was not running for so long that it cannot judge the silence of
  // others. Call it once per round, with the same `now` that the judgement uses.
  bool was_asleep(double now);
  int wake_fd() const { return wake_fd_; }
  void clear_wake() const;

  const int rank_;
  const std::vector<std::string> names_;
  const WatchdogTimes times_;
  RankState& state_;

 private:
  void wake() const;
  void announce(const Verdict& verdict) const;

  int wake_fd_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Requests requests_;
  bool started_ = false, waits_for_verdict_ = false, done_ = false, told_failure_ = false;
  std::optional<Verdict> verdict_;
  double last_run_;
};

// `others[r]` is the connection to rank r; null for rank 0 itself.
std::unique_ptr<WatchThread> make_watch_hub(std::vector<std::unique_ptr<LineSocket>> others,
                                            std::vector<std::string> names, const WatchdogTimes& times,
                                            RankState& state);
std::unique_ptr<WatchThread> make_watch_client(std::unique_ptr<LineSocket> hub, int rank,
                                               std::vector<std::string> names, const WatchdogTimes& times,
                                               RankState& state);

}  // namespace parka
