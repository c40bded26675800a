#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/launch/line_socket.h"

// How ranks find each other over TCP: one listens, the others connect to it and say who they are. Until then a
// connection may be anybody's.
namespace parka {

// A random number that only the ranks of this run know, so that no other process is taken for one of them.
std::string random_token();

// Names the host of this process: equal on ranks that share one, different on others, though these may have the
// same name.
std::string host_key();

// Waits for the connections of ranks `first` to `size` - 1, which begin with "TOKEN RANK", and welcomes them.
// Element r is the connection of rank r; null for those that have not come within `seconds`.
std::vector<std::unique_ptr<LineSocket>> accept_ranks(const Listener& listener, const std::string& token, int first,
                                                      int size, double seconds);

// The connection of rank `rank` to the one that listens at one of `addresses`, and has welcomed it; nullptr if it
// cannot be reached within `seconds`.
std::unique_ptr<LineSocket> connect_to_rank(const std::vector<std::string>& addresses, int port,
                                            const std::string& token, int rank, double seconds);

// "a b c"
std::string join(const std::vector<std::string>& words);

}  // namespace parka
