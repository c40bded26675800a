#include "comm/transport.h"
#include "core/error.h"

// For builds without MPI: mpirun cannot start their ranks, so nothing calls these.
namespace parka {

bool built_with_mpi() { return false; }
std::string mpi_library() { return {}; }
std::unique_ptr<Transport> join_over_mpi(int, const WaitTimes&) {
  throw_internal("join_over_mpi: built without MPI");
}

}  // namespace parka
