#include "core/memory/memory_plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr PhaseMask kForward = 1, kBackward = 2, kUpdate = 4;

ExitCode code_of_error(auto&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ExitCode::kOk;
}

// Up to 60 tensors of up to 4 dimensions, a third of them persistent, the others alive in random phases.
MemoryPlan random_plan(uint64_t seed) {
  MemoryPlan plan;
  uint64_t draw = 0;
  const auto pick = [&](uint32_t count) { return philox4x32(seed, 0, draw++)[0] % count; };
  const auto dtypes = {DType::kF32, DType::kBF16, DType::kE4M3};
  const uint32_t num_tensors = 1 + pick(60);
  for (uint32_t i = 0; i < num_tensors; ++i) {
    std::vector<int64_t> shape(1 + pick(4));
    for (int64_t& extent : shape) extent = pick(20);
    shape[0] *= 1 + pick(50);
    const PhaseMask phases = pick(3) == 0 ? kAllPhases : 1 + pick(255);
    plan.add("category " + std::to_string(pick(5)), "tensor " + std::to_string(i), dtypes.begin()[pick(3)], shape,
             phases);
  }
  plan.finish();
  return plan;
}

int count_overlaps(const MemoryPlan& plan) {
  int overlaps = 0;
  const auto& entries = plan.entries();
  for (size_t i = 0; i < entries.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const auto &a = entries[i], &b = entries[j];
      if ((a.phases & b.phases) == 0) continue;
      overlaps += a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
    }
  }
  return overlaps;
}

}  // namespace

TEST_CASE("random memory plans: no two tensors of a common phase overlap", "[memory_plan][slow]") {
  int overlaps = 0, misplaced = 0, wrong_totals = 0;
  int64_t planned = 0, unshared = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const MemoryPlan plan = random_plan(seed);
    overlaps += count_overlaps(plan);
    int64_t end = 0, num_tensors = 0;
    std::vector<int64_t> alive(8, 0);  // bytes in each phase: no plan can do with less
    for (const auto& entry : plan.entries()) {
      int64_t bytes = size_of(entry.dtype);
      for (int64_t extent : entry.shape) bytes *= extent;
      misplaced += entry.offset < 0 || entry.offset % MemoryPlan::kAlignment != 0;
      misplaced += entry.bytes < bytes || entry.bytes >= bytes + MemoryPlan::kAlignment;
      end = std::max(end, entry.offset + entry.bytes);
      unshared += entry.bytes;
      for (size_t phase = 0; phase < alive.size(); ++phase) {
        if (entry.phases >> phase & 1) alive[phase] += entry.bytes;
      }
    }
    int64_t sum = 0;
    for (const auto& total : plan.summary()) {
      sum += total.bytes;
      num_tensors += total.num_tensors;
    }
    wrong_totals += end != plan.total_bytes() || sum != plan.total_bytes();
    wrong_totals += num_tensors != static_cast<int64_t>(plan.entries().size());
    wrong_totals += plan.total_bytes() < *std::max_element(alive.begin(), alive.end());
    planned += plan.total_bytes();
  }
  CHECK(overlaps == 0);
  CHECK(misplaced == 0);
  CHECK(wrong_totals == 0);
  CHECK(planned < unshared);
}

TEST_CASE("tensors in host memory take none of the device and lie one after another there", "[memory_plan]") {
  MemoryPlan plan, without;
  const auto add_host = [&](const char* category, const char* name, int64_t elements) {
    return plan.add(category, name, DType::kF32, {elements}, kAllPhases, MemoryPlace::kHost);
  };
  plan.add("weights", "weight", DType::kBF16, {300});
  without.add("weights", "weight", DType::kBF16, {300});
  const TensorId first = add_host("states", "first", 100);
  plan.add("activations", "forward only", DType::kF32, {1000}, kForward);
  without.add("activations", "forward only", DType::kF32, {1000}, kForward);
  const TensorId master = add_host("masters", "master", 50), second = add_host("states", "second", 64);
  plan.finish();
  without.finish();
  CHECK(plan[first].offset == 0);
  CHECK(plan[master].offset == 512);
  CHECK(plan[second].offset == 768);
  CHECK(plan.total_host_bytes() == 1024);
  CHECK(without.total_host_bytes() == 0);
  CHECK(plan.total_bytes() == without.total_bytes());
  CHECK(plan.summary().size() == 2);
  REQUIRE(plan.host_summary().size() == 2);
  CHECK(plan.host_summary()[0].category == "states");
  CHECK(plan.host_summary()[0].bytes == 768);
  CHECK(plan.host_summary()[0].num_tensors == 2);
  CHECK(plan.host_summary()[1].bytes == 256);
  CHECK(without.host_summary().empty());
}

TEST_CASE("tensors of different phases share memory, persistent ones never", "[memory_plan]") {
  MemoryPlan plan;
  const TensorId forward = plan.add("activations", "forward only", DType::kF32, {1000}, kForward);
  const TensorId weight = plan.add("weights", "weight", DType::kBF16, {3, 100});
  const TensorId backward = plan.add("activations", "backward only", DType::kF32, {1000}, kBackward);
  const TensorId both = plan.add("activations", "both", DType::kF32, {100}, kForward | kBackward);
  plan.finish();
  CHECK(plan[weight].offset == 0);
  CHECK(plan[weight].bytes == 768);  // 600 rounded up to 256
  CHECK(plan[forward].offset == plan[backward].offset);
  CHECK(plan[both].offset >= plan[forward].offset + plan[forward].bytes);
  CHECK(plan.total_bytes() == 768 + 4096 + 512);
}

