#include "engine/commands/version.h"

#include <algorithm>
#include <fstream>
#include <thread>

#include <sys/utsname.h>

#include <fmt/format.h>

#include "comm/nccl_ranks.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = "Clang";
#else
constexpr const char* kCompiler = "GCC";
#endif

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
  }
  return "unknown";
}

std::string system_name() {
  struct utsname name = {};
  uname(&name);
  return fmt::format("{} {}, {}", name.sysname, name.release, name.machine);
}

std::string or_none(const std::string& version) { return version.empty() ? "built without" : version; }

}  // namespace

std::string parka_version() { return PARKA_VERSION; }

std::string parka_commit() { return PARKA_COMMIT; }

std::string version_text(bool verbose) {
  std::string text = fmt::format("parka {}\n", parka_version());
  if (!verbose) return text;
  const auto add = [&](const std::string& name, const std::string& value) {
    text += fmt::format("{:<14} {}\n", name, value);
  };
  add("commit", parka_commit() == "unknown" ? "unknown: not built from a Git checkout" : parka_commit());
  add("compiler", fmt::format("{} {}", kCompiler, __VERSION__));
  add("build", PARKA_BUILD);
  add("CUDA", or_none(cuda_version()));
  add("architectures", or_none(cuda_architectures()));
  add("NCCL", or_none(nccl_version()));
  add("system", system_name());
  add("CPU", fmt::format("{}, {} threads", cpu_name(), std::thread::hardware_concurrency()));
  const std::vector<std::string> gpus = describe_cuda_devices();
  for (size_t i = 0; i < gpus.size(); ++i) add(fmt::format("GPU {}", i), gpus[i]);
  if (gpus.empty()) add("GPU", "none visible");
  return text;
}

}  // namespace parka
