#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
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
  int64_t tokens = 0;  // of the micro-batch that activations and gradients were sampled from
  std::vector<QuantizationTotals>
      tensors;                             // [blocks][kNumQuantizedTensors], no elements where not in FP8; or empty
  std::vector<AttentionTotals> attention;  // [blocks]
  std::vector<Moment> moments;             // those with range expansion, in the order of parameters
};

// How far the score gradients of a row of a block's attention are from adding up to zero, relative to the products
// that delta sums: the relative error of attention's output. 0 where all sums are 0, NaN without a finite row.
double imbalance(const AttentionTotals& totals);

// The report as records for the metrics, one "attention", and at most one "quantization" and one "moments".
std::vector<ordered_json> telemetry_records(const TelemetryReport& report, int64_t step,
                                            const ParameterTable& table);
// What routers did in that step, in a record "routing".
ordered_json routing_record(const std::vector<ExpertUse>& blocks, int64_t step);

// A report on its way to the host.
class PendingTelemetry {
 public:
  PendingTelemetry(TelemetryReport report, std::unique_ptr<HostRead> tensors, std::unique_ptr<HostRead> attention,
                   std::unique_ptr<HostRead> counts, std::unique_ptr<HostRead> amax)
      : report_(std::move(report)),
        tensors_(std::move(tensors)),
        attention_(std::move(attention)),
        counts_(std::move(counts)),
        amax_(std::move(amax)) {}
  // Waits for the report and for nothing queued after it.
  TelemetryReport wait();

 private:
  TelemetryReport report_;  // sized, without numbers
  std::unique_ptr<HostRead> tensors_, attention_, counts_, amax_;
};

// Takes reports of a run at every telemetry.interval steps.
class Telemetry {
 public:
  // Declares what it and the model need in category "telemetry".
  Telemetry(const Config& config, Model& model, const Optimizer& optimizer, MemoryPlan& plan);
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

// Warns of runs whose attention drifts (docs/telemetry.md): raised when the largest
// imbalance of a block is above the limit in kReports reports in a row, and lifted when it is below half of the
// limit in as many.
class AttentionWatch {
 public:
  static constexpr int kReports = 3;

  struct Change {
    bool raised;       // or lifted
    int64_t block;     // with the largest imbalance
    double imbalance;  // its own
    double limit;
  };

  explicit AttentionWatch(double limit) : limit_(limit) {}
  // A norm of queries and keys bounds the scores, so with model.qk_norm the limit is ten times the usual 0.01.
  explicit AttentionWatch(const Config& config);
  // The blocks of a report, in the order of the steps. Reports without a finite imbalance do not count.
  std::optional<Change> add(const std::vector<AttentionTotals>& blocks);

 private:
  double limit_;
  bool raised_ = false;
  int in_a_row_ = 0;  // reports that speak for a change
};

// For a change after a step, the record of kind "warning", and the line for the terminal.
ordered_json warning_record(const AttentionWatch::Change& change, int64_t step);
std::string warning_line(const AttentionWatch::Change& change, int64_t step);

}  // namespace parka
