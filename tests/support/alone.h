#pragma once
#include <memory>

#include "comm/communicator.h"

namespace parka::test {

// For runs of one rank.
inline Communicator& alone() {
  static const std::unique_ptr<Communicator> communicator = make_single_communicator();
  return *communicator;
}

}  // namespace parka::test
