#pragma once
#include <functional>
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

}  // namespace parka
