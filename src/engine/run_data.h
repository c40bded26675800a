#pragma once
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "data/token_files.h"
#include "engine/config.h"

// The token files of a run, as its config asks for them and as its checkpoints remember them.
namespace parka {

ExampleRules example_rules(const DataConfig& data);

// Throws Error(kBadInput) for data that cannot be used.
TokenFiles open_token_files(const std::vector<std::string>& sources, const Config& config);

// XXH3-128 of all bytes of a file, as xxh128sum prints it.
std::string checksum_of(const ReadOnlyFile& file);

// What a checkpoint keeps of each training file: name, size and fingerprint, and with data.checksum the XXH3-128 of
// all its bytes. All ranks must call this: each reads a share of the files.
nlohmann::json describe_files(const TokenFiles& files, bool checksum, Communicator& communicator);

// What is wrong with training on the files `now` after a checkpoint that kept `saved`, as one line that names a
// file; empty if nothing is. Checksums are compared where both have them.
std::string file_difference(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace parka
