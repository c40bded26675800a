#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/launch/line_socket.h"
#include "comm/launch/rendezvous.h"
#include "comm/launch/start_wait.h"
#include "comm/transport.h"

namespace parka {

// The address where the ranks of a run meet (rendezvous).
struct RendezvousPlace {
  Reach reach = Reach::kNetwork;       // kThisHost: all ranks are here, and rank 0 listens since before they were
  std::vector<std::string> addresses;  // of rank 0's host: names or numbers
  int port = 0;
  RankWord word;
  std::shared_ptr<Listener> listener;  // on rank 0: already listens there; null: it is to listen
};

// Joins the other `size` - 1 ranks, of which those other than 0 connect to rank 0. Throws Error(kBadInput) if some
// are still missing after the limit.
std::unique_ptr<Transport> join_over_tcp(const RendezvousPlace& place, int rank, int size, const WaitTimes& times);

}  // namespace parka
