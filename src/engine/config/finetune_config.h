#pragma once
#include "engine/config/config.h"

namespace parka {

// Throws Error(kBadInput) for what config.finetune does not go together with.
void check_finetune(const Config& config);

}  // namespace parka
