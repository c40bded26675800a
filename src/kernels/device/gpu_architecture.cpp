#include "kernels/device/gpu_architecture.h"

#include <string>

namespace parka {
namespace {

int version_of(std::string_view architecture) { return std::stoi(std::string(architecture)); }

bool one_runs_on_gpu(std::string_view architecture, int major, int minor) {
  const int version = version_of(architecture);
  const int gpu_version = 10 * major + minor;
  if (architecture.ends_with("-virtual")) return version <= gpu_version;
  if (architecture.ends_with('a')) return version == gpu_version;
  return version / 10 == major && version <= gpu_version;
}

}  // namespace

bool runs_on_gpu(std::string_view architectures, int major, int minor) {
  return runs_code_of(0, architectures, major, minor);
}

bool runs_code_of(int version, std::string_view architectures, int major, int minor) {
  for (;;) {
    const size_t comma = architectures.find(',');
    const std::string_view one = architectures.substr(0, comma);
    if (version_of(one) >= version && one_runs_on_gpu(one, major, minor)) return true;
    if (comma == std::string_view::npos) return false;
    architectures.remove_prefix(comma + 1);
  }
}

}  // namespace parka
