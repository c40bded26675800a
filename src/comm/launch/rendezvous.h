#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/launch/line_socket.h"
#include "comm/launch/start_wait.h"

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
  bool is_open = false;  // it listens already: where nobody does it has ended
};

// The connection of rank `rank` to one that has welcomed it. Without a socket: why there was none within the limit.
// Throws Error(kBadInput) if another process is that rank.
Connection connect_to_rank(const RankAddress& to, int rank, const WaitTimes& times);

// "1 2 3", of the ranks that have no connection; of many the first ones.
std::string missing_ranks(const std::vector<std::unique_ptr<LineSocket>>& ranks, int first);

// The addresses of this host for ranks on it.
std::vector<std::string> loopback_addresses();
// By which ranks elsewhere reach a port that can be reached from there: "a b c".
std::string addresses_of(Reach reach);

// "a b c"
std::string join(const std::vector<std::string>& words, const char* between = " ");

}  // namespace parka
