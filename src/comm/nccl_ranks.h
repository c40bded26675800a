#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

// What of the GPU libraries the rest of src/comm uses. no_nccl.cpp and no_cuda.cpp stand in where they are missing.
namespace parka {
class Watchdog;

// "0000:19:00.0" of a GPU that this process sees.
std::string gpu_pci_bus_id(int ordinal);

bool built_with_nccl();
// Collectives on the GPUs of all ranks of `agreement`, one each; all must call it together. `host_of` names the
// host of each rank. `device` is this rank's, and like `agreement` and `watchdog` must outlive the result.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& agreement, std::vector<std::string> host_of,
                                                     Device& device, Watchdog& watchdog);

}  // namespace parka
