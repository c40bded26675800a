#pragma once
#include <functional>
#include <string>
#include <vector>

// What is checked before ranks begin to work together. Every rank gathers what all have and comes to the same
// conclusion; nothing here waits or looks at the machine.
namespace parka {

// What a launcher (mpirun, srun) says in the environment of the processes that it starts.
struct LaunchedAs {
  int size = 1;  // 0: several may have been started, and how many is not said
  int rank = 0;
  std::string variable;  // that said so; empty: none did
};
// `variable(name)` is its value, or nullptr, as of getenv.
LaunchedAs launched_as(const std::function<const char*(const char*)>& variable);

// Throws Error(kBadInput) when texts [ranks] differ: names the first rank that differs from rank 0 and the first
// line where it does. `what` is "the config", `remedy` is what to do about it.
void check_same_text(const std::string& what, const std::vector<std::string>& texts,
                     const std::vector<std::string>& hosts, const std::string& remedy);

// What a rank has to say of its GPU.
struct GpuClaim {
  std::string host;
  int host_leader = 0;  // the lowest rank of the host
  bool wanted = false;
  int num_visible = 0;  // GPUs that the process sees
  int ordinal = 0;      // that it takes
  std::string pci_bus_id;
};
// Which of the visible GPUs a rank takes: its place within the host; the only one where the launcher shows it one.
int choose_gpu(int num_visible, int local_rank);
// Throws Error(kBadInput) unless all ranks want a GPU or none does, and every rank has one of its own.
void check_gpus(const std::vector<GpuClaim>& claims);

std::string to_text(const GpuClaim& claim);
GpuClaim gpu_claim_of(const std::string& text);

}  // namespace parka
