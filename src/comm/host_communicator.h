#pragma once
#include <memory>

#include "comm/communicator.h"

namespace parka {
class CollectiveCounter;
class Transport;

// Collectives of the ranks of `transport` for tensors on the CPU; they need Transport::connect_all(), agreement
// does not. Sums are computed in fp32 in the order of ranks and rounded once, so every transport gives the same
// bits. `counter` counts every collective. Both must outlive the result.
std::unique_ptr<Communicator> make_host_communicator(Transport& transport, CollectiveCounter& counter);

}  // namespace parka
