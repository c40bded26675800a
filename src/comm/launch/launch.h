#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/launch/watchdog.h"

namespace parka {

struct LaunchOptions {
  std::string version;  // of Parka: must be the same on all ranks
  WatchdogTimes watchdog;
};

// The processes that mpirun or srun started together, and this one's place among them. A process that was started
// alone is a run of one rank, needs no MPI and starts none.
class Launch {
 public:
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& host() const { return hosts_[static_cast<size_t>(rank_)]; }

  // Agreement between hosts; usable before there is a device.
  Communicator& hosts() { return *agreement_; }
  Watchdog& watchdog() { return watchdog_; }

  // These wait for all ranks, and throw the same Error(kBadInput) on all of them.
  // `text` must be the same on all ranks. The error names a rank and the first line that differs: `what` is "the
  // config", `remedy` says what to do.
  void require_same(const std::string& what, const std::string& text, const std::string& remedy);
  // The ordinal of the GPU that this rank shall compute on, by its place within its host, or -1 where it does not
  // want one.
  int agree_on_gpu(bool wanted);
  // The collectives of all ranks for tensors of `device`, which must outlive them: NCCL on GPUs, MPI on CPUs.
  std::unique_ptr<Communicator> make_communicator(Device& device);

 private:
  friend int run_launched(const LaunchOptions& options, const std::function<int(Launch&)>& body);
  Launch();

  void join(const LaunchOptions& options);
  int finish(int exit_code);
  int fail(ExitCode code, const std::string& message);

  int rank_ = 0, size_ = 1, local_rank_ = 0, host_leader_ = 0;
  bool uses_mpi_ = false;
  std::vector<std::string> hosts_;  // their names, by rank
  Watchdog watchdog_;
  std::unique_ptr<Communicator> agreement_;
};

// Joins the other ranks of the run, if there are any, calls `body` on each and parts from them; returns the exit
// code of the process. When a rank throws, all end with the code of its Error: the rank to blame gets the Error
// rethrown here, with its name in front unless all ranks failed alike; on the others this returns the code, or the
// watchdog has ended them already. `body` must have given up everything that it allocated when it returns or
// throws.
int run_launched(const LaunchOptions& options, const std::function<int(Launch&)>& body);

}  // namespace parka
