#include "engine/training/deferred_error.h"

#include <stdexcept>
#include <string>

#include "tests/engine/checkpoint_fixture.h"
#include "tests/support/thread_ranks.h"

using namespace parka;
using namespace parka::test;

namespace {

std::exception_ptr error_with(ExitCode code, const std::string& message) {
  return std::make_exception_ptr(Error(code, message));
}

}  // namespace

TEST_CASE("of the errors that a run defers the first one ends it", "[engine][deferred_error]") {
  DeferredError deferred;
  deferred.keep(nullptr);
  CHECK(!deferred);
  deferred.keep(error_with(ExitCode::kIo, "disk full"));
  deferred.keep(nullptr);
  deferred.keep(error_with(ExitCode::kBadInput, "no such file"));
  REQUIRE(static_cast<bool>(deferred));
  const Error error = error_of([&] { deferred.rethrow(); });
  CHECK(error.code() == ExitCode::kIo);
  CHECK(error.what() == std::string("disk full"));
}

TEST_CASE("a deferred error ends all ranks with the code and message of the lowest rank",
          "[engine][deferred_error]") {
  const int num_ranks = GENERATE(1, 3);
  CAPTURE(num_ranks);
  ThreadRanks(num_ranks).run([&](Communicator& communicator) {
    DeferredError deferred;
    if (communicator.rank() == num_ranks / 2) deferred.keep(error_with(ExitCode::kIo, "a\xff"));
    if (communicator.rank() == 2) deferred.keep(error_with(ExitCode::kBadInput, "b"));
    ExitCode code = ExitCode::kOk;
    std::string message;
    try {
      deferred.throw_on_all_ranks(communicator, [](ExitCode of) { return of == ExitCode::kIo ? "; c" : "; d"; });
    } catch (const Error& e) {
      code = e.code();
      message = e.what();
    }
    // Catch2's assertions are not for several threads.
    const std::string expected = (num_ranks == 1 ? "" : "rank 1: ") + std::string("a\xef\xbf\xbd; c");
    if (code != ExitCode::kIo || message != expected) throw std::runtime_error("other error: " + message);
  });
}
