#include "engine/text/helper_process.h"

#include <chrono>
#include <string>
#include <utility>

#include "core/error.h"
#include "tests/support/catch.h"

using namespace parka;
using std::chrono::seconds;

namespace {

// The exit code and the message of the error that `action` ends with.
template <typename Action>
std::pair<ExitCode, std::string> error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ExitCode::kOk, ""};
}

}  // namespace

TEST_CASE("a helper process answers long and short lines in order", "[engine][text]") {
  HelperProcess helper({"cat"});
  const std::string longer(50'000, 'x');
  helper.send("one");
  helper.send("");
  CHECK(helper.receive(seconds(60)) == "one");
  CHECK(helper.receive(seconds(60)).empty());
  helper.send(longer);
  CHECK(helper.receive(seconds(60)) == longer);
}

TEST_CASE("a helper process that cannot be started is bad input", "[engine][text]") {
  const auto [code, message] = error_of([] { HelperProcess helper({"/nowhere/python3"}); });
  CHECK(code == ExitCode::kBadInput);
  CHECK(message.find("/nowhere/python3: cannot be started: No such file") == 0);
}

TEST_CASE("the end of a helper process is an error that says how it ended", "[engine][text]") {
  HelperProcess exits({"sh", "-c", "exit 3"});
  const auto [code, message] = error_of([&] { exits.receive(seconds(60)); });
  CHECK(code == ExitCode::kIo);
  CHECK(message.find("ended with exit code 3") != std::string::npos);

  HelperProcess killed({"sh", "-c", "read line; kill -9 $$"});
  killed.send("now");
  CHECK(error_of([&] { killed.receive(seconds(60)); }).second.find("signal 9") != std::string::npos);
  CHECK(error_of([&] { killed.send("more"); }).first == ExitCode::kIo);  // and no SIGPIPE
}

TEST_CASE("a helper process that does not answer is not waited for forever, nor at its end",
          "[engine][text][slow]") {
  const auto start = std::chrono::steady_clock::now();
  {
    HelperProcess helper({"sleep", "1000"});
    const auto [code, message] = error_of([&] { helper.receive(seconds(1)); });
    CHECK(code == ExitCode::kIo);
    CHECK(message.find("does not answer for 1 s") != std::string::npos);
  }
  CHECK(std::chrono::steady_clock::now() - start < seconds(100));
}
