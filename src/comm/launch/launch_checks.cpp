#include "comm/launch/launch_checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <cstring>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace parka {
namespace {

constexpr size_t kShownCharacters = 120;  // of a line or a value in a message

using Environment = std::function<const char*(const char*)>;

// The form of messages.
std::string shown(const Environment& variable, const char* name) {
  const char* const text = variable(name);
  return text == nullptr ? "not set" : *text == '\0' ? "empty" : std::string(text).substr(0, kShownCharacters);
}

// -1 where the text is no whole number.
int number_in(const Environment& variable, const char* name, int otherwise) {
  const char* const text = variable(name);
  if (text == nullptr) return otherwise;
  const char* const end = text + std::strlen(text);
  int number = -1;
  const auto [read, error] = std::from_chars(text, end, number);
  return error == std::errc() && read == end ? number : -1;
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

std::string text_in(const Environment& variable, const char* name) {
  const char* const text = variable(name);
  return text == nullptr ? "" : text;
}

// A word of the characters that separate no words.
std::string one_word(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c <= ' '; }, '_');
  return text;
}

// The variables by which a launcher numbers its processes, all of them and those of a host.
struct Numbering {
  const char *rank, *size, *size_on_host = nullptr;
};
constexpr Numbering kTorch = {"RANK", "WORLD_SIZE"}, kSlurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
// Open MPI, Hydra (MPICH, Intel MPI), MVAPICH, jsrun.
constexpr std::array<Numbering, 5> kMpiruns = {
    {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
     {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"},
     {"MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"},
     {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"}}};
constexpr const Numbering& kOpenMpi = kMpiruns[0];
// These number only hosts or the processes of a host, or tell no number of processes: PALS, ALPS, Kubernetes' jobs.
constexpr std::array<Numbering, 13> kPartly = {{{"LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                                                {"NODE_RANK", "NNODES"},
                                                {"PET_NODE_RANK", "PET_NNODES"},
                                                {"SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"},
                                                {"AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"},
                                                {"JOB_COMPLETION_INDEX", nullptr},
                                                {"PMIX_RANK", "OMPI_APP_CTX_NUM_PROCS"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                                {"PALS_RANKID", "PALS_LOCAL_SIZE"},
                                                {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                                                {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
                                                {"ALPS_APP_PE", nullptr},
                                                {"SLURM_PROCID", nullptr}}};

// For one of several processes.
LaunchedAs counted_by(const Environment& variable, LaunchedAs::By by, const Numbering& names) {
  const auto& [rank_name, size_name, size_on_host] = names;
  const LaunchedAs launched{.by = by,
                            .size = number_in(variable, size_name, -1),
                            .rank = number_in(variable, rank_name, -1),
                            .variable = size_name};
  if (launched.rank >= 0 && launched.rank < launched.size) return launched;
  throw_bad_input(
      "{0} is {1}, and {2} is {3}: {0} must be a number from 0 to {2} - 1; its launcher sets both, so set both or unset "
      "both",
      rank_name, shown(variable, rank_name), size_name, shown(variable, size_name));
}

// A name or a numeric address, not a URL or one with a port; "::1" has no port.
void check_address(const std::string& address, const Environment& variable) {
  const bool has_port = std::ranges::count(address, ':') == 1;
  if (!address.empty() && !has_port && address.find_first_of("/[]") == std::string::npos) return;
  throw_bad_input(
      "MASTER_ADDR is {}: give the name or numeric address of rank 0's host alone, as in node1, and the port as "
      "MASTER_PORT",
      shown(variable, "MASTER_ADDR"));
}

int port_in(const Environment& variable, int otherwise) {
  constexpr int kLargest = 65535;
  const int port = number_in(variable, "MASTER_PORT", otherwise);
  if (port < 1 || port > kLargest) {
    throw_bad_input("MASTER_PORT is {}: it must be a TCP port, from 1 to {}, that is free on the host of rank 0",
                    shown(variable, "MASTER_PORT"), kLargest);
  }
  return port;
}

// By torchrun's variables, which many other launchers set too.
LaunchedAs named_by_variables(const Environment& variable) {
  constexpr int kPort = 29500;  // PyTorch's
  LaunchedAs launched = counted_by(variable, LaunchedAs::By::kOther, kTorch);
  for (const auto& [name, limit] : {std::pair{"NNODES", launched.size + 1},
                                    {"NODE_RANK", launched.size},
                                    {"LOCAL_RANK", number_in(variable, "LOCAL_WORLD_SIZE", INT_MAX)}}) {
    if (number_in(variable, name, 0) < limit) continue;
    throw_bad_input("{} is {}, which contradicts WORLD_SIZE or LOCAL_WORLD_SIZE: correct or unset one of them",
                    name, shown(variable, name));
  }
  if (launched.size == 1) return launched;
  if (variable("MASTER_ADDR") == nullptr) {
    throw_bad_input(
        "WORLD_SIZE is {}, but MASTER_ADDR is not set: every rank needs RANK (from 0), WORLD_SIZE, MASTER_ADDR (the "
        "host of rank 0) and MASTER_PORT (a free port there); unset RANK and WORLD_SIZE to start one rank",
        launched.size);
  }
  launched.address = text_in(variable, "MASTER_ADDR");
  check_address(launched.address, variable);
  launched.port = port_in(variable, kPort);
  // torchrun listens there itself.
  if (text_in(variable, "TORCHELASTIC_USE_AGENT_STORE") == "True") ++launched.port;
  launched.token = one_word(fmt::format("parka/{}/{}", text_in(variable, "TORCHELASTIC_RUN_ID"),
                                        text_in(variable, "TORCHELASTIC_RESTART_COUNT")));
  return launched;
}

// srun and mpirun set no variable for the port: it follows from the number of their job, and is below those that
// systems give to outgoing connections.
constexpr int kFirstPort = 20000, kPorts = 10000;

LaunchedAs named_by_slurm(const Environment& variable) {
  LaunchedAs launched = counted_by(variable, LaunchedAs::By::kSrun, kSlurm);
  if (launched.size == 1) return launched;
  const unsigned job = static_cast<unsigned>(number_in(variable, "SLURM_JOB_ID", 0)),
                 step = static_cast<unsigned>(number_in(variable, "SLURM_STEP_ID", 0));
  launched.address = text_in(variable, "MASTER_ADDR");
  if (launched.address.empty()) launched.address = first_host(text_in(variable, "SLURM_STEP_NODELIST"));
  check_address(launched.address, variable);
  launched.port = port_in(variable, kFirstPort + static_cast<int>((7 * job + step) % kPorts));
  launched.token = fmt::format("slurm/{}.{}", job, step);
  return launched;
}

LaunchedAs named_by_mpirun(const Environment& variable, const Numbering& names) {
  LaunchedAs launched = counted_by(variable, LaunchedAs::By::kMpirun, names);
  if (launched.size == 1) return launched;
  const int on_host = number_in(variable, names.size_on_host, 0);
  launched.address = variable("MASTER_ADDR") == nullptr && on_host == launched.size
                         ? "127.0.0.1"
                         : text_in(variable, "MASTER_ADDR");
  if (launched.address.empty()) {
    throw_bad_input(
        "{} is {}, and {} is {}, but MASTER_ADDR is not set: on several hosts, give mpirun -x MASTER_ADDR=HOST, that of "
        "rank 0 (Hydra: -genv MASTER_ADDR HOST); or unset {} to start one rank",
        names.size, launched.size, names.size_on_host, shown(variable, names.size_on_host), names.size);
  }
  check_address(launched.address, variable);
  const std::string job = text_in(variable, "PMIX_NAMESPACE");
  unsigned number = 0;
  for (const char digit : job) number = 31 * number + static_cast<unsigned char>(digit);
  launched.port = port_in(variable, kFirstPort + static_cast<int>(number % kPorts));
  launched.token = one_word("mpirun/" + job);
  return launched;
}

// Refuses one process among several that only in part know of each other.
void refuse_partly_numbered(const Environment& variable) {
  const auto require = [&](const char* name, bool is_alone) {
    if (is_alone) return;
    throw_bad_input(
        "{} is {}, as for one of several processes, but RANK and WORLD_SIZE are not set: start parka with mpirun, once on "
        "a host with --ranks, or give each process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (docs/cluster.md); unset "
        "it to start one rank",
        name, shown(variable, name));
  };
  for (const auto& [rank, size, on_host] : kPartly) {
    require(rank, number_in(variable, rank, 0) == 0);
    if (size != nullptr) require(size, number_in(variable, size, 1) == 1);
  }
  require("MASTER_ADDR", variable("MASTER_ADDR") == nullptr);
  for (const char* name : {"SM_HOSTS", "TF_CONFIG"}) {  // JSON, with commas between [ and ] if there are several
    const std::string text = text_in(variable, name);
    require(name, text.find(',', text.find('[')) >= text.rfind(']'));
  }
}

}  // namespace

std::string first_host(const std::string& list) {
  const size_t open = list.find('['), comma = list.find(',');
  if (open == std::string::npos || comma < open) return list.substr(0, comma);
  const size_t close = list.find(']', open), number_end = list.find_first_of("-,]", open);
  if (close == std::string::npos) return list.substr(0, open);
  const std::string after = list.substr(close + 1);
  return list.substr(0, open) + list.substr(open + 1, number_end - open - 1) + first_host(after);
}

LaunchedAs launched_as(const std::function<const char*(const char*)>& variable) {
  const auto has = [&](const char* name) { return variable(name) != nullptr; };
  const auto numbers = [&](const Numbering& names) { return has(names.rank) || has(names.size); };
  const bool in_step = has(kSlurm.size), all_set = has("RANK") && has("WORLD_SIZE") && has("MASTER_ADDR");
  const auto* const mpirun = std::ranges::find_if(kMpiruns, numbers);
  const bool has_mpirun = mpirun != kMpiruns.end();
  // srun may set PMI's variables, too. An mpirun that starts its helpers with srun counts others than these.
  const bool is_srun = has_mpirun && in_step && text_in(variable, mpirun->size) == text_in(variable, kSlurm.size);
  const bool by_mpirun = has_mpirun && !is_srun;
  // A part of them counts where nobody else has numbered the processes; named_by_variables() refuses it.
  const bool part_set = has("RANK") || (has("WORLD_SIZE") && text_in(variable, "WORLD_SIZE") != "1");
  LaunchedAs launched;
  if (numbers(kOpenMpi)) {
    launched = named_by_mpirun(variable, kOpenMpi);
  } else if (all_set || (part_set && !by_mpirun && !in_step)) {
    launched = named_by_variables(variable);
  } else if (by_mpirun) {
    launched = named_by_mpirun(variable, *mpirun);
  } else if (in_step) {
    launched = named_by_slurm(variable);
  } else if (!has("WORLD_SIZE")) {
    refuse_partly_numbered(variable);
  }
  return launched.size == 1 ? LaunchedAs{} : launched;
}

std::string idle_in_job(const std::function<const char*(const char*)>& variable, int ranks) {
  if (variable("SLURM_STEP_NUM_TASKS") != nullptr) return "";  // srun has started just this
  // One name of each pair is older.
  for (const auto& [name, what, most] : {std::tuple{"SLURM_NTASKS", "tasks", ranks},
                                         {"SLURM_NPROCS", "tasks", ranks},
                                         {"SLURM_JOB_NUM_NODES", "hosts", 1},
                                         {"SLURM_NNODES", "hosts", 1}}) {
    const int number = number_in(variable, name, 0);
    if (number <= most) continue;
    return fmt::format(
        "the Slurm job has {} {} ({}), and this run {} rank{} on one host: start the run with srun, or on one "
        "host with --gpus or --ranks",
        number, what, name, ranks, ranks == 1 ? "" : "s");
  }
  return "";
}

std::string idle_gpus(int ranks, int num_visible) {
  if (ranks > 1 || num_visible < 2) return "";
  return fmt::format("this run uses 1 of {} visible GPUs: --gpus {} starts a rank on each", num_visible,
                     num_visible);
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
          "{} ranks were started on {}, where {} GPUs are visible; start one rank per GPU (--gpus {}, mpirun "
          "--map-by ppr:{}:node, and see CUDA_VISIBLE_DEVICES)",
          ranks_on_host[claim.host_leader], claim.host, claim.num_visible, claim.num_visible, claim.num_visible);
    }
    const auto [owner, is_new] = owners.try_emplace({claim.host_leader, claim.pci_bus_id}, r);
    if (!is_new) {
      throw_bad_input(
          "ranks {} and {} both have the GPU {} of {}; give every rank its own (--gpus, mpirun -np, CUDA_VISIBLE_DEVICES)",
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
