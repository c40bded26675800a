#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

// How long a start waits, and what it says meanwhile.
namespace parka {

// In seconds.
struct WaitTimes {
  double limit = 300;
  double notice = 5;  // until the log says who waits for whom, which it then does every minute
};

// In seconds.
struct StartTimes {
  double rendezvous = 300;  // until all ranks must be there
  double agreement = 60;    // that a rank may take from then on until the watchdog watches over it
  double notice = 5;        // see WaitTimes
};

// As start_thread() (core/parallel.h). Signals are for the main thread.
std::thread start_without_signals(std::string_view task, std::function<void()> body);

// Says for whom a start waits, for those who wait in a loop of short rounds.
class WaitNotice {
 public:
  static constexpr double kRound = 0.2;  // in seconds, no longer

  explicit WaitNotice(const WaitTimes& times);
  // To be called in every round. `what()` is "rank 1 waits for rank 0 at node1, TCP port 29500". False once the
  // limit is reached. A round that lasts longer, as the process was stopped, counts as half of the limit at most.
  bool goes_on(const std::function<std::string()>& what);
  double waited() const { return waited_; }

 private:
  WaitTimes times_;
  double waited_ = 0, last_, next_;
};

// The same for a wait that does not come back, as MPI_Init where a rank is missing: a thread speaks, and ends the
// process with kRankLost after the limit.
class WaitLimit {
 public:
  // `what` is as that of a WaitNotice; `hint` says what may be the matter.
  WaitLimit(std::string what, std::string hint, const WaitTimes& times);
  ~WaitLimit();  // the wait is over
  WaitLimit(const WaitLimit&) = delete;
  WaitLimit& operator=(const WaitLimit&) = delete;

 private:
  void run();

  const std::string what_, hint_;
  const WaitTimes times_;
  bool over_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace parka
