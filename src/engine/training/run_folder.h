#pragma once
#include <chrono>
#include <string>

#include "comm/launch/launch.h"

// Checks of `parka train` before it trains in a run folder: that it overwrites no foreign file, that all names
// which a save needs are short enough, and that all ranks see the same folder.
namespace parka {

// Call it before anything is written. Throws Error(kBadInput) if the folder holds a config.json that no run wrote
// (unless it is `config_text`, which a run would write), a metrics.jsonl that no run wrote, or data or weights
// beside no run, or if its path is too long for the files of a save.
void check_run_folder(const std::string& folder, const std::string& config_text);

// Writes config.json, the resolved config of the run, unless the command line names that very file.
void write_run_config(const std::string& folder, const std::string& config_text,
                      const std::string& file_of_command_line);

// Removes the test files of killed starts. For the run that has locked the folder.
void clear_write_tests(const std::string& folder);

// Throws the same Error(kBadInput) on all ranks if some do not see the folder of rank 0 under this name; it names
// these ranks and their paths. All ranks must call this; the folder of rank 0 exists.
void require_one_folder(Launch& launch, const std::string& folder,
                        std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace parka
