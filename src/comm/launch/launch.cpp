#include "comm/launch/launch.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <utility>

#include <unistd.h>

#include "comm/communicator.h"
#include "comm/launch/launch_checks.h"
#include "comm/launch/local_ranks.h"
#include "comm/launch/rendezvous.h"
#include "comm/launch/secret.h"
#include "comm/nccl_ranks.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

// Two of many waiting ranks speak: if one of them is the one that hangs, the other does.
WaitTimes wait_times(int rank, double limit, double notice) { return {limit, rank < 2 ? notice : limit}; }

// Every process of the launcher has become as many ranks as `local` says.
std::unique_ptr<Transport> join_ranks(const LaunchedAs& launched, LocalRank local, const StartTimes& times) {
  const int rank = launched.rank * local.size + local.rank, size = launched.size * local.size;
  RankAddress rank_0;
  if (launched.by != LaunchedAs::By::kNobody) {
    rank_0 = {.addresses = {launched.address}, .port = launched.port};
    rank_0.word = {fmt::format("{}/{}", launched.token, size), launched.secret};
    local.listener.reset();
  } else {
    rank_0 = {.addresses = loopback_addresses(), .port = local.port, .word = {local.token, ""}, .is_open = true};
  }
  // Ranks of one process have the same trouble: one speaks.
  return join_over_tcp(rank_0, std::move(local.listener), rank, size,
                       {times.rendezvous, local.rank == 0 ? times.notice : times.rendezvous});
}

}  // namespace

Launch::Launch(const LaunchOptions& options, const LaunchedAs& launched, LocalRank local) : hosts_{host_name()} {
  using By = LaunchedAs::By;
  one_code_for_all_ = launched.by == By::kMpirun || launched.by == By::kSrun;
  has_own_log_ = (launched.by == By::kSrun || launched.by == By::kOther) && local.rank == 0;
  if (launched.size * local.size > 1) {
    if (launched.by == By::kNobody || launched.address == loopback_addresses().front()) reach_ = Reach::kThisHost;
    transport_ = join_ranks(launched, std::move(local), options.start);
  } else {
    agreement_ = make_single_communicator();
    return;
  }
  rank_ = transport_->rank();
  size_ = transport_->size();
  agreement_ = make_host_communicator(*transport_, watchdog_.host_collectives());
}

void Launch::join(const LaunchOptions& options) {
  const StartTimes& times = options.start;
  // Rank 0 has met all others; another rank may have met rank 0 long before.
  const double limit = times.agreement + (rank_ == 0 ? 0 : times.rendezvous);
  const WaitTimes wait = wait_times(rank_, limit, times.notice);
  transport_->limit_waits(&wait);
  hosts_ = agreement_->gather_text(host_name());
  host_keys_ = agreement_->gather_text(host_key());
  const auto own = host_keys_.begin() + rank_;
  host_leader_ = static_cast<int>(std::find(host_keys_.begin(), own, *own) - host_keys_.begin());
  local_rank_ = static_cast<int>(std::count(host_keys_.begin(), own, *own));
  require_same("the version of parka", options.version, "install the same on all hosts");
  watchdog_.start(*agreement_, host(), reach_, options.watchdog);
  transport_->limit_waits(nullptr);
}

void Launch::require_same(const std::string& what, const std::string& text, const std::string& remedy) {
  check_same_text(what, agreement_->gather_text(text), hosts_, remedy);
}

int Launch::agree_on_gpu(bool wanted) {
  GpuClaim claim{host(), host_leader_, wanted, wanted ? num_cuda_devices() : 0, 0, {}};
  claim.ordinal = choose_gpu(claim.num_visible, local_rank_);
  if (claim.ordinal < claim.num_visible) claim.pci_bus_id = gpu_pci_bus_id(claim.ordinal);
  if (size_ > 1) {
    std::vector<GpuClaim> claims;
    claims.reserve(static_cast<size_t>(size_));
    for (const std::string& text : agreement_->gather_text(to_text(claim))) claims.push_back(gpu_claim_of(text));
    check_gpus(claims);
    if (wanted && !built_with_nccl()) {
      throw_bad_input(
          "{} ranks were started on GPUs, but this parka was built without NCCL: install NCCL (libnccl-dev) and "
          "build again, or run one rank",
          size_);
    }
  }
  return wanted ? claim.ordinal : -1;
}

std::unique_ptr<Communicator> Launch::make_communicator(Device& device) {
  if (size_ == 1) return make_single_communicator();
  if (device.kind() == DeviceKind::kCpu) {
    transport_->connect_all();
    return make_host_communicator(*transport_, watchdog_.host_collectives());
  }
  return make_nccl_communicator(*agreement_, host_keys_, device, watchdog_);
}

int Launch::finish(int exit_code) {
  heartbeat("at the end of the run");
  if (transport_) transport_->finish();
  watchdog_.leave();
  // Rank 0 ends last.
  return one_code_for_all_ && rank_ != 0 && exit_code == static_cast<int>(ExitCode::kStopped) ? 0 : exit_code;
}

int Launch::fail(ExitCode code, const std::string& message) {
  const Verdict verdict = watchdog_.fail(code, message);
  // Before there is a watchdog, each rank speaks for itself about those that it has lost.
  const bool speaks = code == ExitCode::kRankLost ? verdict.common : has_own_log_ && verdict.message == message;
  if (verdict.rank == rank_ || speaks) {
    throw Error(verdict.code, verdict.common ? message : fmt::format("rank {} ({}): {}", rank_, host(), message));
  }
  if (verdict.message != message && code != ExitCode::kRankLost) {
    log_error("rank {} ({}): {}; after this: {}", rank_, host(), message, verdict.message);
  }
  return static_cast<int>(verdict.code);
}

int run_rank(const LaunchOptions& options, const LaunchedAs& launched, LocalRank local,
             const std::function<int(Launch&)>& body) {
  Launch launch(options, launched, std::move(local));
  if (launch.size() == 1) return launch.finish(body(launch));
  try {
    launch.join(options);
    return launch.finish(body(launch));
  } catch (const Error& error) {
    return launch.fail(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return launch.fail(ExitCode::kBadInput, "out of memory; try a smaller training.micro_batch_size");
  } catch (const std::exception& error) {
    return launch.fail(ExitCode::kInternal, std::string("internal error: ") + error.what());
  }
}

int run_launched(const LaunchOptions& options, const std::function<int(Launch&)>& body) {
  const auto variable = [](const char* name) -> const char* { return std::getenv(name); };
  LaunchedAs launched = launched_as(variable);
  if (launched.by != LaunchedAs::By::kNobody) launched.secret = read_secret();
  if (launched.by == LaunchedAs::By::kNobody) {
    const std::string idle = idle_in_job(variable, options.local_ranks);
    if (!idle.empty()) log_warning("{}", idle);
  }
  if (options.local_ranks == 1) return run_rank(options, launched, {}, body);
  if (options.check_size) options.check_size(launched.size * options.local_ranks);
  return run_local_ranks(options.local_ranks,
                         [&](LocalRank local) { return run_rank(options, launched, std::move(local), body); });
}

}  // namespace parka
