
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "engine/step/telemetry.h"
#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("attention's imbalance is relative to delta, 0 for zeros and NaN without a finite row",
          "[engine][telemetry]") {
  AttentionTotals some = {}, zeros = {}, bad = {};
  some.rows = zeros.rows = 4;
  some.sum_norm = 0.75f;
  some.delta_norm = 3;
  bad.not_finite = 4;
  CHECK(imbalance(some) == 0.25);
  CHECK(imbalance(zeros) == 0);
  CHECK(std::isnan(imbalance(bad)));
}

TEST_CASE("three reports in a row above the limit raise a warning, once", "[engine][telemetry]") {
  BlockWatch watch = BlockWatch::of_attention({});
  int64_t step = 0;
  const auto add = [&](const std::vector<double>& blocks) { return watch.add(blocks, ++step); };
  CHECK(!add({0.001, 0.03}));
  CHECK(!add({0.02, 0.001}));  // of whichever block
  CHECK(!add({0.001, 0.01}));  // not above it: they no longer follow each other
  CHECK(!add({0.02, 0.001}));
  CHECK(!add({0.02, 0.001}));
  const auto raised = add({0.001, 0.5, 0.25});
  REQUIRE(raised);
  CHECK(raised->raised);
  CHECK(raised->record.dump() ==
        R"({"kind":"warning","step":6,"about":"attention","raised":true,"block":1,"imbalance":0.5,"limit":0.01})");
  CHECK(raised->line.find("0.5 in block 1 (more than 0.01)") != std::string::npos);
  for (int i = 0; i < 10; ++i) CHECK(!add({0.5}));
}

TEST_CASE("three reports in a row below half of the limit lift the warning, and it may come again",
          "[engine][telemetry]") {
  BlockWatch watch = BlockWatch::of_attention({});
  const auto add = [&](double imbalance, int times) {
    std::optional<Warning> last;
    for (int i = 0; i < times; ++i) last = watch.add(std::vector<double>{imbalance}, 1);
    return last;
  };
  REQUIRE(add(0.02, 3));
  CHECK(!add(0.009, 10));  // near the limit nothing changes
  CHECK(!add(0.004, 2));
  CHECK(!add(0.006, 1));
  const auto lifted = add(0.004, 3);
  REQUIRE(lifted);
  CHECK(!lifted->raised);
  CHECK(lifted->record["raised"] == false);
  CHECK(!add(0.004, 10));
  const auto raised = add(0.02, 3);
  REQUIRE(raised);
  CHECK(raised->raised);
}

TEST_CASE("of reports without a number nothing is said", "[engine][telemetry]") {
  BlockWatch watch = BlockWatch::of_attention({});
  const double kNone = std::numeric_limits<double>::quiet_NaN();
  const auto add = [&](const std::vector<double>& blocks) { return watch.add(blocks, 1); };
  for (int i = 0; i < 5; ++i) {
    CHECK(!add({}));
    CHECK(!add({kNone}));
  }
  // Such reports stand between others without ending their row.
  CHECK(!add({0.02}));
  CHECK(!add({}));
  CHECK(!add({kNone, 0.02}));
  CHECK(add({0.02}));
}

TEST_CASE("routing that stays collapsed after the warm-up raises a warning of each kind, once",
          "[engine][telemetry]") {
  Config config;
  config.model.moe.num_experts = 8;
  config.model.moe.experts_per_token = 2;
  config.optimizer.schedule.warmup_steps = 10;
  const double kNone = std::numeric_limits<double>::quiet_NaN();
  // All tokens at the same experts: 4 times the mean, and 3 / 4 are idle.
  const auto check = [&](BlockWatch watch, const char* key, double collapsed, double bearable) {
    CAPTURE(key);
    const std::vector<double> bad = {kNone, bearable, collapsed}, good = {kNone, bearable, bearable};
    const auto add = [&](const std::vector<double>& blocks, int64_t first, int64_t last) {
      std::vector<Warning> warnings;
      for (int64_t step = first; step <= last; ++step) {
        if (const auto warning = watch.add(blocks, step)) warnings.push_back(*warning);
      }
      return warnings;
    };
    CHECK(add(bad, 1, 59).empty());
    CHECK(add(good, 60, 60).empty());
    const std::vector<Warning> warnings = add(bad, 61, 300);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].raised);
    CHECK((warnings[0].record["step"] == 110 && warnings[0].record["about"] == key));
    CHECK((warnings[0].record["block"] == 2 && warnings[0].record[key] == collapsed));
    CHECK(warnings[0].line.find("training.balance_loss") != std::string::npos);
    CHECK(add(good, 301, 600).empty());
    CHECK(add(bad, 601, 900).empty());
  };
  check(BlockWatch::of_expert_load(config), "expert_load", 2.6, 2.5);
  check(BlockWatch::of_idle_experts(config), "idle_experts", 0.25, 0.125);
}
