#pragma once
#include "engine/config/config.h"

namespace parka {

// Throws Error(kBadInput) for what config.distributed does not go together with, whatever the number of ranks.
void check_distributed(const Config& config);

}  // namespace parka
