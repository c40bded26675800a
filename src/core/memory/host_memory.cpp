#include "core/memory/host_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include <sys/resource.h>

namespace parka {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The number behind `name` in lines of "NAME NUMBER ...".
std::optional<int64_t> number_after(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t number = 0;
    if (words >> word >> number && word == name) return number;
  }
  return std::nullopt;
}

// The path of this process's cgroup v2 from /proc/self/cgroup, a line "0::/PATH".
std::string cgroup_folder() {
  std::istringstream lines(text_of("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("0::")) return "/sys/fs/cgroup" + line.substr(3);
  }
  return {};
}

}  // namespace

std::optional<int64_t> available_host_bytes(const std::string& meminfo, const std::string& cgroup_max,
                                            const std::string& cgroup_current, const std::string& cgroup_stat) {
  std::optional<int64_t> available = number_after(meminfo, "MemAvailable:");
  if (available) *available *= 1024;
  std::istringstream max_text(cgroup_max), current_text(cgroup_current);
  int64_t max = 0, current = 0;
  if (max_text >> max && current_text >> current) {  // "max" is not a number: no limit
    // The page cache counts as used, but the kernel frees its older part on demand.
    const int64_t left = max - current + number_after(cgroup_stat, "inactive_file").value_or(0);
    available = std::min(available.value_or(left), left);
  }
  return available;
}

std::optional<int64_t> available_host_bytes() {
  const std::string cgroup = cgroup_folder();
  return available_host_bytes(text_of("/proc/meminfo"), text_of(cgroup + "/memory.max"),
                              text_of(cgroup + "/memory.current"), text_of(cgroup + "/memory.stat"));
}

int64_t peak_resident_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux gives KiB
}

}  // namespace parka
