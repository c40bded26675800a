#include "kernels/device/gpu_architecture.h"

#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("machine code runs on later minor versions of its compute capability, and on no other major one") {
  CHECK(runs_on_gpu("80", 8, 0));
  CHECK(runs_on_gpu("80", 8, 9));
  CHECK_FALSE(runs_on_gpu("89", 8, 6));
  CHECK_FALSE(runs_on_gpu("80", 9, 0));
  CHECK_FALSE(runs_on_gpu("80", 7, 5));
  CHECK(runs_on_gpu("100", 10, 3));
  CHECK_FALSE(runs_on_gpu("100", 12, 0));
}

TEST_CASE("machine code of an \"a\" version runs on this version alone") {
  CHECK(runs_on_gpu("90a", 9, 0));
  CHECK_FALSE(runs_on_gpu("90a", 8, 9));
  CHECK_FALSE(runs_on_gpu("100a", 10, 3));
}

TEST_CASE("PTX runs on its compute capability and on all later ones") {
  CHECK(runs_on_gpu("90-virtual", 9, 0));
  CHECK(runs_on_gpu("90-virtual", 10, 0));
  CHECK(runs_on_gpu("90-virtual", 12, 1));
  CHECK_FALSE(runs_on_gpu("90-virtual", 8, 9));
}

TEST_CASE("one architecture of a list is enough to run on a GPU") {
  CHECK(runs_on_gpu("80,89,90a", 9, 0));
  CHECK(runs_on_gpu("80,89,90a", 8, 6));
  CHECK_FALSE(runs_on_gpu("80,89,90a", 10, 0));
  CHECK(runs_on_gpu("80,89,90a,90-virtual", 10, 0));
}

TEST_CASE("a GPU runs code of an earlier compute capability where it has no other") {
  CHECK_FALSE(runs_code_of(90, "80,80-virtual", 9, 0));
  CHECK_FALSE(runs_code_of(90, "80,89-virtual", 10, 0));
  CHECK(runs_code_of(80, "80,80-virtual", 9, 0));
  CHECK(runs_code_of(90, "80,89,90a,90-virtual", 9, 0));
  CHECK(runs_code_of(90, "80,89,90a,90-virtual", 10, 0));
  CHECK_FALSE(runs_code_of(90, "80,89,90a,90-virtual", 8, 9));
  CHECK_FALSE(runs_code_of(90, "90a,80-virtual", 10, 0));
}
