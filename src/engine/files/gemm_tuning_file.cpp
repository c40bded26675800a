#include "engine/files/gemm_tuning_file.h"

#include <cstdint>

#include "core/error.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"

namespace parka {

bool GemmTuningFile::is_for(const Device& device) const {
  return gpu == device.name() && library == gemm_library_version();
}

std::string gemm_tuning_text(const std::vector<GemmChoice>& choices, const Device& device) {
  ordered_json gemms = ordered_json::array();
  for (const GemmChoice& choice : choices) {
    gemms.push_back({{"gemm", choice.gemm},
                     {"algorithm", choice.algorithm},
                     {"microseconds", choice.microseconds},
                     {"default_microseconds", choice.default_microseconds}});
  }
  const ordered_json file = {
      {"gpu", device.name()}, {"cublaslt", gemm_library_version()}, {"gemms", std::move(gemms)}};
  return file.dump(2) + "\n";
}

GemmTuningFile parse_gemm_tuning(std::string_view text, const std::string& source) {
  const nlohmann::json json = parse_json_text(text, source, JsonComments::kRefused);
  GemmTuningFile file;
  try {
    file.gpu = json.at("gpu").get<std::string>();
    file.library = json.at("cublaslt").get<std::string>();
    for (const nlohmann::json& gemm : json.at("gemms")) {
      // Files of earlier versions say whether a GEMM and its reader were one kernel, or two.
      if (gemm.at("algorithm") == "one kernel" || gemm.at("algorithm") == "two kernels") continue;
      file.choices.push_back({gemm.at("gemm").get<std::string>(), gemm.at("algorithm").get<std::string>(),
                              gemm.at("microseconds").get<double>(),
                              gemm.at("default_microseconds").get<double>()});
    }
  } catch (const nlohmann::json::exception& error) {
    throw_bad_input("{}: not a file that `parka tune` wrote ({}): run it again", source, printable(error.what()));
  }
  return file;
}

GemmTuningFile load_gemm_tuning(const std::string& path) {
  constexpr int64_t kLargestFile = int64_t{64} << 20;
  return parse_gemm_tuning(read_text(path, kLargestFile), path);
}

void require_for(const GemmTuningFile& file, const Device& device, const std::string& source) {
  if (file.is_for(device)) return;
  throw_bad_input("{}: made for {} and cuBLASLt {}, this is {} and {}: run `parka tune` here", source,
                  printable(file.gpu), printable(file.library), device.name(), gemm_library_version());
}

void write_gemm_tuning(const std::string& path, const std::vector<GemmChoice>& choices, const Device& device) {
  write_output(path, gemm_tuning_text(choices, device));
}

std::vector<GemmChoice> read_gemm_tuning(const std::string& path, const Device& device) {
  GemmTuningFile file = load_gemm_tuning(path);
  require_for(file, device, path);
  return std::move(file.choices);
}

}  // namespace parka
