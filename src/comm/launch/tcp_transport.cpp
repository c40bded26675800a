#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "comm/launch/rendezvous.h"
#include "core/error.h"

namespace parka {
namespace {

constexpr int kRoundMilliseconds = static_cast<int>(1000 * WaitNotice::kRound);
constexpr double kLinkSeconds = 60;  // for a rank to connect to another, once both run

// Agreement goes through rank 0, with which every rank is connected. Ranks other than 0 are connected with each
// other once connect_all() is called.
class TcpTransport final : public Transport {
 public:
  // `connections[r]` is the one with rank r; on ranks other than 0 there is only that with rank 0.
  TcpTransport(int rank, Reach reach, std::vector<std::unique_ptr<LineSocket>> connections)
      : rank_(rank), reach_(reach), links_(connections.size()), all_connected_(connections.size() == 2) {
    adopt(std::move(connections));
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(links_.size()); }

  void connect_all() override;
  void send(const void* data, int64_t bytes, int to) override {
    if (bytes > 0) link(to).outgoing.push_back({static_cast<const std::byte*>(data), bytes});
  }
  void receive(void* data, int64_t bytes, int from) override {
    if (bytes > 0) link(from).incoming.push_back({static_cast<std::byte*>(data), bytes});
  }
  void wait() override;

  std::vector<std::string> gather_text(const std::string& text) override;
  void limit_waits(const WaitTimes* times) override {
    times_ = times == nullptr ? std::nullopt : std::optional(*times);
  }
  void finish() override { gather_text(""); }

 private:
  template <typename Byte>
  struct Message {
    Byte* data;
    int64_t bytes;  // still to come
  };
  struct Link {
    std::unique_ptr<LineSocket> socket;
    std::deque<Message<const std::byte>> outgoing;
    std::deque<Message<std::byte>> incoming;
  };

  Link& link(int rank) {
    Link& link = links_[static_cast<size_t>(rank)];
    PARKA_REQUIRE(link.socket != nullptr);
    return link;
  }
  void adopt(std::vector<std::unique_ptr<LineSocket>> connections) {
    for (size_t r = 0; r < links_.size(); ++r) {
      if (connections[r]) links_[r].socket = std::move(connections[r]);
    }
  }
  // Moves what the network takes or has; false if nothing is left to move.
  bool advance(int rank);
  [[noreturn]] static void throw_lost(int rank, const std::string& reason) {
    throw Error(ExitCode::kRankLost, fmt::format("the connection to rank {} is lost: {}", rank, reason));
  }

  // The ranks from which something is awaited, with their addresses.
  std::string awaited() const;

