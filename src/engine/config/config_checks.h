#pragma once
#include <string>

#include "engine/config/config.h"

namespace parka {

// Says so where a value is valid and seldom meant.
void warn_of_odd_values(const Config& config);

// For messages that name a number of ranks; empty where none of them share sequences.
std::string sharing_ranks(const Config& config);  // ", of which 2 share each sequence"; or divide experts

// Says why a step of so many ranks has no whole micro-batches; empty if it has.
std::string indivisible_batch(const Config& config, int64_t num_ranks);
void require_whole_micro_batches(const Config& config, int64_t num_ranks);  // throws it as Error(kBadInput)

}  // namespace parka
