#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr int kThreads = 4;  // more than many machines have cores, so that threads also take turns

struct Piece {
  int64_t begin, end;
};

std::vector<Piece> pieces_of(int64_t count, int64_t grain) {
  std::vector<Piece> pieces;
  std::mutex mutex;
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    std::lock_guard lock(mutex);
    pieces.push_back({begin, end});
  });
  return pieces;
}

// True when the pieces, in any order, are those of the contract.
bool pieces_are_right(const std::vector<Piece>& pieces, int64_t count, int64_t grain) {
  std::vector<int> seen(static_cast<size_t>((count + grain - 1) / grain), 0);
  for (const Piece& piece : pieces) {
    if (piece.begin % grain != 0 || piece.end != std::min(piece.begin + grain, count)) return false;
    ++seen[static_cast<size_t>(piece.begin / grain)];
  }
  return std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; });
}

}  // namespace

TEST_CASE("parallel_for calls every piece once, the same whatever the number of threads", "[parallel]") {
  const int threads = GENERATE(1, kThreads);
  set_num_threads(threads);
  int wrong = 0;
  for (int64_t count : {1, 2, 7, 64, 1000, 1001}) {
    for (int64_t grain : {1, 3, 16, 1000, 5000}) wrong += !pieces_are_right(pieces_of(count, grain), count, grain);
  }
  CHECK(wrong == 0);
  CHECK(pieces_of(0, 4).empty());
  CHECK(pieces_of(-3, 4).empty());
  CHECK(pieces_are_right(pieces_of(5, 0), 5, 1));
}

TEST_CASE("parallel_for sees writes before it and shows its own after it", "[parallel]") {
  set_num_threads(kThreads);
  std::vector<int64_t> values(10000);
  for (int round = 0; round < 20; ++round) {
    parallel_for(static_cast<int64_t>(values.size()), 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] += i;
    });
  }
  int wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) wrong += values[i] != 20 * static_cast<int64_t>(i);
  CHECK(wrong == 0);
}

TEST_CASE("parallel_for runs on as many threads as it says", "[parallel]") {
  set_num_threads(kThreads);
  CHECK(num_threads() == kThreads);
  // Each piece waits for the others, so all must be on threads of their own. The time limit only ends a failing
  // test.
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0;
  parallel_for(kThreads, 1, [&](int64_t, int64_t) {
    std::unique_lock lock(mutex);
    ++arrived;
    changed.notify_all();
    changed.wait_for(lock, std::chrono::seconds(60), [&] { return arrived == kThreads; });
    if (arrived != kThreads) throw std::runtime_error("waited in vain for another thread");
  });
  CHECK(arrived == kThreads);
}

TEST_CASE("parallel_for rethrows an exception of a piece and still works afterwards", "[parallel]") {
  const int threads = GENERATE(1, kThreads);
  set_num_threads(threads);
  std::string caught;
  try {
    parallel_for(100, 1, [](int64_t begin, int64_t) {
      if (begin == 57) throw std::runtime_error("piece 57");
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(caught == "piece 57");
  CHECK_THROWS_AS(parallel_for(100, 1, [](int64_t, int64_t) { throw std::runtime_error("all"); }),
                  std::runtime_error);
  CHECK(pieces_are_right(pieces_of(1000, 7), 1000, 7));
}

TEST_CASE("parallel_for inside a body runs inline", "[parallel]") {
  set_num_threads(kThreads);
  std::atomic<int64_t> sum = 0;
  std::atomic<int> elsewhere = 0;
  parallel_for(50, 1, [&](int64_t outer, int64_t) {
    const std::thread::id here = std::this_thread::get_id();
    parallel_for(20, 3, [&](int64_t begin, int64_t end) {
      elsewhere += std::this_thread::get_id() != here;
      for (int64_t inner = begin; inner < end; ++inner) sum += 20 * outer + inner;
    });
  });
  CHECK(elsewhere == 0);
  CHECK(sum == 999 * 1000 / 2);
}

TEST_CASE("of several failing pieces the first one is reported, whichever ran first", "[parallel]") {
  bool always_first = true;
  for (int repeat = 0; repeat < 200; ++repeat) {
    try {
      parallel_for(64, 1, [](int64_t begin, int64_t) {
        if (begin >= 3) throw std::runtime_error(std::to_string(begin));
      });
      always_first = false;
    } catch (const std::runtime_error& error) {
      always_first = always_first && std::string(error.what()) == "3";
    }
  }
  CHECK(always_first);
}

TEST_CASE("an exception of a nested parallel_for reaches the outer caller", "[parallel]") {
  set_num_threads(kThreads);
  CHECK_THROWS_AS(parallel_for(8, 1,
                               [](int64_t, int64_t) {
                                 parallel_for(8, 1, [](int64_t, int64_t) { throw std::runtime_error("inner"); });
                               }),
                  std::runtime_error);
  CHECK(pieces_are_right(pieces_of(100, 1), 100, 1));
}

TEST_CASE("many threads may call parallel_for at the same time", "[parallel]") {
  set_num_threads(kThreads);
  constexpr int kCallers = 8, kRounds = 50;
  std::vector<int64_t> sums(kCallers, 0);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&sums, caller] {
      for (int round = 0; round < kRounds; ++round) {
        std::atomic<int64_t> sum = 0;
        parallel_for(100, 9, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        sums[caller] += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(sums == std::vector<int64_t>(kCallers, kRounds * 4950));
}

TEST_CASE("more threads than help are not made", "[parallel]") {
  set_num_threads(0);
  const int cores = num_threads();
  set_num_threads(4096);
  CHECK(num_threads() == std::min(4096, 4 * cores));
  set_num_threads(1);
  CHECK(num_threads() == 1);
}

TEST_CASE("the default number of threads is at least one", "[parallel]") {
  set_num_threads(0);
  CHECK(num_threads() >= 1);
}
