#pragma once
#include <chrono>
#include <string>

#include "comm/launch/launch.h"

// What `parka train` makes sure of before it trains in a run folder: that it takes nobody's file, that every name
// which a save needs can be given, and that all ranks mean the same folder.
namespace parka {

// To be called before anything is written. Throws Error(kBadInput) when the folder holds a config.json that no run
// wrote (unless it is `config_text`, which a run would write), or a metrics.jsonl that no run wrote; or when its
// path is so long that a save could not name its files.
void check_run_folder(const std::string& folder, const std::string& config_text);

// Writes config.json, the resolved config of the run, unless it is the file that the command line names: that one
// stays as it is.
void write_run_config(const std::string& folder, const std::string& config_text,
                      const std::string& file_of_command_line);

// Removes the files with which starts that were killed tried out the folder. By the run that has locked it.
void clear_write_tests(const std::string& folder);

// Throws Error(kBadInput), the same on all ranks, that names the ranks which do not see the folder of rank 0 under
// this name, and where they looked. All ranks must call this; the folder of rank 0 is there.
void require_one_folder(Launch& launch, const std::string& folder,
                        std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace parka
