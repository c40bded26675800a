#pragma once
#include "engine/config/config.h"

namespace parka {

// Throws Error(kBadInput) for what config.finetune does not go together with.
void check_finetune(const Config& config);

// Says so where a new run of this config would leave weights as they begin at random.
void warn_of_random_weights(const Config& config);

}  // namespace parka
