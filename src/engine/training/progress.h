#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "core/log/work_progress.h"
#include "engine/training/speed.h"
#include "engine/training/training_run.h"
#include "model/parameter_table.h"

namespace parka {

std::string format_count(double value);  // 1234567 -> "1.23M"
// "6.92B parameters, of which a token uses 1.28B", or without the second number where it uses all.
std::string parameters_text(const ParameterTable& table);

// Makes progress lines from step reports. Speed is that of the steps since the previous line, by the device's time.
// The time left is based on the wall clock, so saves and evaluation count.
class Progress {
 public:
  // The run has so many cards; `clock` gives seconds.
  Progress(int64_t total_steps, int64_t tokens_per_step, const ModelSpeed& speed, int num_cards,
           std::function<double()> clock = steady_seconds)
      : total_steps_(total_steps),
        tokens_per_step_(tokens_per_step),
        speed_(speed),
        num_cards_(num_cards),
        clock_(std::move(clock)),
        last_line_(clock_()) {}

  void add(const StepReport& report, double goodput);
  // "step  120/1000  tokens 1.97M  loss 2.1234  norm 0.87  lr 2.90e-03  31.2k tok/s  602 TFLOP/s MFU 60.9%  goodput
  // 99.2%  ETA 4m12s" for the last step added: scalars follow the norm, MFU needs a known peak. Of `columns`,
  // unless they are 0, it takes fewer, with the share of the steps and without what fits least. Starts an interval.
  std::string take_line(size_t columns = 0);

 private:
  int64_t total_steps_, tokens_per_step_;
  ModelSpeed speed_;
  int num_cards_;
  std::function<double()> clock_;
  double last_line_;
  StepReport last_;
  double goodput_ = 0;
  int64_t interval_steps_ = 0;
  double interval_seconds_ = 0;
  double wall_per_step_ = 0;  // smoothed over intervals, for the ETA
};

}  // namespace parka
