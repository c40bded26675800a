#pragma once
#include <functional>
#include <string>
#include <vector>

// Checks before the ranks of a run begin to work together. Every rank calls them with the data of all ranks and
// comes to the same conclusion. Nothing here waits or looks at the machine.
namespace parka {

// The words of a launcher in the environment of the processes that it starts.
struct LaunchedAs {
  enum class By { kNobody, kMpirun, kSrun, kOther };  // kOther: torchrun, Kubernetes, a script
  By by = By::kNobody;
  int size = 1;
  int rank = 0;
  std::string variable = {};  // the environment variable that says so; empty: none does
  // The host of rank 0, the port on which it listens, and a word that processes of another start do not know.
  std::string address = {};
  int port = 0;
  std::string token = {};
  std::string secret = {};  // that of the environment (secret.h)
};
// `variable(name)` returns its value or nullptr, as getenv does. Among several launchers Open MPI's mpirun counts
// first, then RANK, WORLD_SIZE and MASTER_ADDR, then other mpiruns and Slurm. Throws Error(kBadInput) if the
// variables contradict each other, or say only that there are several processes.
LaunchedAs launched_as(const std::function<const char*(const char*)>& variable);

// Says what a run of `ranks` ranks, which no launcher has started, leaves idle of its batch job, and what to do;
// empty: nothing.
std::string idle_in_job(const std::function<const char*(const char*)>& variable, int ranks);
// The same of the GPUs that its only rank sees.
std::string idle_gpus(int ranks, int num_visible);

// The first host of a list such as Slurm's "gpu[003-010,12],login1".
std::string first_host(const std::string& list);

// Throws Error(kBadInput) when texts [ranks] differ. It names the first rank that differs from rank 0 and the first
// line that differs. `what` is the name of the text ("the config"), `remedy` says what to do about it.
void check_same_text(const std::string& what, const std::vector<std::string>& texts,
                     const std::vector<std::string>& hosts, const std::string& remedy);

// The GPU of a rank.
struct GpuClaim {
  std::string host;
  int host_leader = 0;  // the lowest rank of the host
  bool wanted = false;
  int num_visible = 0;  // GPUs that the process sees
  int ordinal = 0;      // the one that it takes
  std::string pci_bus_id;
};
// Which of the visible GPUs a rank takes: the one with its rank within the host, or the only visible one.
int choose_gpu(int num_visible, int local_rank);
// Throws Error(kBadInput) unless all ranks want a GPU or none does, and every rank has one of its own.
void check_gpus(const std::vector<GpuClaim>& claims);

std::string to_text(const GpuClaim& claim);
GpuClaim gpu_claim_of(const std::string& text);

}  // namespace parka
