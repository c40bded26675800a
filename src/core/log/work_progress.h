#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace parka {

std::string format_duration(double seconds);  // 4000 -> "1h06m"
double steady_seconds();                      // of a clock that never goes back

// Work that may take long: from its fifth second on the log has its share and the time left every ten seconds, and
// a terminal twice a second. Any thread may call add().
class WorkProgress {
 public:
  // `what` is "evaluating 1907 sequences", and all of it `total` of add().
  WorkProgress(std::string what, int64_t total, std::function<double()> clock = steady_seconds);
  WorkProgress& operator=(WorkProgress&&) = delete;
  ~WorkProgress();          // its line on a terminal goes
  bool add(int64_t count);  // whether the log has heard of it

 private:
  std::string what_;
  int64_t total_, done_ = 0;
  std::function<double()> clock_;
  double begun_, next_;
  bool is_shown_ = false;  // on a terminal
  std::mutex mutex_;
};

}  // namespace parka
