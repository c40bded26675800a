#include "comm/launch/launch_checks.h"

#include <array>
#include <map>
#include <set>

#include "core/error.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

LaunchedAs launched_with(const std::map<std::string, std::string>& environment) {
  const auto variable = [&](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
  return launched_as(variable);
}

// The message of the Error(kBadInput) that `action` throws; empty if it throws none.
template <typename Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return {};
}

// Ranks on two hosts of two, each with a GPU of its own.
std::vector<GpuClaim> four_good_claims() {
  return {{"a", 0, true, 2, 0, "0000:19:00.0"},
          {"a", 0, true, 2, 1, "0000:3b:00.0"},
          {"b", 2, true, 2, 0, "0000:19:00.0"},
          {"b", 2, true, 2, 1, "0000:3b:00.0"}};
}

}  // namespace

TEST_CASE("The environment says how many processes were started together", "[launch]") {
  CHECK(launched_with({}).size == 1);
  const LaunchedAs by_mpirun = launched_with({{"OMPI_COMM_WORLD_SIZE", "4"},
                                              {"OMPI_COMM_WORLD_RANK", "3"},
                                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                              {"SLURM_STEP_NUM_TASKS", "2"}});
  CHECK(by_mpirun.size == 4);
  CHECK(by_mpirun.rank == 3);
  CHECK(by_mpirun.variable == "OMPI_COMM_WORLD_SIZE");
  CHECK(by_mpirun.by == LaunchedAs::By::kMpirun);
  CHECK(by_mpirun.address == "127.0.0.1");
  CHECK(launched_with({{"PMI_SIZE", "8"}, {"PMI_RANK", "1"}, {"MASTER_ADDR", "a"}}).size == 8);
  // A batch script of a job of 8 tasks is one process.
  CHECK(launched_with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}).size == 1);
}

TEST_CASE("RANK, WORLD_SIZE and MASTER_ADDR start ranks without MPI", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  const Environment torch = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "1234"}};
  const LaunchedAs launched = launched_with(torch);
  CHECK(launched.by == LaunchedAs::By::kOther);
  CHECK(launched.rank == 5);
  CHECK(launched.size == 8);
  CHECK(launched.address == "node1");
  CHECK(launched.port == 1234);
  const auto with = [&](const char* name, const char* value) {
    Environment changed = torch;
    if (value == nullptr) {
      changed.erase(name);
    } else {
      changed[name] = value;
    }
    return changed;
  };
  CHECK(launched_with(with("MASTER_PORT", nullptr)).port == 29500);
  CHECK(launched_with(with("TORCHELASTIC_USE_AGENT_STORE", "True")).port == 1235);
  CHECK(launched_with(with("TORCHELASTIC_RUN_ID", "a b")).token != launched.token);
  CHECK(launched_with(with("TORCHELASTIC_RUN_ID", "a b")).token.find(' ') == std::string::npos);
  Environment by_mpirun = with("OMPI_COMM_WORLD_SIZE", "2");
  by_mpirun["OMPI_COMM_WORLD_RANK"] = "1";
  CHECK(launched_with(by_mpirun).by == LaunchedAs::By::kMpirun);
  CHECK(launched_with(with("SLURM_STEP_NUM_TASKS", "3")).size == 8);
  CHECK(launched_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a"}}).by == LaunchedAs::By::kNobody);

  CHECK(launched_with(with("MASTER_ADDR", "fe80::1")).address == "fe80::1");
  CHECK(launched_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).by == LaunchedAs::By::kNobody);
  CHECK(launched_with({{"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}}).by == LaunchedAs::By::kNobody);
  CHECK(launched_with({{"MASTER_PORT", "29500"}}).by == LaunchedAs::By::kNobody);

  using Change = std::pair<const char*, const char*>;
  for (const auto& [name, value] : {Change{"RANK", "8"},
                                    {"RANK", "first"},
                                    {"RANK", "1e0"},
                                    {"RANK", ""},
                                    {"RANK", "-1"},
                                    {"RANK", nullptr},
                                    {"WORLD_SIZE", "8z"},
                                    {"WORLD_SIZE", nullptr},
                                    {"MASTER_ADDR", nullptr},
                                    {"MASTER_ADDR", ""},
                                    {"MASTER_ADDR", "node1:29500"},
                                    {"MASTER_ADDR", "tcp://node1"},
                                    {"MASTER_ADDR", "tcp://node1:29500"},
                                    {"MASTER_ADDR", "[::1]"},
                                    {"MASTER_PORT", "1234x"},
                                    {"MASTER_PORT", "70000"},
                                    {"MASTER_PORT", "0"},
                                    {"MASTER_PORT", ""}}) {
    INFO(name << " = " << (value == nullptr ? "not set" : value));
    CHECK(error_of([&] { launched_with(with(name, value)); }).find(name) != std::string::npos);
  }
}

TEST_CASE("A process among several of which only a part is known does not train alone", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  for (const Environment& part : {Environment{{"RANK", "1"}},
                                  {{"RANK", "0"}},
                                  {{"WORLD_SIZE", "2"}},
                                  {{"WORLD_SIZE", "x"}},
                                  {{"RANK", "0"}, {"WORLD_SIZE", "x"}},
                                  {{"RANK", "5"}, {"WORLD_SIZE", "1"}},
                                  {{"RANK", "1"}, {"MASTER_ADDR", "node1"}},
                                  {{"LOCAL_RANK", "1"}},
                                  {{"LOCAL_WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
                                  {{"MASTER_ADDR", "node1"}},
                                  {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}},
                                  {{"MASTER_ADDR", ""}},
                                  {{"MASTER_ADDR", "node1"}, {"NNODES", "2"}},
                                  {{"MASTER_ADDR", "node1"}, {"NODE_RANK", "1"}},
                                  {{"OMPI_COMM_WORLD_RANK", "1"}},
                                  {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "2"}},
                                  {{"PMI_RANK", "1"}},
                                  {{"PMI_SIZE", "many"}},
                                  {{"PMIX_RANK", "1"}},
                                  {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "a"}},
                                  {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "5"}},
                                  {{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "1"}},
                                  {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}}}) {
    INFO(part.begin()->first << " = " << part.begin()->second);
    CHECK_FALSE(error_of([&] { launched_with(part); }).empty());
  }
}

