#include "comm/launch/rendezvous.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include <unistd.h>

#include "comm/launch/secret.h"
#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

constexpr double kConnectTrySeconds = 3;  // for one address
constexpr const char *kWelcome = "welcome", *kTaken = "taken", *kProve = "prove";
// To those who have no secret where one is needed, or one where none is known.
constexpr const char *kNeedsSecret = "needs_secret", *kKnowsNoSecret = "knows_no_secret";

using Ranks = std::vector<std::unique_ptr<LineSocket>>;

// The text by which both sides prove that they know the secret: it is never the same twice.
std::string exchange_text(const RankWord& word, int rank, const std::string& its_nonce, const std::string& nonce) {
  return fmt::format("{} {} {} {}", word.token, rank, its_nonce, nonce);
}

// Receives the connections to a port, and finds the ranks among them.
class Reception {
 public:
  Reception(const Listener& listener, const RankWord& word, int first, int size)
      : listener_(listener), word_(word), first_(first), ranks_(static_cast<size_t>(size)) {}

  // Waits for at most `seconds` for somebody to come or to speak.
  void receive(double seconds) {
    std::vector<int> descriptors = {is_full_ ? -1 : listener_.fd()};
    for (const Stranger& stranger : strangers_) descriptors.push_back(stranger.socket->fd());
    wait_readable(descriptors, seconds);
    let_in();
    for (Stranger& stranger : strangers_) {
      for (const std::string& line : stranger.socket->receive()) {
        if (!stranger.socket || !hear(line, stranger)) break;
      }
      if (stranger.socket && stranger.socket->closed()) stranger.socket.reset();
    }
    std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.socket; });
    // A rank that has ended since may be started again.
    for (std::unique_ptr<LineSocket>& rank : ranks_) {
      if (rank && rank->has_ended()) rank.reset();
    }
  }

  Ranks& ranks() { return ranks_; }
  bool is_complete() const {
    return std::all_of(ranks_.begin() + first_, ranks_.end(), [](const auto& rank) { return rank != nullptr; });
  }

 private:
  struct Stranger {
    std::unique_ptr<LineSocket> socket;
    double came;
    int rank = -1;           // once it has named one
    std::string proof = {};  // that it must give
  };

  // If the process can have no more connections, those that have said nothing for a while make room.
  void let_in() {
    try {
      while (std::unique_ptr<LineSocket> socket = listener_.accept()) {
        strangers_.push_back({std::move(socket), seconds_now()});
      }
      is_full_ = false;
    } catch (const Error&) {
      if (strangers_.empty()) throw;
      is_full_ = true;
      const double long_ago = seconds_now() - kConnectTrySeconds;
      std::erase_if(strangers_, [&](const Stranger& stranger) { return stranger.came < long_ago; });
    }
  }

  // Returns true if the stranger shall say more; otherwise it is gone, or one of the ranks.
  bool hear(const std::string& line, Stranger& stranger) {
    if (stranger.proof.empty()) {
      std::istringstream in(line);
      std::string token, nonce;
      in >> token >> stranger.rank >> nonce;
      const bool is_known =
          token == word_.token && stranger.rank >= first_ && stranger.rank < static_cast<int>(ranks_.size());
      if (is_known && nonce.empty() != word_.secret.empty()) {
        stranger.socket->send(nonce.empty() ? kNeedsSecret : kKnowsNoSecret);
      } else if (is_known && !nonce.empty()) {
        challenge(stranger, nonce);
        return true;
      } else if (is_known) {
        admit(stranger);
      }
    } else if (is_proof(line, stranger.proof)) {
      admit(stranger);
    }
    stranger.socket.reset();
    return false;
  }

  void challenge(Stranger& stranger, const std::string& nonce) const {
    const std::string exchange = exchange_text(word_, stranger.rank, nonce, random_nonce());
    stranger.proof = proof_of(word_.secret, "rank " + exchange);
    const std::string own_nonce = exchange.substr(exchange.rfind(' ') + 1);
    stranger.socket->send(
        fmt::format("{} {} {}", kProve, own_nonce, proof_of(word_.secret, "listener " + exchange)));
  }

  void admit(Stranger& stranger) {
    const int rank = stranger.rank;
    std::unique_ptr<LineSocket>& place = ranks_[static_cast<size_t>(rank)];
    if (place && !place->has_ended()) {
      stranger.socket->send(kTaken);
      if (!std::exchange(told_of_second_, true)) {
        log_warning("a second process came as rank {} and was sent away; give every process a rank of its own",
                    rank);
      }
      return;
    }
    stranger.socket->send(kWelcome);
    place = std::move(stranger.socket);
  }

  const Listener& listener_;
  const RankWord& word_;
  const int first_;
  Ranks ranks_;
  std::vector<Stranger> strangers_;
  bool is_full_ = false, told_of_second_ = false;
};

// The meaning of an answer that is no welcome: who listens there.
std::string meaning_of(const std::string& answer, int other) {
  if (answer == kNeedsSecret)
    return fmt::format("rank {} has a secret, and this one has not: set {}", other, kSecret);
  if (answer == kKnowsNoSecret)
    return fmt::format("rank {} has no secret, and this one has: set {} there", other, kSecret);
  if (answer.starts_with(kProve))
    return fmt::format("somebody answers who does not know the secret of {}", kSecret);
  // A port of the same number on another network, a run before this.
  return fmt::format("somebody answers who is not rank {} of this run, or has another WORLD_SIZE", other);
}

