#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/config/config.h"
#include "kernels/ops/attention/attention.h"

namespace parka {

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
  // A norm of queries and keys bounds the scores, so that they do not grow where queries drift: with model.qk_norm
  // the limit is ten times the usual 0.01.
  explicit AttentionWatch(const Config& config);
  // The blocks of a report, in the order of the steps. Reports without a finite imbalance do not count.
  std::optional<Change> add(const std::vector<AttentionTotals>& blocks);

 private:
  double limit_;
  bool raised_ = false;
  int in_a_row_ = 0;  // reports that speak for a change
};

// For a change after a step, the record of kind "warning", and the line for the terminal.
nlohmann::ordered_json warning_record(const AttentionWatch::Change& change, int64_t step);
std::string warning_line(const AttentionWatch::Change& change, int64_t step);

}  // namespace parka