TEST_CASE("Numbers of hosts and of ranks on a host do not contradict WORLD_SIZE", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  const auto with = [](const char* rank, const char* size, Environment more) {
    more.insert({{"RANK", rank}, {"WORLD_SIZE", size}, {"MASTER_ADDR", "a"}});
    return more;
  };
  using Case = std::pair<const char*, Environment>;
  for (const auto& [named, environment] :
       {Case{"NNODES", with("0", "1", {{"NNODES", "2"}})},
        Case{"NNODES", with("3", "4", {{"NNODES", "5"}, {"NODE_RANK", "1"}})},
        Case{"NODE_RANK", with("0", "1", {{"NODE_RANK", "1"}, {"NNODES", "1"}})},
        Case{"NODE_RANK", with("1", "2", {{"NODE_RANK", "7"}})},
        Case{"LOCAL_RANK", with("0", "1", {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "1"}})},
        Case{"LOCAL_RANK", with("5", "8", {{"LOCAL_RANK", "5"}, {"LOCAL_WORLD_SIZE", "4"}})}}) {
    INFO(named);
    CHECK(error_of([&, &of = environment] { launched_with(of); }).find(named) != std::string::npos);
  }
  for (const Environment& sound :
       {with("0", "1", {{"NNODES", "1"}, {"NODE_RANK", "0"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}),
        with("5", "8", {{"NNODES", "2"}, {"NODE_RANK", "1"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}}),
        with("1", "2", {{"NNODES", "1:4"}, {"NODE_RANK", ""}, {"LOCAL_RANK", "3"}})}) {
    CHECK(error_of([&] { launched_with(sound); }).empty());
  }
}

TEST_CASE("Lists of several hosts as JSON are not one process", "[launch]") {
  for (const auto& [name, one, several] :
       {std::array{"SM_HOSTS", R"(["algo-1"])", R"(["algo-1","algo-2"])"},
        {"SM_HOSTS", "[\"algo-1\"]\n", R"([ "algo-1", "algo-2", "algo-3" ])"},
        {"TF_CONFIG", R"({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})",
         R"({"task": {"type": "worker", "index": 0}, "cluster": {"worker": ["a:1", "b:1"]}})"},
        {"TF_CONFIG", R"({"task": {"type": "chief", "index": 0}, "cluster": {"chief": ["a:1"]}})",
         R"({"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "chief", "index": 0}})"}}) {
    INFO(name << " = " << several);
    CHECK(launched_with({{name, one}}).by == LaunchedAs::By::kNobody);
    CHECK(error_of([&, name = name, several = several] {
            launched_with({{name, several}});
          }).find(name) != std::string::npos);
    CHECK(launched_with({{name, several}, {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}).size == 2);
  }
}

