#include "comm/launch/roll_call.h"

#include <array>

#include "comm/launch/watch_thread.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr WatchdogTimes kTimes{.beat = 1, .silence = 20, .stall = 600, .settle = 0.25, .connect = 30};

RollCall roll_of_three() { return {{"rank 0", "rank 1", "rank 2"}, kTimes, 0.0}; }

RankReport report(int64_t step, uint64_t reached, uint64_t finished) {
  return {step, static_cast<uint64_t>(step), {reached, finished}, "forward"};
}

bool contains(const std::optional<Verdict>& verdict, const std::string& text) {
  return verdict && verdict->message.find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("A roll call says nothing while all ranks are heard", "[watchdog]") {
  RollCall roll = roll_of_three();
  for (int second = 1; second < 2000; ++second) {
    for (int r = 0; r < 3; ++r) roll.heard(r, report(second, 10, 10), second);
    CHECK_FALSE(roll.verdict(second));
  }
}

TEST_CASE("A rank whose connection closes died, in what it last said it did", "[watchdog]") {
  RollCall roll = roll_of_three();
  roll.heard(1, report(12, 513, 512), 5.0);
  roll.lost(1, 5.5);
  CHECK_FALSE(roll.verdict(5.6));  // others may explain it
  const auto verdict = roll.verdict(5.8);
  REQUIRE(verdict);
  CHECK(verdict->rank == 1);
  CHECK(verdict->code == ExitCode::kRankLost);
  CHECK(verdict->message == "rank 1 died, last heard of in step 12, forward, in collective 513");
}

TEST_CASE("The cause is named, not what follows from it", "[watchdog]") {
  RollCall roll = roll_of_three();
  roll.failed(0, ExitCode::kRankLost, "exchange: peer gone", 1.0);
  roll.lost(2, 1.1);
  CHECK(roll.verdict(2.0)->rank == 2);
  roll.failed(1, ExitCode::kIo, "disk full", 1.2);
  CHECK(roll.verdict(2.0)->rank == 1);
  CHECK(roll.verdict(2.0)->code == ExitCode::kIo);
  CHECK_FALSE(roll.verdict(2.0)->common);
  // Closing its connection then is no second piece of news.
  roll.lost(1, 1.3);
  CHECK(roll.verdict(2.0)->message == "disk full");
}

TEST_CASE("An error of all ranks is one error, told at once", "[watchdog]") {
  RollCall roll = roll_of_three();
  for (int r : {2, 1, 0}) {
    CHECK_FALSE(roll.verdict(1.0));
    roll.failed(r, ExitCode::kBadInput, "bad config", 1.0);
  }
  const auto verdict = roll.verdict(1.0);
  REQUIRE(verdict);
  CHECK(verdict->rank == 0);
  CHECK(verdict->common);
}

TEST_CASE("A rank that falls silent hangs", "[watchdog]") {
  RollCall roll = roll_of_three();
  for (int second = 1; second <= 25; ++second) {
    roll.heard(0, report(second, 1, 1), second);
    roll.heard(1, report(second, 1, 1), second);
    if (second <= 4) roll.heard(2, report(second, 1, 1), second);
    CHECK(roll.verdict(second).has_value() == (second > 24));
  }
  CHECK(roll.verdict(25)->rank == 2);
  CHECK(contains(roll.verdict(25), "sent nothing for 21 s, last heard of in step 4"));

  SECTION("but not when whoever listens was asleep itself") {
    roll.forgive(25);
    CHECK_FALSE(roll.verdict(26));
  }
  SECTION("nor when it had said goodbye") {
    roll.left(2);
    CHECK_FALSE(roll.verdict(26));
    CHECK_FALSE(roll.all_left());
    roll.left(0);
    roll.left(1);
    CHECK(roll.all_left());
  }
}

TEST_CASE("Who keeps the roll forgives what it slept through, and is as strict as before from then on",
          "[watchdog]") {
  RollCall roll = roll_of_three();
  SECTION("silence") {
    roll.forgive(1000);
    CHECK_FALSE(roll.verdict(1019));
    for (int r : {0, 2}) roll.heard(r, report(3, 1, 1), 1019);
    CHECK(contains(roll.verdict(1021), "rank 1 has sent nothing for 21 s"));
  }
  SECTION("standing still") {
    const auto beat = [&](double now) {
      for (int r = 0; r < 3; ++r) roll.heard(r, r == 1 ? report(3, 7, 7) : report(3, 8, 7), now);
    };
    beat(1);
    roll.forgive(1000);
    beat(1000);
    CHECK_FALSE(roll.verdict(1000));
    for (double now = 1001; now <= 1601; ++now) beat(now);
    CHECK(contains(roll.verdict(1601), "rank 1 has made no progress for 601 s"));
  }
  SECTION("news that it has not heard yet") {
    roll.lost(2, 1);
    roll.forgive(1000);
    CHECK_FALSE(roll.verdict(1000));
    roll.failed(1, ExitCode::kIo, "disk full", 1000.1);
    CHECK(contains(roll.verdict(1000.3), "disk full"));
  }
}

TEST_CASE("A rank that stands still while others wait for it is named", "[watchdog]") {
  RollCall roll = roll_of_three();
  const auto beat_until = [&](double from, double to, const std::array<RankReport, 3>& reports) {
    for (double now = from; now <= to; now += 1) {
      for (int r = 0; r < 3; ++r) roll.heard(r, reports[static_cast<size_t>(r)], now);
    }
  };
  SECTION("the one that has not come to the collective") {
    const std::array<RankReport, 3> reports = {report(3, 8, 7), report(3, 7, 7), report(3, 8, 7)};
    beat_until(1, 600, reports);
    CHECK_FALSE(roll.verdict(600.5));
    beat_until(601, 602, reports);
    const auto verdict = roll.verdict(602);
    REQUIRE(verdict);
    CHECK(verdict->rank == 1);
    CHECK(contains(verdict, "rank 1 has made no progress for 601 s in step 3"));
    CHECK(contains(verdict, "rank 0 waits for it in collective 8"));
  }
  SECTION("not one that says that it gets on") {
    for (int second = 1; second < 2000; ++second) {
      roll.heard(0, report(3, 8, 7), second);
      roll.heard(1, report(3 + second / 100, 7, 7), second);
      roll.heard(2, report(3, 8, 7), second);
      CHECK_FALSE(roll.verdict(second));
    }
  }
  SECTION("not before another has waited for as long") {
    beat_until(1, 1000, {report(3, 7, 7), report(3, 7, 7), report(3, 7, 7)});  // all have much to do
    beat_until(1001, 1600, {report(3, 8, 7), report(3, 7, 7), report(3, 7, 7)});
    CHECK_FALSE(roll.verdict(1600.5));
    beat_until(1601, 1602, {report(3, 8, 7), report(3, 7, 7), report(3, 7, 7)});
    CHECK(contains(roll.verdict(1602), "rank 0 waits for it in collective 8"));
  }
  SECTION("nobody, while nobody waits") {
    beat_until(1, 2000, {report(0, 7, 7), report(0, 7, 7), report(0, 7, 7)});
    CHECK_FALSE(roll.verdict(2000));
  }
  SECTION("a collective that no rank leaves hangs itself") {
    beat_until(1, 700, {report(3, 8, 7), report(3, 8, 7), report(3, 8, 7)});
    CHECK(contains(roll.verdict(700), "the collective hangs"));
  }
}

TEST_CASE("What ranks tell each other survives the line it is put into", "[watchdog]") {
  RankReport sent{12, 345, {513, 512}, "reduce_scatter of blocks.3"};
  CHECK(parse_watch_line(beat_line(sent)).report == sent);
  sent.what.clear();
  CHECK(parse_watch_line(beat_line(sent)).report == sent);
  const WatchMessage fail = parse_watch_line(verdict_line("fail", {ExitCode::kIo, 1, false, "a.npy: disk full"}));
  CHECK(fail.kind == WatchMessage::Kind::kFail);
  CHECK(fail.verdict.code == ExitCode::kIo);
  CHECK(fail.verdict.message == "a.npy: disk full");
  const WatchMessage end = parse_watch_line(verdict_line("end", {ExitCode::kNonFinite, 7, true, "loss is nan"}));
  CHECK(end.kind == WatchMessage::Kind::kEnd);
  CHECK(end.verdict.code == ExitCode::kNonFinite);
  CHECK(end.verdict.rank == 7);
  CHECK(end.verdict.common);
  CHECK(end.verdict.message == "loss is nan");
  CHECK(parse_watch_line("GET / HTTP/1.1").kind == WatchMessage::Kind::kUnknown);
  CHECK(parse_watch_line("").kind == WatchMessage::Kind::kUnknown);
}
