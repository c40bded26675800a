#pragma once
#include <memory>
#include <string>

#include "comm/communicator.h"

// All that the rest of src/comm uses of MPI: no other file includes the system's header. no_mpi.cpp replaces it in
// builds without MPI.
namespace parka {
class CollectiveCounter;

bool built_with_mpi();
std::string mpi_library();  // "Open MPI v4.1.4"; empty without MPI

// This process as MPI describes it.
struct MpiPlace {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int host_leader = 0;                 // the lowest rank of this host: ranks with the same one share a host
  std::string library;                 // "Open MPI v4.1.4"
};

// Joins the other ranks (MPI_Init). Only the calling thread may use MPI from now on.
MpiPlace start_mpi();
// Leaves the other ranks (MPI_Finalize); waits for all of them.
void finish_mpi();

// The ranks of start_mpi(). Tensors are on the CPU. `counter` counts every collective and must outlive the result.
std::unique_ptr<Communicator> make_mpi_communicator(CollectiveCounter& counter);

}  // namespace parka
