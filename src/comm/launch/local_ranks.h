#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/launch/line_socket.h"

namespace parka {

// A process among those that run_local_ranks() has started.
struct LocalRank {
  int rank = 0, size = 1;
  std::string token;                   // that only they know
  int port = 0;                        // where rank 0 of them listens on this host
  std::shared_ptr<Listener> listener;  // of rank 0
};

// Starts `size` processes, which are copies of this one, and calls `body` in each; there its result is returned,
// and what it throws is not caught. No thread may run yet. This process itself hands signals that ask for a stop
// (SIGTERM, SIGUSR1, SIGINT, SIGHUP) on to all of them and waits. A terminal's Ctrl-Z stops it with all of them. It
// returns 128 + N if signal N ended one of them, else the exit code of the first one that failed for itself, else
// that of the others. If it dies, they are killed, and if one of them fails, the others are killed should they not
// end by themselves.
int run_local_ranks(int size, const std::function<int(LocalRank)>& body);

}  // namespace parka
