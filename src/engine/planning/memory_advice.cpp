#include "engine/planning/memory_advice.h"

#include <string_view>

#include <fmt/format.h>

#include "engine/planning/gpu_plan.h"

namespace parka {
namespace {

constexpr int64_t kMostGpus = 1024;

// Numbers of GPUs above `num_gpus` that divide the batch into micro-batches.
std::vector<int64_t> possible_gpus(const Config& config, int64_t num_gpus) {
  constexpr int64_t kGpusPerNode = 8;
  std::vector<int64_t> result;
  for (int64_t gpus = num_gpus + 1; gpus <= kMostGpus; ++gpus) {
    const bool whole_nodes = gpus <= kGpusPerNode || gpus % kGpusPerNode == 0;
    if (whole_nodes && config.divides_batch(gpus)) result.push_back(gpus);
  }
  return result;
}

std::optional<MemoryAdvice> find_changes(const GivenConfig& config, std::vector<MemoryChange> possible,
                                         int64_t num_gpus, const MemoryBytes& limit) {
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

std::optional<MemoryAdvice> cheapest_changes(const GivenConfig& config, int64_t num_gpus, int64_t limit_bytes) {
  return find_changes(config, memory_changes(config.with({}), num_gpus), num_gpus, {.gpu = limit_bytes});
}

std::optional<MemoryAdvice> fewest_gpus(const GivenConfig& config, int64_t num_gpus,
                                        const std::function<MemoryBytes(int64_t gpus)>& limit_of, MoreGpus with) {
  const Config read = config.with({});
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

std::string advice_without_gpus(const Config& config, int64_t num_gpus) {
  constexpr std::string_view kSmaller = "use a smaller model or a shorter data.sequence_length";
  if (num_gpus >= kMostGpus) return std::string(kSmaller);
  return fmt::format(
      "{}, or a larger training.global_batch_size, as {} is divided by no number of GPUs up to {} that is enough",
      kSmaller, config.training.global_batch_size, kMostGpus);
}

}  // namespace parka
