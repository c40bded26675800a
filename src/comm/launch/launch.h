#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/launch/line_socket.h"
#include "comm/launch/start_wait.h"
#include "comm/launch/watchdog.h"
#include "comm/transport.h"

namespace parka {
struct LaunchedAs;
struct LocalRank;

struct LaunchOptions {
  std::string version;  // of Parka: must be the same on all ranks
  WatchdogTimes watchdog;
  int local_ranks = 1;  // that each process becomes, on its host
  StartTimes start = {};
  // Called with the number of all ranks before this process becomes several of them; throws if they cannot be so
  // many.
  std::function<void(int size)> check_size = {};
};

// The ranks of a run, and this process among them. mpirun has started them, or srun, or run_launched() itself, or
// whoever sets RANK, WORLD_SIZE and MASTER_ADDR. A process started alone is a run of one rank.
class Launch {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& host() const { return hosts_[static_cast<size_t>(rank_)]; }

  // For agreement between the ranks' hosts; usable before there is a device.
  Communicator& hosts() { return *agreement_; }

  // These wait for all ranks, and throw the same Error(kBadInput) on all of them.
  // `text` must be the same on all ranks. Otherwise the error names a rank, the first line that differs, `what` the
  // text is ("the config"), and `remedy`, what to do about it.
  void require_same(const std::string& what, const std::string& text, const std::string& remedy);
  // The ordinal of the GPU that this rank computes on, chosen by its rank within the host; -1 if it wants none.
  int agree_on_gpu(bool wanted);
  // The collectives of all ranks for tensors of `device`: NCCL on GPUs, TCP on CPUs. `device` must outlive
  // them.
  std::unique_ptr<Communicator> make_communicator(Device& device);

 private:
  friend int run_rank(const LaunchOptions& options, const LaunchedAs& launched, LocalRank local,
                      const std::function<int(Launch&)>& body);
  // Finds the other ranks.
  Launch(const LaunchOptions& options, const LaunchedAs& launched, LocalRank local);

  void join(const LaunchOptions& options);
  int finish(int exit_code);
  int fail(ExitCode code, const std::string& message);

  int rank_ = 0, size_ = 1, local_rank_ = 0, host_leader_ = 0;
  bool one_code_for_all_ = false;       // the launcher kills the other ranks when one ends with another code than 0
  bool has_own_log_ = false;            // who reads its words may not see those of other ranks
  Reach reach_ = Reach::kNetwork;       // of the ports of ranks
  std::vector<std::string> hosts_;      // their names, by rank
  std::vector<std::string> host_keys_;  // equal on one host, and there alone: hosts may have one name
  Watchdog watchdog_;
  std::unique_ptr<Transport> transport_;  // null for one rank
  std::unique_ptr<Communicator> agreement_;
};

// Starts options.local_ranks, joins the other ranks of the run, if there are any, calls `body` on each and leaves
// them again. Returns the exit code of the process, the one that `body` returned; under mpirun and srun only rank 0
// ends with kStopped, the others with 0. When a rank throws, all exit with the code of its Error. On the rank to
// blame the Error is rethrown, with the rank's name in front unless all ranks failed alike; so it is on ranks that
// failed alike and were not started by one command. On the others this
// returns the code, or the watchdog has ended them already. `body` must have released all that it allocated when it
// returns or throws.
int run_launched(const LaunchOptions& options, const std::function<int(Launch&)>& body);

}  // namespace parka
