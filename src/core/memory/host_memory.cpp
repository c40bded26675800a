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

// The number after `name` in lines of "NAME NUMBER ...".
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

std::optional<int64_t> left_of(const CgroupMemory& cgroup) {
  std::istringstream max_text(cgroup.max), current_text(cgroup.current);
  int64_t max = 0, current = 0;
  if (!(max_text >> max && current_text >> current)) return std::nullopt;  // "max" is not a number: no limit
  // The page cache counts as used, but the kernel frees its older part on demand.
  return max - current + number_after(cgroup.stat, "inactive_file").value_or(0);
}

}  // namespace

std::vector<std::string> cgroup_folders(const std::string& text, const std::string& root) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("0::/")) continue;
    std::vector<std::string> folders;
    for (std::string path = line.substr(3); path.size() > 1; path.resize(path.rfind('/'))) {
      folders.push_back(root + path);
    }
    folders.push_back(root);
    return folders;
  }
  return {};
}

std::optional<int64_t> available_host_bytes(const std::string& meminfo, const std::vector<CgroupMemory>& cgroups) {
  std::optional<int64_t> available = number_after(meminfo, "MemAvailable:");
  if (available) *available *= 1024;
  for (const CgroupMemory& cgroup : cgroups) {
    if (const std::optional<int64_t> left = left_of(cgroup)) available = std::min(available.value_or(*left), *left);
  }
  return available;
}

std::optional<int64_t> available_host_bytes() {
  std::vector<CgroupMemory> cgroups;
  for (const std::string& folder : cgroup_folders(text_of("/proc/self/cgroup"), "/sys/fs/cgroup")) {
    cgroups.push_back(
        {text_of(folder + "/memory.max"), text_of(folder + "/memory.current"), text_of(folder + "/memory.stat")});
  }
  return available_host_bytes(text_of("/proc/meminfo"), cgroups);
}

int64_t peak_resident_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux gives KiB
}

}  // namespace parka
