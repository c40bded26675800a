#pragma once
#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace parka {

// Writes the side network of a checkpoint, in a new folder: side_network.safetensors, its weights in fp32 by their
// names and in their order, and side_config.json, which says what it is beside what. docs/finetuning.md describes
// both. Throws Error(kBadInput) if the checkpoint's config has no side network.
void write_side_network(const LoadedCheckpoint& checkpoint, const Config& config, const std::string& out);

}  // namespace parka