  int rank_;
  Reach reach_;
  std::vector<Link> links_;  // by rank; none with itself
  std::optional<WaitTimes> times_;
  bool all_connected_;
};

void TcpTransport::connect_all() {
  if (std::exchange(all_connected_, true)) return;
  const auto gather = [&](const std::string& text) { return gather_text(text); };
  adopt(connect_ranks(gather, rank_, 1, size() - 1, reach_, kLinkSeconds));
}

bool TcpTransport::advance(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  while (!link.outgoing.empty()) {
    auto& [data, bytes] = link.outgoing.front();
    const ssize_t count = ::send(link.socket->fd(), data, static_cast<size_t>(bytes), MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) throw_lost(rank, std::strerror(errno));
    if (count < 0) break;
    data += count;
    bytes -= count;
    if (bytes == 0) link.outgoing.pop_front();
  }
  while (!link.incoming.empty()) {
    auto& [data, bytes] = link.incoming.front();
    const ssize_t count = ::recv(link.socket->fd(), data, static_cast<size_t>(bytes), 0);
    if (count == 0) throw_lost(rank, "it has ended");
    if (count < 0 && errno != EAGAIN && errno != EINTR) throw_lost(rank, std::strerror(errno));
    if (count < 0) break;
    data += count;
    bytes -= count;
    if (bytes == 0) link.incoming.pop_front();
  }
  return !link.outgoing.empty() || !link.incoming.empty();
}

std::string TcpTransport::awaited() const {
  std::vector<std::string> ranks;
  for (int r = 0; r < size(); ++r) {
    const Link& link = links_[static_cast<size_t>(r)];
    if (!link.incoming.empty()) ranks.push_back(fmt::format("rank {} at {}", r, peer_of(link.socket->fd())));
  }
  return join(ranks, ", ");
}

// Sends and receives at the same time, so that two ranks with long messages for each other do not both wait for
// room.
void TcpTransport::wait() {
  std::vector<pollfd> polled;
  WaitNotice notice(times_.value_or(WaitTimes{}));
  const auto waits = [&] { return fmt::format("rank {} waits for word from {}", rank_, awaited()); };
  do {
    polled.clear();
    for (int r = 0; r < size(); ++r) {
      if (!advance(r)) continue;
      const Link& waiting = link(r);
      const int events = (waiting.outgoing.empty() ? 0 : POLLOUT) | (waiting.incoming.empty() ? 0 : POLLIN);
      polled.push_back({waiting.socket->fd(), static_cast<short>(events), 0});
    }
    if (!polled.empty()) ::poll(polled.data(), polled.size(), times_ ? kRoundMilliseconds : -1);
    if (!polled.empty() && times_ && !notice.goes_on(waits)) {
      throw Error(
          ExitCode::kRankLost,
          fmt::format("{} has said nothing for {:.0f} s after it came: it hangs or is stopped, or its host or "
                      "network is down",
                      awaited(), notice.waited()));
    }
  } while (!polled.empty());
}

// Every rank sends its text, after the length of it, to rank 0, which sends all of them to every rank.
std::vector<std::string> TcpTransport::gather_text(const std::string& text) {
  std::vector<int64_t> lengths(links_.size()), offsets(links_.size());
  const auto bytes_of_lengths = static_cast<int64_t>(lengths.size() * sizeof(lengths[0]));
  const auto own_length = static_cast<int64_t>(text.size());
  if (rank_ == 0) {
    lengths[0] = own_length;
    for (int r = 1; r < size(); ++r) receive(&lengths[r], sizeof(lengths[r]), r);
  } else {
    send(&own_length, sizeof(own_length), 0);
    send(text.data(), own_length, 0);
    receive(lengths.data(), bytes_of_lengths, 0);
  }
  wait();
  std::exclusive_scan(lengths.begin(), lengths.end(), offsets.begin(), int64_t{0});
  std::string all(static_cast<size_t>(offsets.back() + lengths.back()), '\0');
  if (rank_ == 0) {
    text.copy(all.data(), text.size());
    for (int r = 1; r < size(); ++r) receive(all.data() + offsets[r], lengths[r], r);
    wait();
    for (int r = 1; r < size(); ++r) {
      send(lengths.data(), bytes_of_lengths, r);
      send(all.data(), static_cast<int64_t>(all.size()), r);
    }
  } else {
    receive(all.data(), static_cast<int64_t>(all.size()), 0);
  }
  wait();
  std::vector<std::string> texts;
  texts.reserve(links_.size());
  for (int r = 0; r < size(); ++r) texts.push_back(all.substr(offsets[r], lengths[r]));
  return texts;
}

std::unique_ptr<LineSocket> reach_rank_0(const RankAddress& to, int rank, int size, const WaitTimes& times) {
  Connection connection = connect_to_rank(to, rank, times);
  if (connection.socket) return std::move(connection.socket);
  if (to.is_open && connection.failure == Connection::Failure::kRefused) {
    throw Error(ExitCode::kRankLost, fmt::format("rank {} of {} finds rank 0 no more: it has ended", rank, size));
  }
  if (connection.failure == Connection::Failure::kUnknownName) {
    throw_bad_input(
        "rank {} of {} cannot find rank 0 at {}: {}, for {:.0f} s; name rank 0's host so that this one knows it, or by "
        "its numeric address",
        rank, size, join(to.addresses), connection.problem, times.limit);
  }
  throw_bad_input(
      "rank {} of {} cannot reach rank 0 at {}, TCP port {}, within {:.0f} s: {}; is rank 0 started there, as one of as "
      "many ranks, and is the port open?",
      rank, size, join(to.addresses), to.port, times.limit, connection.problem);
}

}  // namespace

std::unique_ptr<Transport> join_over_tcp(const RankAddress& rank_0, std::shared_ptr<Listener> listener, int rank,
                                         int size, const WaitTimes& times) {
  const Reach reach = rank_0.addresses.front() == loopback_addresses().front() ? Reach::kThisHost : Reach::kNetwork;
  std::vector<std::unique_ptr<LineSocket>> connections(static_cast<size_t>(size));
  if (rank != 0) {
    connections[0] = reach_rank_0(rank_0, rank, size, times);
    return std::make_unique<TcpTransport>(rank, reach, std::move(connections));
  }
  if (!listener) listener = std::make_shared<Listener>(reach, rank_0.port);
  connections = accept_ranks(*listener, rank_0.word, 1, size, times);
  const std::string missing = missing_ranks(connections, 1);
  if (!missing.empty()) {
    throw_bad_input(
        "of {} ranks these have not come to rank 0, TCP port {}, within {:.0f} s: {}; are they started, with the same "
        "WORLD_SIZE, and does MASTER_ADDR name this host?",
        size, listener->port(), times.limit, missing);
  }
  return std::make_unique<TcpTransport>(rank, reach, std::move(connections));
}

}  // namespace parka
