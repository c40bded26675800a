#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace parka {

// The least an op must do, whatever the implementation: what its time is measured against.
struct OpCost {
  double bytes = 0;   // each input read once, each output written once
  double flop = 0;    // of matrix products; 0 for ops that only move memory
  std::string shape;  // of the problem, for tables: "8192 x 4096 x 11008"
};

// The name under which timers have it that ops wait for copies or collectives; its shape says for what.
inline constexpr std::string_view kWaitOp = "wait";

struct OpTime {
  std::string section;  // the part of the step that it belongs to, by Device::section()
  std::string op;
  OpCost cost;
  double seconds;
};

// Measures every op that runs on a device between Device::start_op_timer() and Device::stop_op_timer().
class OpTimer {
 public:
  virtual ~OpTimer() = default;
  virtual void begin(std::string_view op, OpCost cost) = 0;
  virtual void end() = 0;

  std::string section;  // of the ops that follow
};

}  // namespace parka
