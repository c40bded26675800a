#include "engine/planning/memory_advice.h"

#include "engine/config/config_io.h"
#include "engine/planning/gpu_plan.h"

namespace parka {
namespace {

using nlohmann::json;

// Numbers of GPUs above `num_gpus` that divide the batch into micro-batches.
std::vector<int64_t> possible_gpus(const Config& config, int64_t num_gpus) {
  constexpr int64_t kGpusPerNode = 8, kMostGpus = 1024;
  std::vector<int64_t> result;
  for (int64_t gpus = num_gpus + 1; gpus <= kMostGpus; ++gpus) {
    const bool whole_nodes = gpus <= kGpusPerNode || gpus % kGpusPerNode == 0;
    if (whole_nodes && config.divides_batch(gpus)) result.push_back(gpus);
  }
  return result;
}

std::optional<MemoryAdvice> find_changes(const json& config, std::vector<MemoryChange> possible, int64_t num_gpus,
                                         const MemoryBytes& limit) {
  ChosenChanges chosen(config, std::move(possible), num_gpus);
  if (!chosen.add_until(limit)) return std::nullopt;
  chosen.take_back(limit);
  chosen.keep_copies_within(limit);
  return MemoryAdvice{.changes = chosen.changes(), .num_gpus = num_gpus, .planned = *chosen.planned()};
}

}  // namespace

std::vector<std::string> MemoryAdvice::overrides() const {
  std::vector<std::string> result;
  for (const MemoryChange& change : changes) result.push_back(change.override);
  return result;
}

std::optional<MemoryAdvice> cheapest_changes(const json& config, int64_t num_gpus, int64_t limit_bytes) {
  return find_changes(config, memory_changes(parse_config(config, "config"), num_gpus), num_gpus,
                      {.gpu = limit_bytes});
}

std::optional<MemoryAdvice> fewest_gpus(const json& config, int64_t num_gpus,
                                        const std::function<MemoryBytes(int64_t gpus)>& limit_of, MoreGpus with) {
  const Config read = parse_config(config, "config");
  for (const int64_t gpus : possible_gpus(read, num_gpus)) {
    std::vector<MemoryChange> changes = memory_changes(read, gpus);
    if (with == MoreGpus::kWithStages) {
      std::erase_if(changes, [](const MemoryChange& change) { return change.key() != kZeroStageKey; });
    }
    auto advice = find_changes(config, std::move(changes), gpus, limit_of(gpus));
    if (advice) return advice;
  }
  return std::nullopt;
}

}  // namespace parka
