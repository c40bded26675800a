#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace parka {

// Bytes of memory that this process can still use without harm to others: what the kernel calls available, or what
// a container's limit (cgroup v2) leaves, whichever is less. nullopt where neither can be read. A virtual machine
// whose memory grows as it is used shows less than there will be.
std::optional<int64_t> available_host_bytes();

// The same from the files' texts, for tests: /proc/meminfo, and memory.max, memory.current and memory.stat of the
// cgroup, empty where there are none.
std::optional<int64_t> available_host_bytes(const std::string& meminfo, const std::string& cgroup_max,
                                            const std::string& cgroup_current, const std::string& cgroup_stat);

}  // namespace parka
