#pragma once
#include <string>

#include "core/error.h"
#include "tests/support/catch.h"

// What tests of imported and exported models share.
namespace parka::test {

// Models that transformers wrote (tests/fixtures/make_huggingface_fixtures.py).
inline const std::string kFixtures = std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/huggingface/";

// The message of the Error(kBadInput) that `function` throws; empty if it throws none.
template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    return error.what();
  }
  return {};
}

}  // namespace parka::test
