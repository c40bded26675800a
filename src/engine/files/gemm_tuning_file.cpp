#include "engine/files/gemm_tuning_file.h"

#include <limits>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {

void write_gemm_tuning(const std::string& path, const std::vector<GemmChoice>& choices, const Device& device) {
  nlohmann::ordered_json gemms = nlohmann::ordered_json::array();
  for (const GemmChoice& choice : choices) {
    gemms.push_back({{"gemm", choice.gemm},
                     {"algorithm", choice.algorithm},
                     {"microseconds", choice.microseconds},
                     {"default_microseconds", choice.default_microseconds}});
  }
  const nlohmann::ordered_json file = {
      {"gpu", device.name()}, {"cublaslt", gemm_library_version()}, {"gemms", std::move(gemms)}};
  replace_file(path, file.dump(2) + "\n");
}

std::vector<GemmChoice> read_gemm_tuning(const std::string& path, const Device& device) {
  constexpr int64_t kLargestFile = int64_t{64} << 20;
  const nlohmann::json file = parse_json_text(read_text(path, kLargestFile), path, JsonComments::kRefused);
  std::vector<GemmChoice> choices;
  std::string gpu, library;
  try {
    gpu = file.at("gpu").get<std::string>();
    library = file.at("cublaslt").get<std::string>();
    for (const nlohmann::json& gemm : file.at("gemms")) {
      choices.push_back({gemm.at("gemm").get<std::string>(), gemm.at("algorithm").get<std::string>(),
                         gemm.at("microseconds").get<double>(), gemm.at("default_microseconds").get<double>()});
    }
  } catch (const nlohmann::json::exception& error) {
    throw_bad_input("{}: not a file that `parka tune` wrote ({}): run it again", path, printable(error.what()));
  }
  if (gpu != device.name() || library != gemm_library_version()) {
    throw_bad_input("{}: made for {} and cuBLASLt {}, this is {} and {}: run `parka tune` here", path,
                    printable(gpu), printable(library), device.name(), gemm_library_version());
  }
  return choices;
}

}  // namespace parka
