#pragma once
#include <string>
#include <vector>

#include "data/token_files.h"
#include "engine/config/config.h"

// The token files that a config or a command names.
namespace parka {

// The files of a set of token files, by its name.
struct NamedFiles {
  std::string name;
  std::vector<std::string> files;
};
// The sets that entries NAME=FILE define, in order of first mention; entries with the same name are one set. Throws
// Error(kBadInput), naming `key`, for an entry that does not have this form.
std::vector<NamedFiles> parse_sets(const std::vector<std::string>& entries, const char* key);

// All entries of data.eval and evaluation.sets.
std::vector<std::string> held_out_sources(const Config& config);

ExampleRules example_rules(const Config& config);

// Throws Error(kBadInput) for data that cannot be used, contradict what lies beside them, or have too many images.
TokenFiles open_token_files(const std::vector<std::string>& sources, const Config& config);
// Those of data.train; likewise also where one of its sources has no target, or has what is held out.
TokenFiles open_training_files(const Config& config);
// Says so where a few sequences of data.train, opened as `files`, have what is seldom meant.
void warn_of_training_files(const TokenFiles& files, const Config& config);

// Throws Error(kBadInput) for token files of `config` that a run would refuse, and warns as it would. Those that
// are not there are passed over: a config may be checked where its data are not.
void check_present_files(Config config);

}  // namespace parka
