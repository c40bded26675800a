#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace parka {

// Bytes of memory that this process can still use without harm to others. That is what the kernel calls available,
// or what a container's limit (cgroup v2) leaves, whichever is less. nullopt if neither can be read. A virtual
// machine whose memory grows on use shows less than it can provide.
std::optional<int64_t> available_host_bytes();

// The same from the texts of the files, for tests: /proc/meminfo, and the cgroup's memory.max, memory.current and
// memory.stat, empty if there are none.
std::optional<int64_t> available_host_bytes(const std::string& meminfo, const std::string& cgroup_max,
                                            const std::string& cgroup_current, const std::string& cgroup_stat);

// The most memory of the host that this process has had at a time, in bytes; pinned memory counts.
int64_t peak_resident_bytes();

}  // namespace parka
