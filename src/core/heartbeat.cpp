#include "core/heartbeat.h"

#include <mutex>

namespace parka {
namespace {

std::mutex heartbeat_mutex;
Heartbeat newest;  // guarded by it

}  // namespace

void heartbeat(const char* what, int64_t step) {
  const std::lock_guard lock(heartbeat_mutex);
  newest.step = step;
  newest.what = what;
  ++newest.count;
}

void heartbeat() {
  const std::lock_guard lock(heartbeat_mutex);
  ++newest.count;
}

Heartbeat last_heartbeat() {
  const std::lock_guard lock(heartbeat_mutex);
  return newest;
}

}  // namespace parka
