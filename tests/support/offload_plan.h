#pragma once
#include <map>
#include <string>

#include "core/memory/memory_plan.h"
#include "tests/support/catch.h"

namespace parka::test {

// As they were declared: evaluation's memory counts although training uses it at other times.
inline std::map<std::string, int64_t> declared_bytes(const MemoryPlan& plan) {
  std::map<std::string, int64_t> bytes;
  for (const MemoryPlan::Entry& entry : plan.entries()) bytes[entry.category] += entry.bytes;
  return bytes;
}

// Of the plans of a training with precision.offload_blocks = `blocks` and with 0: what so many blocks keep for
// backward, and nothing else, is not on the device.
inline void check_offloaded(const MemoryPlan& offloaded, const MemoryPlan& plain, int64_t blocks) {
  const std::string kKept = "saved activations";
  int64_t kept_by_a_block = 0;
  for (const MemoryPlan::Entry& entry : plain.entries()) {
    if (entry.category == kKept && entry.name.starts_with("blocks.1.")) kept_by_a_block += entry.bytes;
  }
  CHECK(kept_by_a_block > 0);
  std::map<std::string, int64_t> before = declared_bytes(plain);
  for (const auto& [category, bytes] : declared_bytes(offloaded)) {
    CAPTURE(category);
    if (category == kKept) {
      CHECK(bytes == before[category] - blocks * kept_by_a_block);
    } else {
      CHECK(bytes <= before[category]);
    }
  }
}

}  // namespace parka::test
