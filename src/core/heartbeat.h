#pragma once
#include <cstdint>

// A rank, which is a process, says here what it does, and that it goes on. The watchdog (comm/launch/watchdog.h)
// tells the other ranks; calls before it runs count, too.
namespace parka {

// The rank begins `what`, a literal ("saving a checkpoint"), in a step counted from 1, or outside of steps. Cheap.
void heartbeat(const char* what, int64_t step = 0);
// The rank goes on. Long work for which other ranks may wait calls this again and again, from any of its threads. A
// thread beside the training must not: it would hide that the training hangs.
void heartbeat();

struct Heartbeat {
  int64_t step = 0;
  uint64_t count = 0;  // of all calls
  const char* what = "";
};
Heartbeat last_heartbeat();

}  // namespace parka