// Exchanges the word of the run with who listens at the other end; closes the connection where that is no rank.
void introduce(Connection& to, const RankWord& word, int rank, int other) {
  const std::string nonce = word.secret.empty() ? "" : random_nonce();
  to.socket->send(join({word.token, std::to_string(rank), nonce}));
  const double answer_by = seconds_now() + kConnectTrySeconds;
  std::string answer;
  bool knows_secret = word.secret.empty();
  while (answer.empty() && !to.socket->closed() && seconds_now() < answer_by) {
    wait_readable({to.socket->fd()}, answer_by - seconds_now());
    const std::vector<std::string> lines = to.socket->receive();
    if (lines.empty()) continue;
    answer = lines[0];
    if (knows_secret && answer == kWelcome && !to.socket->closed()) return;
    if (knows_secret && answer == kTaken) {
      throw_bad_input("rank {} has a connection with another rank {}: give every process a rank of its own", other,
                      rank);
    }
    if (knows_secret || !answer.starts_with(kProve)) break;
    std::istringstream in(answer);
    std::string its_nonce, proof;
    in >> its_nonce >> its_nonce >> proof;
    const std::string exchange = exchange_text(word, rank, nonce, its_nonce);
    knows_secret = is_proof(proof, proof_of(word.secret, "listener " + exchange));
    if (!knows_secret) break;
    to.socket->send(proof_of(word.secret, "rank " + exchange));
    answer.clear();
  }
  to = {nullptr, Connection::Failure::kOther, meaning_of(answer, other)};
}

}  // namespace

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

std::string host_key() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}", name.data(), boot);
}

std::string missing_ranks(const Ranks& ranks, int first) {
  constexpr int kShown = 16;
  std::vector<std::string> missing;
  for (size_t r = static_cast<size_t>(first); r < ranks.size(); ++r) {
    if (!ranks[r]) missing.push_back(std::to_string(r));
  }
  const size_t more = missing.size() > kShown ? missing.size() - kShown : 0;
  missing.resize(missing.size() - more);
  return join(missing) + (more > 0 ? fmt::format(" and {} more", more) : "");
}

Ranks accept_ranks(const Listener& listener, const RankWord& word, int first, int size, const WaitTimes& times) {
  Reception reception(listener, word, first, size);
  WaitNotice notice(times);
  const auto goes_on = [&] {
    return notice.goes_on([&] {
      return fmt::format("rank {} waits on TCP port {} for the ranks that have not come, {}", first - 1,
                         listener.port(), missing_ranks(reception.ranks(), first));
    });
  };
  while (!reception.is_complete() && goes_on()) reception.receive(WaitNotice::kRound);
  return std::move(reception.ranks());
}

Connection connect_to_rank(const RankAddress& to, int rank, const WaitTimes& times) {
  WaitNotice notice(times);
  Connection last;
  for (;;) {
    for (const std::string& address : to.addresses) {
      last = connect_to(address, to.port, kConnectTrySeconds);
      if (last.socket) introduce(last, to.word, rank, to.rank);
      if (last.socket || (to.is_open && last.failure == Connection::Failure::kRefused)) return last;
      const bool goes_on = notice.goes_on([&] {
        return fmt::format("rank {} waits for rank {} at {}, TCP port {} ({})", rank, to.rank, address, to.port,
                           last.problem);
      });
      if (!goes_on) return last;
    }
    wait_readable({}, WaitNotice::kRound);
  }
}

std::vector<std::string> loopback_addresses() { return {"127.0.0.1", "::1"}; }

Ranks connect_ranks(const Gather& gather, int rank, int first, int last, Reach reach, double seconds) {
  const WaitTimes times{.limit = seconds};
  std::unique_ptr<Listener> listener;
  RankWord own;
  std::string offer, problem;
  if (rank >= first && rank < last) {
    try {
      listener = std::make_unique<Listener>(reach);
      own.token = random_token();
      offer = fmt::format("{} {} {} {}", own.token, listener->port(), host_key(),
                          reach == Reach::kNetwork ? join(own_addresses()) : "");
    } catch (const Error& error) {
      problem = error.what();  // the others must not wait for it
    }
  }
  const std::vector<std::string> offers = gather(offer);
  Ranks ranks(offers.size());
  for (int r = first; r < std::min(rank, last); ++r) {
    std::istringstream in(offers[static_cast<size_t>(r)]);
    RankAddress to;
    to.rank = r;
    std::string its_host;
    if (!(in >> to.word.token >> to.port >> its_host)) continue;
    if (its_host == host_key()) to.addresses = loopback_addresses();
    for (std::string address; in >> address;) to.addresses.push_back(address);
    Connection connection = connect_to_rank(to, rank, times);
    if (!connection.socket) {
      problem = fmt::format(
          "rank {} cannot reach rank {} at any of: {}, TCP port {} ({}): open the network between the hosts", rank,
          r, join(to.addresses), to.port, connection.problem);
    }
    ranks[static_cast<size_t>(r)] = std::move(connection.socket);
  }
  if (listener) {
    Ranks later = accept_ranks(*listener, own, rank + 1, static_cast<int>(ranks.size()), times);
    std::move(later.begin() + rank + 1, later.end(), ranks.begin() + rank + 1);
    if (const std::string missing = missing_ranks(ranks, rank + 1); !missing.empty()) {
      problem = fmt::format("ranks have not come to rank {}, TCP port {}: {}; open the network between the hosts",
                            rank, listener->port(), missing);
    }
  }
  // Before this no rank may send what another would take for the rest of its welcome.
  agree_on_no_problem(gather, problem);
  return ranks;
}

void agree_on_no_problem(const Gather& gather, const std::string& problem) {
  // A rank that knows the addresses says more than the one that waits for it: the last word counts.
  std::string last;
  for (const std::string& word : gather(problem)) last = word.empty() ? last : word;
  if (!last.empty()) throw_bad_input("{}", last);
}

std::string join(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) {
    if (!word.empty()) text += (text.empty() ? "" : between) + word;
  }
  return text;
}

}  // namespace parka
