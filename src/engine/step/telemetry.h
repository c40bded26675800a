#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "engine/config/config.h"
#include "engine/files/json.h"
#include "kernels/device/arena.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/quantize/quantization_statistics.h"
#include "model/micro_batch.h"
#include "model/model.h"
#include "optim/optimizer.h"

namespace parka {

// Statistics of quantization and attention in one step. docs/telemetry.md says what the numbers tell.
struct TelemetryReport {
  struct Moment {
    size_t parameter = 0;
    std::string name = {};                                 // of the StateKind
    std::array<int32_t, kNumMomentExponents> counts = {};  // as moment_statistics leaves them
    float smallest_amax = 0, largest_amax = 0;
  };
  struct Update {
    size_t parameter;
    double rms, singular_value;
  };
  int64_t tokens = 0;  // of the micro-batch that activations and gradients were sampled from
  std::vector<QuantizationTotals>
      tensors;                             // [blocks][kNumQuantizedTensors], no elements where not in FP8; or empty
  std::vector<AttentionTotals> attention;  // [blocks]
  std::vector<Moment> moments;             // those with range expansion, in the order of parameters
  std::vector<Update> updates;             // of matrices that Muon updates, in the order of parameters
};

// How far the score gradients of a row of a block's attention are from adding up to zero, relative to the products
// that delta sums: the relative error of attention's output. 0 where all sums are 0, NaN without a finite row.
double imbalance(const AttentionTotals& totals);

// The report as records for the metrics, one "attention", and at most one of "quantization", "moments" and
// "updates".
std::vector<ordered_json> telemetry_records(const TelemetryReport& report, int64_t step,
                                            const ParameterTable& table);
// What routers did in that step, in a record "routing".
ordered_json routing_record(const std::vector<ExpertUse>& blocks, int64_t step);

// A report on its way to the host.
struct PendingTelemetry {
  TelemetryReport report;                                            // sized, without numbers
  std::vector<MatrixUpdates::Matrix> matrices;                       // of its updates
  std::unique_ptr<HostRead> tensors, attention, counts, amax, sums;  // null where there is nothing to read

  // Waits for the report and for nothing queued after it.
  TelemetryReport wait();
};

// Takes reports of a run at every telemetry.interval steps.
class Telemetry {
 public:
  // Declares what it and the model need in category "telemetry".
  Telemetry(const Config& config, Model& model, Optimizer& optimizer, MemoryPlan& plan);
  void bind(const Arena& arena);

  bool is_due(int64_t step) const { return step % interval_ == 0; }
  // Queues the report of a step of which a micro-batch ran with telemetry, after its update.
  PendingTelemetry queue(Device& device, const Model& model, const Optimizer& optimizer) const;

 private:
  int64_t interval_;
  int64_t tokens_;
  // The parameter and the state's number of each moment.
  std::vector<std::pair<size_t, size_t>> moments_;
  TensorId counts_id_, amax_id_;  // of all moments; invalid without range expansion
  TensorView counts_, amax_;      // int32 [moments, kNumMomentExponents], fp32 [moments, 2]
};

struct Warning {
  bool raised;          // or lifted
  ordered_json record;  // of kind "warning"
  std::string line;     // for the log
};

// Watches a number of each block. Raises a warning when the largest is above a limit in so many reports in a row,
// and lifts it when the largest is below another limit in as many.
class BlockWatch {
 public:
  // Of the imbalance() of attention (docs/telemetry.md). A norm of queries and keys bounds the scores, so with
  // model.qk_norm the limit is ten times the usual 0.01.
  static BlockWatch of_attention(const Config& config);
  // Of a mixture's routing, step by step after the warm-up (docs/moe.md). Never lifted.
  static BlockWatch of_expert_load(const Config& config);
  static BlockWatch of_idle_experts(const Config& config);

  // The numbers of a report, in the order of the steps. Reports without a finite number do not count.
  std::optional<Warning> add(std::span<const double> blocks, int64_t step);

 private:
  struct Kind {
    const char *about, *key;      // in the record
    const char *raised, *lifted;  // lines of a step, the number, its block and the limit
    int reports;
    int64_t warmup_steps = 0;  // whose reports do not count
  };
  static BlockWatch of_routing(const Config& config, const char* key, const char* raised, double share,
                               double equal, double same);
  BlockWatch(const Kind& kind, double raised_above, double lifted_below)
      : kind_(kind), raised_above_(raised_above), lifted_below_(lifted_below) {}

  Kind kind_;
  double raised_above_, lifted_below_;
  bool raised_ = false;
  int in_a_row_ = 0;  // reports that speak for a change
};

}  // namespace parka
