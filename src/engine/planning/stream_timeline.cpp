#include "engine/planning/stream_timeline.h"

#include <algorithm>

#include "core/error.h"

namespace parka {

void StreamTimeline::compute(double seconds) {
  PARKA_REQUIRE(seconds >= 0);
  // Collectives that are queued waited for nothing later than now: they run without a gap from here on.
  for (; running_ < collectives_.size(); ++running_) {
    const Collective& beside = collectives_[running_];
    const double time = std::max(0.0, beside.end - now_), done = time * (1 - beside.interference);
    if (done > seconds) break;
    now_ += time;
    slowed_ += time - done;
    seconds -= done;
  }
  const double speed = running_ < collectives_.size() ? 1 - collectives_[running_].interference : 1;
  now_ += seconds / speed;
  slowed_ += seconds / speed - seconds;
}

void StreamTimeline::collective(double seconds, double interference) {
  PARKA_REQUIRE(seconds >= 0 && interference >= 0 && interference < 1);
  communication_ += seconds;
  collectives_.push_back({std::max(now_, collectives_end()) + seconds, interference});
}

void StreamTimeline::wait(uint64_t number) {
  PARKA_REQUIRE(number <= collectives_.size());
  if (number == 0 || collectives_[number - 1].end <= now_) return;
  exposed_ += collectives_[number - 1].end - now_;
  now_ = collectives_[number - 1].end;
}

void StreamTimeline::follow_device() { loads_end_ = std::max(loads_end_, now_); }

void StreamTimeline::load(size_t slot, double seconds) {
  loads_end_ = std::max(loads_end_, saves_end_) + seconds;
  loaded_[slot] = loads_end_;
}

void StreamTimeline::wait_loaded(size_t slot) { wait_for_host(loaded_.at(slot)); }

void StreamTimeline::save(double seconds) { saves_end_ = std::max(saves_end_, now_) + seconds; }

void StreamTimeline::wait_saved() { wait_for_host(saves_end_); }

void StreamTimeline::repeat_since(const StreamTimeline& before, int64_t times) {
  const auto repeat = [&](double& value, double value_before) {
    value += static_cast<double>(times) * (value - value_before);
  };
  // The collectives of the last time are the only ones that later work can wait for, or run beside.
  const double later = static_cast<double>(times) * (collectives_end() - before.collectives_end());
  for (size_t i = before.collectives_.size(); i < collectives_.size(); ++i) collectives_[i].end += later;
  for (auto& [slot, end] : loaded_) {
    if (const auto found = before.loaded_.find(slot); found != before.loaded_.end()) repeat(end, found->second);
  }
  repeat(now_, before.now_);
  repeat(slowed_, before.slowed_);
  repeat(exposed_, before.exposed_);
  repeat(communication_, before.communication_);
  repeat(loads_end_, before.loads_end_);
  repeat(saves_end_, before.saves_end_);
  repeat(host_exposed_, before.host_exposed_);
}

void StreamTimeline::wait_for_host(double until) {
  if (until <= now_) return;
  host_exposed_ += until - now_;
  now_ = until;
}

}  // namespace parka
