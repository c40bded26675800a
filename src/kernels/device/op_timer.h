#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace parka {

// The part of a step that an op belongs to. recording_device.h has their names.
enum class StepSection : uint8_t {
  kNone,
  kEmbedding,
  kBlockForward,
  kHead,
  kBlockBackward,
  kOptimizer,
  kTelemetry
};

// The kind of an op's GEMMs, which decides what they are measured against.
enum class Products : uint8_t { kNone, kGemm, kAttentionForward, kAttentionBackward };

// Ends the shape of an op that adds to what its output holds, where others of its kind overwrite it.
inline constexpr std::string_view kOntoOutput = " +=";

// The least an op must do, whatever the implementation: what its time is measured against.
struct OpCost {
  double bytes = 0;   // each input read once, each output written once
  double flop = 0;    // of GEMMs; 0 for ops that only move memory
  std::string shape;  // of the problem, for tables: "8192 x 4096 x 11008"
  Products products = Products::kNone;
};

// The name under which timers have it that ops wait for copies or collectives; its shape says for what.
inline constexpr std::string_view kWaitOp = "wait";

struct OpTime {
  StepSection section;  // by Device::section()
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

  StepSection section = StepSection::kNone;  // of the ops that follow
};

// Takes note of ops in their place: they are not run (recording_device.h).
class OpRecorder {
 public:
  virtual ~OpRecorder() = default;
  // `workspace_bytes`: that the op takes on a GPU.
  virtual void record(std::string_view op, OpCost cost, int64_t workspace_bytes) = 0;
};

}  // namespace parka
