#pragma once
#include <string>

#include "engine/config/config.h"

namespace parka {

// Says so where a value is valid and seldom meant.
void warn_of_odd_values(const Config& config);

// For messages that name a number of ranks or GPUs; empty where none of them share sequences.
std::string sharing_ranks(const Config& config);       // ", of which 2 share each sequence"; or divide experts
std::string divided_by_context(const Config& config);  // " / distributed.context_parallel 2"

}  // namespace parka
