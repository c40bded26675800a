#include "comm/nccl_ranks.h"
#include "core/error.h"

// What stands in for NCCL where Parka is built without it: runs of one GPU, or of CPUs, which never come here.
namespace parka {

bool built_with_nccl() { return false; }
// The signature is that of the one which takes it over. NOLINTNEXTLINE(performance-unnecessary-value-param)
std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, std::vector<std::string>, Device&, Watchdog&) {
  throw_internal("make_nccl_communicator: built without NCCL");
}

}  // namespace parka
