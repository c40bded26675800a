#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch/line_socket.h"
#include "comm/launch/start_wait.h"
#include "comm/transport.h"

// How ranks find each other over TCP: one listens, the others connect to it and say who they are. Until then a
// connection may be anybody's.
namespace parka {

// A random number that only the ranks of this run know, so that no other process is taken for one of them.
std::string random_token();

// Names the host of this process: equal on ranks that share one, different on others, though these may have the
// same name.
std::string host_key();

// By what the ranks of a run know each other.
struct RankWord {
  std::string token;   // travels: anybody on the network may know it
  std::string secret;  // does not, see secret.h; empty: none
};

// "1 2 3", of the ranks from `first` on that have no connection; of many the first ones.
std::string missing_ranks(const std::vector<std::unique_ptr<LineSocket>>& ranks, int first);

// Waits for the connections of ranks `first` to `size` - 1 to rank `first` - 1, which is this one. They begin with
// "TOKEN RANK". If there is a secret a nonce follows. The answer to that is "prove NONCE PROOF", and the answer to
// that a proof, too. Ranks that know the word are welcomed. A second process of a rank that is there is sent away,
// and both say so. Element r is the connection of rank r; null for ranks that have not come within the limit.
std::vector<std::unique_ptr<LineSocket>> accept_ranks(const Listener& listener, const RankWord& word, int first,
                                                      int size, const WaitTimes& times);

// The address at which a rank listens for others.
struct RankAddress {
  int rank = 0;
  std::vector<std::string> addresses;  // of its host: names or numbers
  int port = 0;
  RankWord word = {};
  bool is_open = false;  // it listens on this host alone, already: where nobody does it has ended
};

// The connection of rank `rank` to one that has welcomed it. Without a socket: why there was none within the limit.
// Throws Error(kBadInput) if another process is that rank.
Connection connect_to_rank(const RankAddress& to, int rank, const WaitTimes& times);

// Connects ranks that can already agree: `gather` has the text of every rank. Ranks `first` to `last` - 1 listen,
// and those after them come to them; element r is the connection with rank r. All ranks call it together. Throws
// the same Error(kBadInput) on all of them if one cannot reach another.
using Gather = std::function<std::vector<std::string>(const std::string&)>;
std::vector<std::unique_ptr<LineSocket>> connect_ranks(const Gather& gather, int rank, int first, int last,
                                                       Reach reach, double seconds);
// Throws Error(kBadInput) on all ranks if one has a problem.
void agree_on_no_problem(const Gather& gather, const std::string& problem);

// Joins the other `size` - 1 ranks, of which those other than 0 connect to rank 0. `listener` is that of rank 0 if
// it already listens. Throws Error(kBadInput) if some are still missing after the limit.
std::unique_ptr<Transport> join_over_tcp(const RankAddress& rank_0, std::shared_ptr<Listener> listener, int rank,
                                         int size, const WaitTimes& times);

// The addresses of this host for ranks on it.
std::vector<std::string> loopback_addresses();

// "a b c"
std::string join(const std::vector<std::string>& words, const char* between = " ");

}  // namespace parka
