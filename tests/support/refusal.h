#pragma once
#include <functional>
#include <string>

#include "core/error.h"
#include "tests/support/catch.h"

namespace parka::test {

// The message of the Error that a call throws, which has this code; nothing if it throws none.
inline std::string refusal(const std::function<void()>& call, ExitCode code = ExitCode::kBadInput) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  return "";
}

}  // namespace parka::test
