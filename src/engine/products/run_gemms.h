#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/files/gemm_tuning_file.h"
#include "engine/step/recorded_step.h"
#include "kernels/device/device.h"

// Which algorithms a run's GEMMs use, and where it keeps them: device.gemm_tuning.
namespace parka {

// How long a run that finds no file tunes, at most, and how long the products of its steps must take for that to be
// worth it: steps get 1 to 2 % faster by it (docs/results/speed.md).
inline constexpr double kRunTuningSeconds = 90, kWorthTuningSeconds = 7200;

// The folders of `parka tune`'s files that a run takes by itself: tuning/ beside the config, and in configs/.
std::vector<std::string> tuning_folders(const std::string& config_path);

// The file of a run's folder that keeps what it uses on this GPU with this library.
std::string kept_tuning_path(const std::string& run_folder, const Device& device);

// A file of `folders` that is for the device and has an algorithm for every GEMM that cuBLASLt gets; empty:
// there is none. Files that cannot be read are told to `warn` and passed over.
std::string find_tuning(const std::vector<std::string>& folders, const Device& device,
                        const std::vector<RecordedProduct>& products,
                        const std::function<void(const std::string&)>& warn);

struct RunGemmsOptions {
  std::vector<std::string> tuning_folders;
  int64_t num_ranks = 1;
  bool has_checkpoint = false;  // the run resumes
  int64_t steps = 0;            // that are still to be made
  // tune_products() on the device, and what to say before.
  std::function<std::vector<GemmChoice>(const std::vector<RecordedProduct>&)> tune;
  std::function<void(const std::string&)> warn;
};

struct RunGemms {
  std::string tuning = {};    // the text of a tuning file; empty: cuBLASLt's first choices
  std::string source = {};    // of that text, for messages and records
  std::string line = {};      // what the log says of it
  bool ran_products = false;  // on the device, whose algorithms cannot be chosen any more
};

// Decides, and keeps what is decided in the run's folder.
//   a file:  that one
//   off:     cuBLASLt's first choices
//   auto:    the file that the run keeps for this GPU. Without one, if the run resumes, keeps none at all and
//            has used none, the first choices, with which it began; else one of tuning_folders(), or what `tune`
//            finds where it is worth it, or the first choices
// Throws Error(kBadInput) for a file that cannot be read or is for another GPU.
RunGemms decide_run_gemms(const Config& config, Device& device, const RunGemmsOptions& options);

}  // namespace parka
