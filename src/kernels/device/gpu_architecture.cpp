#include "kernels/device/gpu_architecture.h"

#include <string>

namespace parka {
namespace {

bool one_runs_on_gpu(std::string_view architecture, int major, int minor) {
  const int version = std::stoi(std::string(architecture));
  const int gpu_version = 10 * major + minor;
  if (architecture.ends_with("-virtual")) return version <= gpu_version;
  if (architecture.ends_with('a')) return version == gpu_version;
  return version / 10 == major && version <= gpu_version;
}

}  // namespace

bool runs_on_gpu(std::string_view architectures, int major, int minor) {
  for (;;) {
    const size_t comma = architectures.find(',');
    if (one_runs_on_gpu(architectures.substr(0, comma), major, minor)) return true;
    if (comma == std::string_view::npos) return false;
    architectures.remove_prefix(comma + 1);
  }
}

}  // namespace parka
