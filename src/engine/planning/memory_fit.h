#pragma once
#include <cstdint>
#include <functional>
#include <optional>

#include "engine/planning/memory_advice.h"

namespace parka {

// What a step of a config is expected to take, in seconds; nullopt where no measurement tells.
using StepSeconds = std::function<std::optional<double>(const Config&)>;

struct FitRequest {
  GivenConfig config;
  int64_t num_gpus = 1;
  MemoryBytes limit;  // of the plan, for each GPU
  // Changes that give other results are made wherever they are cheaper. Otherwise only as many are allowed, in the
  // order of their list with those of sums first, as it takes for anything to fit.
  bool any_results = false;
  StepSeconds seconds = {};  // empty: the list itself is the order of costs
};

// The cheapest changes with which a run plans at most `limit`: it does not fit without any one of them. By expected
// seconds the few sets that are cheapest by the sum of what each change costs alone are compared; what only changes
// without an expectation make fit has the order of the list. nullopt where all changes are not enough.
std::optional<MemoryAdvice> cheapest_fit(const FitRequest& request);

}  // namespace parka
