#include "comm/nccl_ranks.h"
#include "core/error.h"

// For builds without CUDA: no GPU is visible, so nothing calls this.
namespace parka {

std::string gpu_pci_bus_id(int) { throw_internal("gpu_pci_bus_id: built without CUDA"); }

}  // namespace parka
