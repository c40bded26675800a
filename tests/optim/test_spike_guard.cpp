#include "optim/spike_guard.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("limits are mean plus deviations of the steps in the window", "[optim][spike_guard]") {
  SpikeGuard guard(4);
  guard.add({100, 1000});  // leaves the window below
  for (const double x : {1.0, 2.0, 4.0, 9.0}) guard.add({x, 10 * x});
  // Mean 4, squares of deviations 9 + 4 + 0 + 25 over n - 1 = 3.
  const SpikeGuard::Step limits = guard.limits();
  CHECK(std::abs(limits.loss - (4 + 6 * std::sqrt(38.0 / 3))) < 1e-12);
  CHECK(std::abs(limits.grad_norm - 10 * limits.loss) < 1e-11);
}

TEST_CASE("there are no limits before half a window, and none without a window", "[optim][spike_guard]") {
  SpikeGuard guard(6), smallest(1), off(0);
  for (int i = 0; i < 2; ++i) {
    for (SpikeGuard* each : {&guard, &smallest, &off}) {
      each->add({2.0 + i, 1.0});
      CHECK(std::isinf(each->limits().loss));
      CHECK(std::isinf(each->limits().grad_norm));
    }
  }
  guard.add({2.0, 1.0});
  CHECK(std::isfinite(guard.limits().loss));
  CHECK(off.steps().empty());
}

TEST_CASE("a step that is not finite does not move the limits", "[optim][spike_guard]") {
  SpikeGuard guard(4);
  for (const double x : {1.0, 2.0, 3.0}) guard.add({x, x});
  const SpikeGuard::Step before = guard.limits();
  guard.add({std::numeric_limits<double>::quiet_NaN(), 1.0});
  guard.add({1.0, std::numeric_limits<double>::infinity()});
  CHECK((guard.limits().loss == before.loss && guard.limits().grad_norm == before.grad_norm));

  SpikeGuard restored(4);
  restored.restore(guard.steps());
  CHECK((restored.limits().loss == before.loss && restored.limits().grad_norm == before.grad_norm));
}
