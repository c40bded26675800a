#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace parka {

// The clock of a device with two streams: one computes, on the other collectives run in their order, each as soon
// as the work that was queued before it is done. Beside them tensors pass between host memory and the device, in
// both directions at once, as HostStream (kernels/device/device.h) orders them; that slows nothing. All times are
// in seconds from the start.
class StreamTimeline {
 public:
  // Work that takes `seconds` with no collective beside it.
  void compute(double seconds);
  // While it runs, work gets on at 1 - interference of its speed; interference is in [0, 1).
  void collective(double seconds, double interference);
  // Later work starts when collective `number` is over; they count from 1, and 0 is none.
  void wait(uint64_t number);

  // HostStream's calls, with the seconds that the copies take.
  void follow_device();
  void load(size_t slot, double seconds);
  void wait_loaded(size_t slot);
  void save(double seconds);
  void wait_saved();

  // Acts as if what was queued since `before` were queued so many times more, each of which takes as long.
  void repeat_since(const StreamTimeline& before, int64_t times);

  double now() const { return now_; }  // when the work queued so far is done
  // Parts of now(): what work took longer for collectives beside it, and what it waited for them.
  double slowed_seconds() const { return slowed_; }
  double exposed_seconds() const { return exposed_; }
  double host_exposed_seconds() const { return host_exposed_; }  // waited for copies to or from host memory
  // All collectives, one after the other.
  double communication_seconds() const { return communication_; }

 private:
  void wait_for_host(double until);
  double collectives_end() const { return collectives_.empty() ? now_ : collectives_.back().end; }

  struct Collective {
    double end, interference;
  };
  std::vector<Collective> collectives_;
  size_t running_ = 0;  // the first of them that may not be over
  double now_ = 0, slowed_ = 0, exposed_ = 0, communication_ = 0;
  double loads_end_ = 0, saves_end_ = 0, host_exposed_ = 0;
  std::map<size_t, double> loaded_;  // when each buffer is
};

}  // namespace parka
