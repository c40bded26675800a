#include "data/data_order.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tests/data/token_file_fixtures.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Fixture {
  int64_t n;
  int64_t seed;
  std::vector<uint32_t> first, last;
  uint64_t fnv1a;
};

// Printed by make_order_fixtures.py.
const std::vector<Fixture> kFixtures = {
    {1, 0, {0}, {0}, 0x4d25767f9dce13f5},
    {1, 6198, {0}, {0}, 0x4d25767f9dce13f5},
    {1, 6199, {0}, {0}, 0x4d25767f9dce13f5},
    {1, 1099511627779, {0}, {0}, 0x4d25767f9dce13f5},
    {2, 0, {0, 1}, {0, 1}, 0x08cd4c29d1e47d34},
    {2, 6198, {0, 1}, {0, 1}, 0x08cd4c29d1e47d34},
    {2, 6199, {0, 1}, {0, 1}, 0x08cd4c29d1e47d34},
    {2, 1099511627779, {1, 0}, {1, 0}, 0x89cd31291d2aefa4},
    {3, 0, {2, 0, 1}, {2, 0, 1}, 0x9ef40c127c771966},
    {3, 6198, {2, 0, 1}, {2, 0, 1}, 0x9ef40c127c771966},
    {3, 6199, {2, 1, 0}, {2, 1, 0}, 0x1ff3f111c7bd8bd6},
    {3, 1099511627779, {2, 1, 0}, {2, 1, 0}, 0x1ff3f111c7bd8bd6},
    {10, 0, {4, 6, 2, 7}, {9, 0, 8, 1}, 0x712d934512c96514},
    {10, 6198, {2, 4, 7, 3}, {0, 6, 1, 5}, 0xac2b68c21905f3f4},
    {10, 6199, {6, 4, 1, 8}, {5, 9, 0, 7}, 0x0eaadee03651a004},
    {10, 1099511627779, {2, 4, 6, 5}, {0, 3, 8, 1}, 0x2b35ee2d23407da4},
    {1000, 0, {459, 206, 222, 162}, {504, 801, 975, 607}, 0xe7a859331d294619},
    {1000, 6198, {615, 832, 881, 9}, {382, 897, 860, 501}, 0x59ce906ec8135d75},
    {1000, 6199, {363, 586, 975, 648}, {173, 447, 896, 871}, 0x598d78eb63454bfd},
    {1000, 1099511627779, {517, 234, 394, 267}, {607, 833, 831, 812}, 0x27eeedc4b2809a51},
    {70001, 0, {42101, 21151, 28689, 39631}, {20795, 61469, 48632, 33375}, 0xc1319db404994a4f},
    {70001, 6198, {51822, 41968, 53608, 17164}, {20871, 42781, 56136, 61313}, 0x08df1426d3a1d8ff},
    {70001, 6199, {46429, 7258, 64616, 54418}, {50288, 22890, 41407, 10087}, 0x2494859c3a617fd3},
    {70001, 1099511627779, {58883, 2295, 10473, 22871}, {33375, 25409, 21311, 34604}, 0x42b10e4e803f9237},
};

uint64_t fnv1a(const std::vector<uint32_t>& values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint32_t value : values) {
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((value >> shift) & 0xffu)) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace

TEST_CASE("the order of an epoch is numpy's", "[data][sample_order]") {
  for (const Fixture& want : kFixtures) {
    CAPTURE(want.n, want.seed);
    const std::vector<uint32_t> order = SampleOrder(want.n, want.seed, true).epoch(0);
    REQUIRE(order.size() == static_cast<size_t>(want.n));
    CHECK(std::equal(want.first.begin(), want.first.end(), order.begin()));
    CHECK(std::equal(want.last.begin(), want.last.end(), order.end() - static_cast<int64_t>(want.last.size())));
    CHECK(fnv1a(order) == want.fnv1a);
  }
}

TEST_CASE("epoch e is shuffled with seed + e", "[data][sample_order]") {
  const SampleOrder order(1000, 6198, true);
  CHECK(order.epoch(1) == SampleOrder(1000, 6199, true).epoch(0));
  CHECK(order.epoch(1) != order.epoch(0));
}

TEST_CASE("without shuffling every epoch is in file order", "[data][sample_order]") {
  std::vector<uint32_t> in_order(100);
  std::iota(in_order.begin(), in_order.end(), 0u);
  const SampleOrder order(100, 6198, false);
  CHECK(order.epoch(0) == in_order);
  CHECK(order.epoch(3) == in_order);
}

// The first two numbers of numpy's Generator(PCG64(6198)).integers(0, 2**32, dtype=uint32): the two halves of one
// 64-bit draw, low half first.
TEST_CASE("the full 32-bit range is drawn as numpy does", "[data][sample_order]") {
  NumpyGenerator generator(6198);
  CHECK(generator.interval(0) == 0);  // draws nothing
  CHECK(generator.interval(0xffffffffu) == 4285386229u);
  CHECK(generator.interval(0xffffffffu) == 3025379164u);
}

TEST_CASE("a batch starts where the last one ended while a whole one is left", "[data][sample_order]") {
  const SampleOrder order(13, 0, true);
  // position, global batch, where the batch starts
  const auto [at, global_batch, start] = GENERATE(table<DataPosition, int, DataPosition>({
      {{0, 0}, 4, {0, 0}},
      {{0, 9}, 4, {0, 9}},   // exactly one batch left
      {{0, 10}, 4, {1, 0}},  // three are dropped
      {{0, 13}, 4, {1, 0}},  // all consumed
      {{7, 12}, 4, {8, 0}},
      {{0, 5}, 8, {0, 5}},  // not a multiple of the batch: its size changed
      {{0, 0}, 13, {0, 0}},
      {{0, 1}, 13, {1, 0}},
  }));
  CAPTURE(at.epoch, at.consumed, global_batch);
  CHECK((order.batch_start(at, global_batch) == start));
}

TEST_CASE("impossible orders are refused", "[data][sample_order]") {
  const Error small = error_of([] { SampleOrder(7, 0, true).batch_start({}, 8); });
  CHECK(small.code() == ExitCode::kBadInput);
  CHECK((contains(small, "7 sequences") && contains(small, "global batch of 8")));

  const auto [epoch, consumed] = GENERATE(table<int, int>({{0, 14}, {0, -1}, {-1, 0}}));
  CAPTURE(epoch, consumed);
  const Error outside =
      error_of([e = epoch, c = consumed] { SampleOrder(13, 0, true).batch_start({.epoch = e, .consumed = c}, 4); });
  CHECK(outside.code() == ExitCode::kBadInput);
  CHECK(contains(outside, "13 sequences"));

  CHECK(error_of([] { SampleOrder(10, -1, true); }).code() == ExitCode::kBadInput);
  CHECK(contains(error_of([] { SampleOrder((int64_t{1} << 32) + 1, 0, true); }), "4294967297 sequences"));
}
