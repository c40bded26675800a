#include "core/heartbeat.h"

#include <string>

#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("a heartbeat counts, and one without words leaves what is done as it was", "[core][heartbeat]") {
  const uint64_t before = last_heartbeat().count;
  heartbeat("forward", 7);
  heartbeat();
  Heartbeat last = last_heartbeat();
  CHECK(last.count == before + 2);
  CHECK(last.step == 7);
  CHECK(last.what == std::string("forward"));
  heartbeat("loading");
  last = last_heartbeat();
  CHECK(last.step == 0);
  CHECK(last.what == std::string("loading"));
}