TEST_CASE("mpirun of any MPI starts ranks", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  for (const auto& [rank, size, on_host] :
       {std::array{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
        {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"},
        {"MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"},
        {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"}}) {
    INFO(rank);
    std::set<int> ports;
    for (const char* job : {"983105537", "983171073", "prterun-node1-7@1"}) {
      for (const char* number : {"0", "1"}) {
        const LaunchedAs launched =
            launched_with({{rank, number}, {size, "2"}, {on_host, "2"}, {"PMIX_NAMESPACE", job}});
        CHECK(launched.by == LaunchedAs::By::kMpirun);
        CHECK(launched.size == 2);
        CHECK(launched.rank == *number - '0');
        CHECK(launched.variable == size);
        CHECK(launched.address == "127.0.0.1");
        CHECK(launched.token.find(job) != std::string::npos);
        ports.insert(launched.port);
      }
    }
    CHECK(ports.size() == 3);
    const Environment hosts = {{rank, "1"}, {size, "2"}, {on_host, "1"}};
    CHECK(error_of([&] { launched_with(hosts); }).find("MASTER_ADDR") != std::string::npos);
    Environment named = hosts;
    named.insert({{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "1234"}});
    CHECK(launched_with(named).address == "node1");
    CHECK(launched_with(named).port == 1234);
    CHECK(launched_with({{rank, "0"}, {size, "1"}}).by == LaunchedAs::By::kNobody);
    for (const Environment& odd :
         {Environment{{rank, "1"}}, {{size, "2"}}, {{rank, "2"}, {size, "2"}}, {{rank, ""}, {size, "2"}}}) {
      CHECK(error_of([&] { launched_with(odd); }).find(rank) != std::string::npos);
    }
  }
  // Who sets all of these starts ranks in any launcher.
  CHECK(launched_with({{"MV2_COMM_WORLD_RANK", "0"},
                       {"MV2_COMM_WORLD_SIZE", "2"},
                       {"RANK", "3"},
                       {"WORLD_SIZE", "4"},
                       {"MASTER_ADDR", "a"}})
            .by == LaunchedAs::By::kOther);
}

TEST_CASE("Launchers that number processes in part are told by their variables", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  for (const auto& [rank, size] : {std::pair{"PALS_RANKID", "PALS_LOCAL_SIZE"},
                                   {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                                   {"FLUX_TASK_RANK", "FLUX_JOB_SIZE"},
                                   {"ALPS_APP_PE", "ALPS_APP_PE"},
                                   {"SLURM_PROCID", "SLURM_PROCID"},
                                   {"LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                                   {"NODE_RANK", "NNODES"},
                                   {"PET_NODE_RANK", "PET_NNODES"},
                                   {"SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"},
                                   {"AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"},
                                   {"JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"},
                                   {"PMIX_RANK", "OMPI_APP_CTX_NUM_PROCS"},
                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}}) {
    INFO(rank);
    CHECK(error_of([&, name = rank] { launched_with({{name, "1"}}); }).find(rank) != std::string::npos);
    CHECK(error_of([&, name = size] { launched_with({{name, "2"}}); }).find(size) != std::string::npos);
    CHECK(launched_with({{rank, "0"}}).by == LaunchedAs::By::kNobody);
    if (rank != size) CHECK(launched_with({{rank, "0"}, {size, "1"}}).by == LaunchedAs::By::kNobody);
  }
  for (const Environment& part :
       {Environment{{"OMPI_APP_CTX_NUM_PROCS", "1 1"}}, {{"WORLD_SIZE", "2"}}, {{"RANK", "1"}}}) {
    Environment first = part;
    first["PMIX_RANK"] = "0";
    CHECK_FALSE(error_of([&] { launched_with(first); }).empty());
  }
}

TEST_CASE("Slurm's variables start ranks, whatever MPI it has prepared", "[launch]") {
  std::map<std::string, std::string> slurm = {{"SLURM_STEP_NUM_TASKS", "16"},
                                              {"SLURM_PROCID", "9"},
                                              {"SLURM_JOB_ID", "4711"},
                                              {"SLURM_STEP_ID", "2"},
                                              {"SLURM_STEP_NODELIST", "gpu[003-010,12],login1"}};
  const LaunchedAs plain = launched_with(slurm);
  CHECK(plain.by == LaunchedAs::By::kSrun);
  CHECK(plain.rank == 9);
  CHECK(plain.size == 16);
  CHECK(plain.address == "gpu003");
  CHECK(plain.port == 20000 + (7 * 4711 + 2) % 10000);
  CHECK(plain.token == "slurm/4711.2");
  slurm["PMIX_RANK"] = "9";
  CHECK(launched_with(slurm).by == LaunchedAs::By::kSrun);
  slurm.insert({{"PMI_SIZE", "16"}, {"PMI_RANK", "9"}});
  CHECK(launched_with(slurm).by == LaunchedAs::By::kSrun);
  // An mpirun whose helpers srun has started.
  slurm.insert_or_assign("PMI_SIZE", "32");
  slurm["MASTER_ADDR"] = "gpu003";
  CHECK(launched_with(slurm).by == LaunchedAs::By::kMpirun);
}

TEST_CASE("A batch job of more than the run takes is told of", "[launch]") {
  using Environment = std::map<std::string, std::string>;
  const auto idle = [](Environment environment, int ranks) {
    environment["SLURM_JOB_ID"] = "7";
    return idle_in_job(
        [&](const char* name) {
          const auto found = environment.find(name);
          return found == environment.end() ? nullptr : found->second.c_str();
        },
        ranks);
  };
  const Environment eight = {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_NUM_NODES", "1"}};
  CHECK(idle(eight, 1).find("SLURM_NTASKS") != std::string::npos);
  CHECK(idle(eight, 4).find("SLURM_NTASKS") != std::string::npos);
  CHECK(idle(eight, 8).empty());
  CHECK(idle({{"SLURM_NPROCS", "2"}}, 1).find("SLURM_NPROCS") != std::string::npos);
  CHECK(idle({{"SLURM_JOB_NUM_NODES", "2"}}, 8).find("SLURM_JOB_NUM_NODES") != std::string::npos);
  CHECK(idle({{"SLURM_NNODES", "2"}, {"SLURM_NTASKS", "1"}}, 1).find("SLURM_NNODES") != std::string::npos);
  CHECK(idle({{"SLURM_NTASKS", "1"}, {"SLURM_NNODES", "1"}}, 1).empty());
  CHECK(idle({}, 1).empty());
  // srun -n 1 within the job.
  CHECK(idle({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_NUM_NODES", "2"}}, 1).empty());

  CHECK(idle_gpus(1, 8).find("--gpus 8") != std::string::npos);
  CHECK(idle_gpus(1, 1).empty());
  CHECK(idle_gpus(1, 0).empty());
  CHECK(idle_gpus(8, 8).empty());
}

TEST_CASE("The first host of a list of Slurm's", "[launch]") {
  CHECK(first_host("node1") == "node1");
  CHECK(first_host("node1,node[2-3]") == "node1");
  CHECK(first_host("node[07]") == "node07");
  CHECK(first_host("node[2,5-6],a") == "node2");
  CHECK(first_host("rack[1-2]-node[3-4].net,b") == "rack1-node3.net");
  CHECK(first_host("") == "");
}

TEST_CASE("Texts that differ between ranks are named by their first line that does", "[launch]") {
  const std::vector<std::string> hosts = {"a", "a", "b"};
  const std::string config = "{\n  \"lr\": 0.001,\n  \"steps\": 10\n}";
  CHECK(error_of([&] { check_same_text("the config", {config, config, config}, hosts, ""); }).empty());
  std::string other = config;
  other.replace(other.find("0.001"), 5, "0.002");
  CHECK(error_of([&] {
          check_same_text("the config", {config, config, other}, hosts, "copy it");
        }) ==
        "the config of rank 2 (b) differs from that of rank 0 (a): \"lr\": 0.002,, not \"lr\": 0.001,; copy it");
  CHECK(error_of([&] {
          check_same_text("the version", {"1.0", "", "1.0"}, hosts, "x");
        }) == "the version of rank 1 (a) differs from that of rank 0 (a): nothing, not 1.0; x");
}

TEST_CASE("Every rank must have a GPU of its own", "[launch]") {
  const auto error = [](const std::vector<GpuClaim>& claims) { return error_of([&] { check_gpus(claims); }); };
  std::vector<GpuClaim> claims = four_good_claims();
  CHECK(error(claims).empty());
  CHECK(error({{"a", 0, false, 0, 0, ""}, {"a", 0, false, 0, 1, ""}}).empty());

  SECTION("two ranks on one") {
    claims[3].pci_bus_id = claims[2].pci_bus_id;
    CHECK(error(claims).starts_with("ranks 2 and 3 both have the GPU 0000:19:00.0 of b;"));
  }
  SECTION("more ranks than GPUs") {
    claims[3] = {"b", 2, true, 1, 1, ""};
    CHECK(error(claims).starts_with("2 ranks were started on b, where 1 GPUs are visible;"));
  }
  SECTION("none") {
    claims[2] = {"b", 2, true, 0, 0, ""};
    CHECK(error(claims).starts_with("rank 2 (b) finds no GPU"));
  }
  SECTION("not wanted everywhere") {
    claims[1].wanted = false;
    CHECK(error(claims).starts_with("rank 1 (a) runs on the CPU and rank 0 (a) on a GPU;"));
  }
  CHECK(choose_gpu(8, 3) == 3);
  CHECK(choose_gpu(1, 3) == 0);
  const GpuClaim copy = gpu_claim_of(to_text(claims[3]));
  CHECK(copy.host == claims[3].host);
  CHECK(copy.host_leader == claims[3].host_leader);
  CHECK(copy.wanted == claims[3].wanted);
  CHECK(copy.num_visible == claims[3].num_visible);
  CHECK(copy.ordinal == claims[3].ordinal);
  CHECK(copy.pci_bus_id == claims[3].pci_bus_id);
}
