#include "comm/launch/launch.h"

#include <array>
#include <cstdlib>
#include <new>
#include <utility>

#include <unistd.h>

#include <spdlog/spdlog.h>

#include "comm/launch/launch_checks.h"
#include "comm/mpi_ranks.h"
#include "comm/nccl_ranks.h"
#include "kernels/device/device.h"

namespace parka {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

// For errors before the ranks can communicate: rank 0 reports the error, the others exit silently with the same
// code.
[[noreturn]] void fail_alone(int rank, const std::string& message) {
  if (rank != 0) std::_Exit(static_cast<int>(ExitCode::kBadInput));
  throw_bad_input("{}", message);
}

}  // namespace

Launch::Launch() : hosts_{host_name()} {
  const LaunchedAs launched = launched_as([](const char* name) { return std::getenv(name); });
  if (launched.size == 1) {
    agreement_ = make_single_communicator();
    return;
  }
  if (!built_with_mpi()) {
    fail_alone(
        launched.rank,
        fmt::format("several processes were started together ({} is {}), but this parka was built without MPI: "
                    "run scripts/setup.sh, build again, or start one process",
                    launched.variable, launched.size));
  }
  const MpiPlace place = start_mpi();
  uses_mpi_ = true;
  rank_ = place.rank;
  size_ = place.size;
  local_rank_ = place.local_rank;
  host_leader_ = place.host_leader;
  if (launched.size > 1 && place.size != launched.size) {
    fail_alone(
        launched.rank,
        fmt::format("{} says that {} processes were started together, but MPI finds {}: they were started by "
                    "another MPI than {}, which this parka was built with; use its mpirun, or srun --mpi=pmix",
                    launched.variable, launched.size, place.size, place.library));
  }
  agreement_ = make_mpi_communicator(watchdog_.host_collectives());
}

void Launch::join(const LaunchOptions& options) {
  hosts_ = agreement_->gather_text(host_name());
  require_same("the version of parka", options.version, "install the same on all hosts");
  watchdog_.start(*agreement_, host(), host_leader_, options.watchdog);
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
  if (device.kind() == DeviceKind::kCpu) return make_mpi_communicator(watchdog_.host_collectives());
  return make_nccl_communicator(*agreement_, hosts_, device, watchdog_);
}

int Launch::finish(int exit_code) {
  watchdog_.at(0, "at the end of the run");
  if (uses_mpi_) finish_mpi();
  watchdog_.leave();
  // mpirun and srun kill the other ranks when one ends with another code than 0: only rank 0, the last to end, does.
  return uses_mpi_ && rank_ != 0 && exit_code == static_cast<int>(ExitCode::kStopped) ? 0 : exit_code;
}

int Launch::fail(ExitCode code, const std::string& message) {
  const Verdict verdict = watchdog_.fail(code, message);
  if (verdict.rank == rank_) {
    throw Error(verdict.code, verdict.common ? message : fmt::format("rank {} ({}): {}", rank_, host(), message));
  }
  if (verdict.message != message) {
    spdlog::error("rank {} ({}): {}; after this: {}", rank_, host(), message, verdict.message);
  }
  return static_cast<int>(verdict.code);
}

int run_launched(const LaunchOptions& options, const std::function<int(Launch&)>& body) {
  Launch launch;
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

}  // namespace parka
