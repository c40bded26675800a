#pragma once
#include <string>

#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "data/token_files.h"

// The token files of a run, as its checkpoints remember them.
namespace parka {

// What a checkpoint keeps of each training file: name, size and fingerprint, and with data.checksum the XXH3-128 of
// all its bytes. All ranks must call this: each reads a share of the files.
nlohmann::json describe_files(const TokenFiles& files, bool checksum, Communicator& communicator);

// What is wrong with training on the files `now` after a checkpoint that kept `saved`, as one line that names a
// file; empty if nothing is. Checksums are compared where both have them.
std::string file_difference(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace parka
