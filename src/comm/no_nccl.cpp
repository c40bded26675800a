#include "comm/nccl_ranks.h"
#include "core/error.h"

// For builds without NCCL: they have runs of one GPU or of CPUs only, which never call this.
namespace parka {

bool built_with_nccl() { return false; }
std::string nccl_version() { return {}; }
// The signature must be that of nccl_ranks.h. NOLINTNEXTLINE(performance-unnecessary-value-param)
std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, std::vector<std::string>, Device&, Watchdog&) {
  throw_internal("make_nccl_communicator: built without NCCL");
}

}  // namespace parka
