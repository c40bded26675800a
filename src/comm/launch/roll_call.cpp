#include "comm/launch/roll_call.h"

#include <algorithm>

namespace parka {

std::string describe(const RankReport& report) {
  std::string text = report.what.empty() ? "at the start" : report.what;
  if (report.step > 0) text = fmt::format("in step {}, {}", report.step, text);
  const CollectiveCounts& done = report.collectives;
  if (done.reached > done.finished) return text + fmt::format(", in collective {}", done.finished + 1);
  return text + fmt::format(", after {} collectives", done.finished);
}

RollCall::RollCall(std::vector<std::string> names, const WatchdogTimes& times, double now) : times_(times) {
  ranks_.resize(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    ranks_[i].name = std::move(names[i]);
    ranks_[i].heard = ranks_[i].advanced = now;
  }
}

void RollCall::heard(int rank, const RankReport& report, double now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.heard = now;
  if (report == r.report) return;
  r.report = report;
  r.advanced = now;
}

void RollCall::failed(int rank, ExitCode code, const std::string& message, double now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.state = State::kFailed;
  r.code = code;
  r.message = message;
  first_bad_news_ = first_bad_news_.value_or(now);
}

void RollCall::lost(int rank, double now) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  if (r.state != State::kAlive) return;  // it has reported why it ends
  r.state = State::kLost;
  r.code = ExitCode::kRankLost;
  r.message = fmt::format("{} died, last heard of {}", r.name, describe(r.report));
  first_bad_news_ = first_bad_news_.value_or(now);
}

void RollCall::left(int rank) { ranks_[static_cast<size_t>(rank)].state = State::kLeft; }

bool RollCall::all_left() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.state == State::kLeft; });
}

void RollCall::forgive(double now) {
  for (Rank& r : ranks_) r.heard = r.advanced = now;
  if (first_bad_news_) first_bad_news_ = now;  // its explanation may still be on its way
}

std::optional<Verdict> RollCall::verdict(double now) const {
  if (first_bad_news_) {
    const bool all_heard =
        std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.state == State::kAlive; });
    if (!all_heard && now - *first_bad_news_ < times_.settle) return std::nullopt;
    return worst_news();
  }
  if (const std::optional<Verdict> silent = silence(now)) return silent;
  return stall(now);
}

// The most informative failure: a rank that threw its own Error, then one that died, then one that has lost others.
// Among equals it is the lowest rank.
Verdict RollCall::worst_news() const {
  const auto weight = [](const Rank& r) {
    if (r.state == State::kFailed) return r.code == ExitCode::kRankLost ? 1 : 3;
    return r.state == State::kLost ? 2 : 0;
  };
  const auto worst = std::max_element(ranks_.begin(), ranks_.end(),
                                      [&](const Rank& a, const Rank& b) { return weight(a) < weight(b); });
  const bool common = std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) {
    return r.state == State::kFailed && r.code == worst->code && r.message == worst->message;
  });
  return {worst->code, static_cast<int>(worst - ranks_.begin()), common, worst->message};
}

std::optional<Verdict> RollCall::silence(double now) const {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& r = ranks_[i];
    if (r.state != State::kAlive || now - r.heard <= times_.silence) continue;
    return Verdict{ExitCode::kRankLost, static_cast<int>(i), false,
                   fmt::format("{} has sent nothing for {:.0f} s, last heard of {}: it hangs, or its host or "
                               "network is down",
                               r.name, now - r.heard, describe(r.report))};
  }
  return std::nullopt;
}

// The others wait for the rank that has reached the fewest collectives. It may be computing. It is blamed only if
// its reports have not changed for the stall time, while another rank has been in a collective that it has not
// reached. If all ranks have reached the same collective and none leaves it, the collective itself hangs.
std::optional<Verdict> RollCall::stall(double now) const {
  const auto behind = [](const Rank& a, const Rank& b) {
    const CollectiveCounts &x = a.report.collectives, &y = b.report.collectives;
    if (x.reached != y.reached) return x.reached < y.reached;
    if (x.finished != y.finished) return x.finished < y.finished;
    return a.advanced < b.advanced;
  };
  const Rank* last = nullptr;
  for (const Rank& r : ranks_) {
    if (r.state == State::kAlive && (last == nullptr || behind(r, *last))) last = &r;
  }
  if (last == nullptr || now - last->advanced <= times_.stall) return std::nullopt;
  const CollectiveCounts& done = last->report.collectives;
  const bool stuck_inside = done.reached > done.finished;
  for (const Rank& r : ranks_) {
    const CollectiveCounts& ahead = r.report.collectives;
    const bool has_stood = now - r.advanced > times_.stall;
    const bool waits = has_stood && ahead.reached > ahead.finished && ahead.reached > done.reached;
    const bool stuck_too = has_stood && stuck_inside && &r != last;
    if (r.state != State::kAlive || !(waits || stuck_too)) continue;
    const std::string why = waits ? fmt::format("{} waits for it in collective {}", r.name, ahead.finished + 1)
                                  : "the other ranks make no progress either: the collective hangs";
    return Verdict{ExitCode::kRankLost, static_cast<int>(last - ranks_.data()), false,
                   fmt::format("{} has made no progress for {:.0f} s {}; {}", last->name, now - last->advanced,
                               describe(last->report), why)};
  }
  return std::nullopt;
}

}  // namespace parka
