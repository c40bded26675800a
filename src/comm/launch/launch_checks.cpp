#include "comm/launch/launch_checks.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

constexpr size_t kShownCharacters = 120;  // of a line in a message

int number_in(const char* text, int otherwise) {
  int number = otherwise;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), number);
  return number;
}

// The first line in which the two texts differ, from each of them; empty where a text has ended.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream in_a(a), in_b(b);
  std::string line_a, line_b;
  for (;;) {
    const bool has_a = static_cast<bool>(std::getline(in_a, line_a));
    const bool has_b = static_cast<bool>(std::getline(in_b, line_b));
    if (!has_a) line_a.clear();
    if (!has_b) line_b.clear();
    if (line_a != line_b || (!has_a && !has_b)) break;
  }
  const auto shown = [](const std::string& line) {
    const size_t begin = std::min(line.find_first_not_of(" \t"), line.size());
    return line.size() == begin ? "nothing" : line.substr(begin, kShownCharacters);
  };
  return {shown(line_a), shown(line_b)};
}

}  // namespace

LaunchedAs launched_as(const std::function<const char*(const char*)>& variable) {
  struct Launcher {
    const char *size, *rank;
  };
  // The order matters: mpirun under Slurm starts its helpers with srun, whose variables then describe the helpers.
  constexpr Launcher kLaunchers[] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                     {"PMI_SIZE", "PMI_RANK"},
                                     {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
  for (const Launcher& launcher : kLaunchers) {
    const int size = number_in(variable(launcher.size), 0);
    if (size > 0) return {size, number_in(variable(launcher.rank), 0), launcher.size};
  }
  if (variable("PMIX_RANK") != nullptr) return {0, number_in(variable("PMIX_RANK"), 0), "PMIX_RANK"};
  return {};
}

void check_same_text(const std::string& what, const std::vector<std::string>& texts,
                     const std::vector<std::string>& hosts, const std::string& remedy) {
  for (size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const auto [here, first] = first_difference(texts[r], texts[0]);
    throw_bad_input("{} of rank {} ({}) differs from that of rank 0 ({}): {}, not {}; {}", what, r, hosts[r],
                    hosts[0], here, first, remedy);
  }
}

int choose_gpu(int num_visible, int local_rank) { return num_visible == 1 ? 0 : local_rank; }

void check_gpus(const std::vector<GpuClaim>& claims) {
  std::map<int, int> ranks_on_host;
  for (const GpuClaim& claim : claims) ++ranks_on_host[claim.host_leader];
  std::map<std::pair<int, std::string>, size_t> owners;
  for (size_t r = 0; r < claims.size(); ++r) {
    const GpuClaim& claim = claims[r];
    if (claim.wanted != claims[0].wanted) {
      throw_bad_input("rank {} ({}) runs on {} and rank 0 ({}) on {}; set device.kind to cuda or cpu for all", r,
                      claim.host, claim.wanted ? "a GPU" : "the CPU", claims[0].host,
                      claims[0].wanted ? "a GPU" : "the CPU");
    }
    if (!claim.wanted) continue;
    if (claim.num_visible == 0) {
      throw_bad_input("rank {} ({}) finds no GPU (does nvidia-smi list one there?); device.kind=cpu needs none", r,
                      claim.host);
    }
    if (claim.ordinal >= claim.num_visible) {
      throw_bad_input(
          "{} ranks were started on {}, where {} GPUs are visible; start one rank per GPU (mpirun --map-by "
          "ppr:{}:node, and see CUDA_VISIBLE_DEVICES)",
          ranks_on_host[claim.host_leader], claim.host, claim.num_visible, claim.num_visible);
    }
    const auto [owner, is_new] = owners.try_emplace({claim.host_leader, claim.pci_bus_id}, r);
    if (!is_new) {
      throw_bad_input(
          "ranks {} and {} both have the GPU {} of {}; give every rank its own (mpirun -np, CUDA_VISIBLE_DEVICES)",
          owner->second, r, claim.pci_bus_id, claim.host);
    }
  }
}

std::string to_text(const GpuClaim& claim) {
  return fmt::format("{} {} {} {} {} {}", claim.host, claim.host_leader, claim.wanted ? 1 : 0, claim.num_visible,
                     claim.ordinal, claim.pci_bus_id);
}

GpuClaim gpu_claim_of(const std::string& text) {
  std::istringstream in(text);
  GpuClaim claim;
  in >> claim.host >> claim.host_leader >> claim.wanted >> claim.num_visible >> claim.ordinal >> claim.pci_bus_id;
  return claim;
}

}  // namespace parka
