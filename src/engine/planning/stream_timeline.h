#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace parka {

// The clock of a device with two streams: one computes, on the other collectives run in their order, each as soon
// as the work that was queued before it is done. All times are in seconds from the start.
class StreamTimeline {
 public:
  // Work that takes `seconds` with no collective beside it.
  void compute(double seconds);
  // While it runs, work gets on at 1 - interference of its speed; interference is in [0, 1).
  void collective(double seconds, double interference);
  // Later work starts when collective `number` is over; they count from 1, and 0 is none.
  void wait(uint64_t number);

  double now() const { return now_; }  // when the work queued so far is done
  // Parts of now(): what work took longer for collectives beside it, and what it waited for them.
  double slowed_seconds() const { return slowed_; }
  double exposed_seconds() const { return exposed_; }
  // All collectives, one after the other.
  double communication_seconds() const { return communication_; }

 private:
  struct Collective {
    double end, interference;
  };
  std::vector<Collective> collectives_;
  size_t running_ = 0;  // the first of them that may not be over
  double now_ = 0, slowed_ = 0, exposed_ = 0, communication_ = 0;
};

}  // namespace parka
