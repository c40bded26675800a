#include "engine/training/metrics_log.h"

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// The metrics that a dead run left, which the one that resumes cuts back.
FUZZ_TARGET(metrics_log) {
  constexpr int64_t kStep = 5;
  const std::string path = folder() / "metrics.jsonl";
  test::write_file(path, std::string(input));
  MetricsLog::truncate_after(path, kStep);
  const std::string kept = test::read_file(path);
  require(kept.size() <= input.size() + 1, "more is kept than there was");
  const MetricsLog::Truncated again = MetricsLog::truncate_after(path, kStep);
  require(again.later == 0 && again.unreadable == 0 && test::read_file(path) == kept,
          "cutting back a second time removes more");
}
