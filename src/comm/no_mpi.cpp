#include "comm/mpi_ranks.h"
#include "core/error.h"

// What stands in for MPI where Parka is built without it: runs of one process, which never come here.
namespace parka {

bool built_with_mpi() { return false; }
MpiPlace start_mpi() { throw_internal("start_mpi: built without MPI"); }
void finish_mpi() {}
std::unique_ptr<Communicator> make_mpi_communicator(CollectiveCounter&) {
  throw_internal("make_mpi_communicator: built without MPI");
}

}  // namespace parka
