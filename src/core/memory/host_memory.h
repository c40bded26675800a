#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parka {

// Bytes of memory that this process can still use without harm to others: what the kernel calls available,
// or what the limit of its cgroup (v2) or of one above it leaves, whichever is least. nullopt if nothing of this
// can be read. A virtual machine whose memory grows on use shows less than it can provide.
std::optional<int64_t> available_host_bytes();

// Runs leave so much of it to everything else on the host: no memory is pinned that would leave less.
inline constexpr int64_t kHostReserveBytes = int64_t{2} << 30;

// The texts of a cgroup's memory.max, memory.current and memory.stat, empty if there are none.
struct CgroupMemory {
  std::string max, current, stat;
};

// The same from the texts of files, for tests: /proc/meminfo, and those of cgroups.
std::optional<int64_t> available_host_bytes(const std::string& meminfo, const std::vector<CgroupMemory>& cgroups);

// The folders below `root` of the cgroup v2 that a process is in and of all above it, `root` last, from the text of
// its /proc/self/cgroup, a line of which is "0::/PATH". In a container the path may be that of the host.
std::vector<std::string> cgroup_folders(const std::string& text, const std::string& root);

// The most memory of the host that this process has had at a time, in bytes; pinned memory counts.
int64_t peak_resident_bytes();

}  // namespace parka
