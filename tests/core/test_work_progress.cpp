#include "core/log/work_progress.h"

#include "tests/support/catch.h"

namespace parka {

TEST_CASE("work is told of from its fifth second on, and again ten seconds later", "[core][log]") {
  double now = 100;
  WorkProgress progress("testing", 4, [&] { return now; });
  CHECK_FALSE(progress.add(1));
  now += 4.9;
  CHECK_FALSE(progress.add(1));
  now += 0.2;
  CHECK(progress.add(1));
  now += 0.1;
  CHECK_FALSE(progress.add(0));
  now += 10;
  CHECK(progress.add(1));
}

}  // namespace parka
