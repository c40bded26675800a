#pragma once
#include <cstdint>

// What this process does, and that it still does it: the watchdog (comm/launch/watchdog.h) tells the other ranks,
// also of what was said before it ran. A process is one rank.
namespace parka {

// From here on it does `what`, a literal ("saving a checkpoint"), in a step counted from 1, or outside of steps.
// Cheap.
void heartbeat(const char* what, int64_t step = 0);
// It goes on. Long work for which other ranks may wait calls this again and again, from any of its threads. A
// thread beside the training must not: it would hide that the training hangs.
void heartbeat();

struct Heartbeat {
  int64_t step = 0;
  uint64_t count = 0;  // of all calls
  const char* what = "";
};
Heartbeat last_heartbeat();

}  // namespace parka
