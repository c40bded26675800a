
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "engine/step/telemetry.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

// Blocks with these imbalances.
std::vector<AttentionTotals> blocks(const std::vector<float>& imbalances) {
  std::vector<AttentionTotals> result;
  for (const float of_block : imbalances) {
    result.push_back({.rows = 10,
                      .not_finite = 0,
                      .sum_norm = 3 * of_block,
                      .norm = 5,
                      .delta_norm = 3,
                      .score_norm = 1,
                      .largest_score = 1});
  }
  return result;
}

}  // namespace

TEST_CASE("attention's imbalance is relative to delta, 0 for zeros and NaN without a finite row",
          "[engine][telemetry]") {
  CHECK(imbalance(blocks({0.25f})[0]) == 0.25);
  CHECK(imbalance(blocks({0})[0]) == 0);
  AttentionTotals zeros = {}, bad = {};
  zeros.rows = 4;
  bad.not_finite = 4;
  CHECK(imbalance(zeros) == 0);
  CHECK(std::isnan(imbalance(bad)));
}

TEST_CASE("three reports in a row above the limit raise a warning, once", "[engine][telemetry]") {
  AttentionWatch watch(0.01);
  CHECK(!watch.add(blocks({0.001f, 0.03f})));
  CHECK(!watch.add(blocks({0.02f, 0.001f})));  // of whichever block
  CHECK(!watch.add(blocks({0.001f, 0.01f})));  // not above it: they no longer follow each other
  CHECK(!watch.add(blocks({0.02f, 0.001f})));
  CHECK(!watch.add(blocks({0.02f, 0.001f})));
  const auto raised = watch.add(blocks({0.001f, 0.5f, 0.25f}));
  REQUIRE(raised);
  CHECK((raised->raised && raised->block == 1 && raised->imbalance == 0.5));
  CHECK(warning_record(*raised, 30).dump() ==
        R"({"kind":"warning","step":30,"about":"attention","raised":true,"block":1,"imbalance":0.5,"limit":0.01})");
  CHECK(
      warning_line(*raised, 30).starts_with("step 30: the gradients of attention's scores do not add up to zero"));
  for (int i = 0; i < 10; ++i) CHECK(!watch.add(blocks({0.5f})));
}

TEST_CASE("three reports in a row below half of the limit lift the warning, and it may come again",
          "[engine][telemetry]") {
  AttentionWatch watch(0.01);
  const auto add = [&](float imbalance, int times) {
    std::optional<AttentionWatch::Change> last;
    for (int i = 0; i < times; ++i) last = watch.add(blocks({imbalance}));
    return last;
  };
  REQUIRE(add(0.02f, 3));
  CHECK(!add(0.009f, 10));  // near the limit nothing changes
  CHECK(!add(0.004f, 2));
  CHECK(!add(0.006f, 1));
  const auto lifted = add(0.004f, 3);
  REQUIRE(lifted);
  CHECK(!lifted->raised);
  CHECK(warning_line(*lifted, 90).starts_with("step 90: the gradients of attention's scores add up to zero again"));
  CHECK(!add(0.004f, 10));
  const auto raised = add(0.02f, 3);
  REQUIRE(raised);
  CHECK(raised->raised);
}

TEST_CASE("of reports without a finite imbalance nothing is said", "[engine][telemetry]") {
  AttentionWatch watch(0.01);
  for (int i = 0; i < 5; ++i) {
    CHECK(!watch.add({}));
    CHECK(!watch.add(blocks({std::numeric_limits<float>::quiet_NaN()})));
  }
  // Such reports stand between others without ending their row.
  CHECK(!watch.add(blocks({0.02f})));
  CHECK(!watch.add({}));
  CHECK(!watch.add(blocks({0.02f})));
  CHECK(watch.add(blocks({0.02f})));
}
