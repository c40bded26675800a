#include "comm/communicator.h"

#include "comm/launch/line_socket.h"
#include "comm/launch/watchdog.h"
#include "tests/support/catch.h"
#include "tests/support/no_threads.h"
#include "tests/support/tensors.h"

using namespace parka;
using test::TestTensor;

TEST_CASE("A run of one rank reduces and gathers by itself", "[communicator]") {
  const std::unique_ptr<Communicator> ranks = make_single_communicator();
  for (Device* device : test::devices()) {
    const std::vector<float> values = test::random_normal(1001, 1);
    const TestTensor x(*device, DType::kF32, {1001}, values), out(*device, DType::kF32, {1001});
    const uint64_t before = ranks->last_queued();
    ranks->all_reduce(*device, x, Reduction::kSum, Peers::kAll);
    CHECK(x.host() == values);
    ranks->reduce_scatter(*device, x, out, Peers::kAll);
    CHECK(out.host() == values);
    const TestTensor again(*device, DType::kF32, {1001});
    ranks->all_gather(*device, x, again, Peers::kAll);
    CHECK(again.host() == values);
    ranks->all_gather(*device, x, x, Peers::kAll);
    CHECK(x.host() == values);
    const TestTensor blocks(*device, DType::kF32, {7, 1, 143});
    ranks->all_to_all(*device, x.view().reshaped({7, 1, 143}), blocks, Peers::kContext);
    CHECK(blocks.host() == values);
    CHECK(ranks->last_queued() == before + 5);
    ranks->wait(*device, ranks->last_queued());
  }
  CHECK(ranks->gather_text("x") == std::vector<std::string>{"x"});
  CHECK(ranks->max(-2.0) == -2.0);
  ranks->barrier();
}

TEST_CASE("Only fp32 and bf16 are reduced, and sizes must agree", "[communicator]") {
  const std::unique_ptr<Communicator> ranks = make_single_communicator();
  Device& device = test::cpu_device();
  const TestTensor codes(device, DType::kE4M3, {16}), x(device, DType::kF32, {16}), y(device, DType::kF32, {8});
  CHECK_THROWS_AS(ranks->all_reduce(device, codes, Reduction::kSum, Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->reduce_scatter(device, codes, codes, Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->reduce_scatter(device, x, y, Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->all_gather(device, x, y, Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->all_gather(device, x, codes, Peers::kAll), Error);
  const auto blocks = [](const TestTensor& t, int64_t size) { return t.view().reshaped({2, size, 8 / size}); };
  const TestTensor other(device, DType::kF32, {16});
  CHECK_THROWS_AS(ranks->all_to_all(device, x, other, Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->all_to_all(device, blocks(x, 2), blocks(other, 2), Peers::kAll), Error);
  CHECK_THROWS_AS(ranks->all_to_all(device, blocks(x, 1), blocks(codes, 1), Peers::kAll), Error);
}

TEST_CASE("Line sockets carry whole lines and notice the end", "[watchdog]") {
  const Listener listener(Reach::kNetwork);
  const std::unique_ptr<LineSocket> a = connect_to("127.0.0.1", listener.port(), 5).socket;
  REQUIRE(a);
  wait_readable({listener.fd()}, 5);
  const std::unique_ptr<LineSocket> b = listener.accept();
  REQUIRE(b);
  CHECK_FALSE(listener.accept());
  CHECK(b->receive().empty());
  a->send("one");
  a->send("two\nthree");
  std::vector<std::string> lines;
  const auto read = [&](LineSocket& socket, size_t count) {
    for (int tries = 0; tries < 50 && lines.size() < count && !socket.closed(); ++tries) {
      wait_readable({socket.fd()}, 0.1);
      for (std::string& line : socket.receive()) lines.push_back(std::move(line));
    }
  };
  read(*b, 2);
  CHECK(lines == std::vector<std::string>{"one", "two three"});
  lines.clear();
  b->send("last");
  b->close();
  CHECK(b->closed());
  read(*a, 1);
  CHECK(lines == std::vector<std::string>{"last"});
  read(*a, 2);
  CHECK(a->closed());
  a->send("to nobody");
  // A port that nobody listens on.
  int port = 0;
  {
    const Listener closing(Reach::kThisHost);
    port = closing.port();
  }
  using Failure = Connection::Failure;
  CHECK(connect_to("127.0.0.1", port, 1).failure == Failure::kRefused);
  const Connection unknown = connect_to("not an address", port, 1);
  CHECK(unknown.failure == Failure::kUnknownName);
  CHECK_FALSE(unknown.problem.empty());
  CHECK(connect_to("localhost", listener.port(), 5).socket);
}

TEST_CASE("Where no thread can be made the watchdog says so, and no failure is told to it", "[watchdog]") {
  const std::unique_ptr<Communicator> ranks = make_single_communicator();
  Watchdog watchdog;
  std::string message;
  try {
    const test::NoThreads no_threads;
    watchdog.start(*ranks, "node1", Reach::kThisHost, {});
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::kBadInput);
    message = error.what();
  }
  CHECK(message.find("rank 0 (node1, pid ") == 0);
  CHECK(message.find("cannot start the thread that watches over the ranks") != std::string::npos);
  const double began = seconds_now();
  const Verdict verdict = watchdog.fail(ExitCode::kBadInput, message);
  CHECK(seconds_now() - began < 5);  // it waits 10 s for the answer of a thread
  CHECK(verdict.common);
}
