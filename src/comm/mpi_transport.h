#pragma once
#include <memory>
#include <string>

#include "comm/transport.h"

// All that the rest of src/comm uses of MPI: no other file includes the system's header. no_mpi.cpp replaces it in
// builds without MPI.
namespace parka {
struct WaitTimes;

bool built_with_mpi();
std::string mpi_library();  // "Open MPI v4.1.4"; empty without MPI. May be called before MPI_Init

// Joins the ranks that MPI's launcher started (MPI_Init), at most once in a process. Only the calling thread may
// use MPI from now on. If MPI_Init takes longer than the limit the process ends with kRankLost. `rank` is for
// messages.
std::unique_ptr<Transport> join_over_mpi(int rank, const WaitTimes& times);

}  // namespace parka
