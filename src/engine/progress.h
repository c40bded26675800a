#pragma once
#include <cstdint>
#include <string>

#include "engine/speed.h"
#include "engine/training_run.h"

namespace parka {

std::string format_count(double value);       // 1234567 -> "1.23M"
std::string format_duration(double seconds);  // 4000 -> "1h06m"

// Turns step reports into progress lines; speed is that of the steps since the previous line.
class Progress {
 public:
  Progress(int64_t total_steps, int64_t tokens_per_step, const ModelSpeed& speed)
      : total_steps_(total_steps), tokens_per_step_(tokens_per_step), speed_(speed) {}

  void add(const StepReport& report);
  // "step  120/1000  tokens 1.97M  loss 2.1234  norm 0.87  lr 2.90e-03  31.2k tok/s  602 TFLOP/s
  // MFU 60.9%  ETA 4m12s" for the last step added: reads well in a terminal and in a log file. MFU only for cards
  // whose peak is known. Starts a new interval.
  std::string take_line();

 private:
  int64_t total_steps_, tokens_per_step_;
  ModelSpeed speed_;
  StepReport last_;
  int64_t interval_steps_ = 0;
  double interval_seconds_ = 0;
  double seconds_per_step_ = 0;  // smoothed over intervals, for the ETA
};

}  // namespace parka
