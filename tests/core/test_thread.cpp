#include "core/parallel.h"

#include <string>

#include "core/error.h"
#include "tests/support/catch.h"
#include "tests/support/no_threads.h"

using namespace parka;

TEST_CASE("A thread runs what it was started for", "[parallel]") {
  int value = 0;
  start_thread("counts", [&] { value = 7; }).join();
  CHECK(value == 7);
}

TEST_CASE("A thread that waits is told to stop, and waited for", "[parallel]") {
  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false, ended = false;
  std::thread thread = start_thread("waits", [&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stopping; });
    ended = true;
  });
  stop_thread(thread, mutex, changed, stopping);
  CHECK(ended);
  CHECK_FALSE(thread.joinable());
  stop_thread(thread, mutex, changed, stopping);  // which has ended
}

TEST_CASE("Where the system allows no further thread the error names the limits", "[parallel]") {
  std::string message;
  try {
    const test::NoThreads no_threads;
    start_thread("counts", [] {}).join();
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    message = error.what();
  }
  CHECK(message.find("cannot start the thread that counts: Resource temporarily unavailable") == 0);
  CHECK(message.find("ulimit -u") != std::string::npos);
}
