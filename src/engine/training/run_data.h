#pragma once
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "data/token_files.h"
#include "engine/files/json.h"

// The token files of a run, as recorded in its checkpoints.
namespace parka {

// What a checkpoint keeps of each training file: name, size and fingerprint, and with data.checksum the XXH3-128 of
// all its bytes. All ranks must call this: those that see the same files read a share each, which is a heartbeat().
// Throws Error(kBadInput) where copies of ranks differ.
json describe_files(const TokenFiles& files, bool checksum, Communicator& communicator);

// How the files `now` differ from a checkpoint's, `saved`: a line for each. Checksums count if both have them.
std::vector<std::string> file_differences(const json& saved, const json& now);

// Takes over checksums of `saved`, which tells no differences: a start without data.checksum loses none.
void keep_checksums(const json& saved, json& now);

}  // namespace parka
