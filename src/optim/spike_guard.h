#pragma once
#include <cstdint>
#include <deque>
#include <vector>

namespace parka {

// Finds steps whose loss or gradient norm stands out from those of the steps before, as OLMo 2's trainer does
// (arXiv 2501.00656, section 3.2; SkipStepOptimizer of OLMo-core): more than six standard deviations above their
// mean over the last `window` steps. All ranks see the same numbers, so all come to the same limits.
class SpikeGuard {
 public:
  // window: training.spike_window, 0 for no limits.
  explicit SpikeGuard(int64_t window) : window_(window) {}

  struct Step {
    double loss;  // mean, in nats per token
    double grad_norm;
  };
  // The limits of the next step: infinity until half a window of steps, two at least, has been added.
  Step limits() const;
  // A step that was done or skipped. One that is not finite says nothing of the others and is left out.
  void add(const Step& step);

  // The steps in the window, the oldest first. With them a resumed run skips what an uninterrupted one skips.
  std::vector<Step> steps() const { return {steps_.begin(), steps_.end()}; }
  void restore(const std::vector<Step>& steps);

 private:
  double limit(double Step::*value) const;

  int64_t window_;
  std::deque<Step> steps_;
};

}  // namespace parka