TEST_CASE("small transient tensors fill the gaps between large ones", "[memory_plan]") {
  MemoryPlan plan;
  plan.add("a", "large, forward", DType::kU8, {4096}, kForward);
  plan.add("a", "above it", DType::kU8, {3072}, kForward | kBackward);
  plan.add("a", "fits below that", DType::kU8, {2048}, kBackward | kUpdate);
  plan.finish();
  CHECK(count_overlaps(plan) == 0);
  CHECK(plan.total_bytes() == 4096 + 3072);
}

TEST_CASE("tensors are placed again where largest first leaves gaps", "[memory_plan]") {
  // Placed by size, the third lies above the second, and the fourth, which meets both, above that.
  MemoryPlan plan;
  plan.add("a", "first", DType::kU8, {1280}, kForward);
  plan.add("a", "second", DType::kU8, {1024}, kBackward);
  plan.add("a", "third", DType::kU8, {768}, kForward | kUpdate);
  plan.add("a", "fourth", DType::kU8, {512}, kBackward | kUpdate);
  plan.add("a", "fifth", DType::kU8, {512}, kBackward | kUpdate);
  plan.finish();
  CHECK(count_overlaps(plan) == 0);
  CHECK(plan.total_bytes() == 1280 + 768);
}

TEST_CASE("a tensor that may grow takes what other phases need anyway, and no more", "[memory_plan]") {
  const auto plan_with = [](std::vector<int64_t> larger) {
    MemoryPlan plan;
    plan.add("weights", "weight", DType::kU8, {512});
    plan.add("a", "forward", DType::kU8, {4096}, kForward);
    plan.add("a", "forward and backward", DType::kU8, {1024}, kForward | kBackward);
    plan.add("a", "backward", DType::kU8, {768}, kBackward);
    const TensorId grown = plan.add_growing("a", "scratch", 256, std::move(larger), kBackward);
    plan.finish();
    CHECK(count_overlaps(plan) == 0);
    CHECK(plan.total_bytes() == 512 + 4096 + 1024);
    CHECK(plan[grown].shape == std::vector<int64_t>{plan[grown].bytes});
    return plan[grown].bytes;
  };
  CHECK(plan_with({}) == 256);
  CHECK(plan_with({512, 1024, 2048}) == 2048);
  CHECK(plan_with({512, 1000, 3328, 3329, 8192}) == 3328);  // 4096 - 768
  CHECK(plan_with({100}) == 256);
  CHECK(plan_with({3400}) == 256);
}

TEST_CASE("random plans whose tensors may grow take no more memory than those whose do not", "[memory_plan]") {
  int64_t grown = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto bytes_of = [&](bool grows) {
      MemoryPlan plan;
      uint64_t draw = 0;
      const auto pick = [&](uint32_t count) { return int64_t{philox4x32(seed, 1, draw++)[0] % count}; };
      for (int i = 0; i < 20; ++i) {
        const int64_t bytes = pick(20000), more = pick(20000);
        const auto phases = static_cast<PhaseMask>(1 + pick(255));
        const bool is_growing = pick(5) == 0;
        if (is_growing && grows) {
          grown -= bytes;
          plan.add_growing("a", "growing", bytes, {bytes + more / 2, bytes + more}, phases);
        } else {
          plan.add("a", "tensor", DType::kU8, {bytes}, phases);
        }
      }
      plan.finish();
      CHECK(count_overlaps(plan) == 0);
      for (const auto& entry : plan.entries()) grown += entry.larger.empty() ? 0 : entry.shape[0];
      return plan.total_bytes();
    };
    const int64_t without = bytes_of(false);
    CHECK(bytes_of(true) <= without);
  }
  CHECK(grown > 0);
}

TEST_CASE("a plan without tensors is empty", "[memory_plan]") {
  MemoryPlan plan;
  plan.finish();
  CHECK(plan.total_bytes() == 0);
  CHECK(plan.summary().empty());
}

TEST_CASE("memory plans refuse wrong use", "[memory_plan]") {
  MemoryPlan plan;
  CHECK(code_of_error([&] { plan.total_bytes(); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.summary(); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add("a", "no shape", DType::kF32, {}); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add("a", "rank 5", DType::kF32, {1, 1, 1, 1, 1}); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add("a", "negative", DType::kF32, {-2, -2}); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add("a", "never alive", DType::kF32, {1}, 0); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] {
          plan.add("a", "host memory in turn", DType::kF32, {1}, kForward, MemoryPlace::kHost);
        }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add_growing("a", "always", 1, {2}, kAllPhases); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add_growing("a", "descending", 1, {3, 2}, kForward); }) == ExitCode::kInternal);
  plan.finish();
  CHECK(code_of_error([&] { plan.finish(); }) == ExitCode::kInternal);
  CHECK(code_of_error([&] { plan.add("a", "late", DType::kF32, {1}); }) == ExitCode::kInternal);
}

TEST_CASE("a plan larger than any memory is the user's error, not an overflow", "[memory_plan]") {
  const int64_t dimension = (int64_t{1} << 31) - 1;  // the largest that a config admits
  MemoryPlan plan;
  CHECK(code_of_error([&] {
          plan.add("a", "tensor", DType::kF32, {dimension, dimension});
        }) == ExitCode::kBadInput);
  CHECK(code_of_error([&] {
          plan.add("a", "tensor", DType::kU8, {dimension, dimension, 3});
        }) == ExitCode::kBadInput);
  CHECK(code_of_error([&] {
          plan.add("a", "empty", DType::kU8, {dimension, dimension, dimension, 0});
        }) == ExitCode::kOk);
  for (int i = 0; i < 10; ++i)
    plan.add("a", "a terabyte", DType::kU8, {1, int64_t{1} << 40}, i % 2 ? kAllPhases : kForward);
  plan.finish();
  CHECK(plan.total_bytes() == 10 * (int64_t{1} << 40));
}
