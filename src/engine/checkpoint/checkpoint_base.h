#pragma once
#include <string>

#include "engine/checkpoint/checkpoint.h"

// A run that trains adapters saves these alone: its checkpoints name their base by path and checksum.
namespace parka {

// In a checkpoint's state, what describe_base() has made.
inline constexpr const char* kBaseKey = "base";

// The state by which attach_base() finds `base` again, of a run or a lone checkpoint in folder `run`.
json describe_base(const LoadedCheckpoint& base, const std::string& run);

// The folder of the base of the checkpoint in this folder with this state; empty where there is none to be found.
std::string find_base(const std::string& checkpoint, const json& state);

// True if the checkpoint's weights are in part in another one.
bool has_base(const LoadedCheckpoint& checkpoint);

// Makes the base's weights those of the checkpoint too, if it has a base: checkpoint.base(). It is looked for where
// the checkpoint names it, where it lay from the checkpoint's run, beside that run, and at `elsewhere`, a folder.
// Throws Error(kBadInput) where it is gone, damaged or another one. All of `ranks` must call this.
void attach_base(LoadedCheckpoint& checkpoint, Communicator& ranks, const std::string& elsewhere);

}  // namespace parka
