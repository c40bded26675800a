#pragma once
#include <string>

#include <nccl.h>

#include "core/error.h"

namespace parka::cuda {

// A failure of the network or of another rank is not a bug in this one.
inline ExitCode exit_code_of(ncclResult_t status) {
  const bool others = status == ncclSystemError || status == ncclRemoteError;
  return others ? ExitCode::kRankLost : ExitCode::kInternal;
}

inline std::string reason_of(ncclResult_t status, ncclComm_t comm) {
  std::string reason = std::string("NCCL: ") + ncclGetErrorString(status);
  const char* const last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') reason += std::string(": ") + last;
  return reason;
}

}  // namespace parka::cuda
