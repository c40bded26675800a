#include "comm/mpi_ranks.h"
#include "core/error.h"

// For builds without MPI: they have runs of one process only, which never call these.
namespace parka {

bool built_with_mpi() { return false; }
std::string mpi_library() { return {}; }
MpiPlace start_mpi() { throw_internal("start_mpi: built without MPI"); }
void finish_mpi() {}
std::unique_ptr<Communicator> make_mpi_communicator(CollectiveCounter&) {
  throw_internal("make_mpi_communicator: built without MPI");
}

}  // namespace parka
