#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

// All that the rest of src/comm uses of NCCL and CUDA. Builds without them have no_nccl.cpp and no_cuda.cpp.
namespace parka {
class Watchdog;

// The PCI bus id of a GPU that this process sees, such as "0000:19:00.0".
std::string gpu_pci_bus_id(int ordinal);

bool built_with_nccl();
std::string nccl_version();  // "2.28.3"; empty without NCCL
// Collectives on the GPUs of all ranks of `agreement`, one each. All ranks must call it together. `host_of` has for
// each rank what its host alone has; `device` is this rank's. All arguments but `host_of` must outlive the result.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& agreement, std::vector<std::string> host_of,
                                                     Device& device, Watchdog& watchdog);

}  // namespace parka
