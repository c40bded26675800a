#include <cstdint>
#include <vector>

#include "tests/support/catch.h"

namespace {

// Keeps the optimizer from computing the tests at compile time: it must assume that the memory is read and changed.
void* volatile seen_by_others;

}  // namespace

// GCC 12 for AVX-512 broadcasts the leading words of these constants over the trailing zeros unless it is told to
// copy in smaller pieces, as the top-level CMakeLists.txt does. A tensor's shape {64, 64, 0, 0} is such a constant.
TEST_CASE("the compiler keeps the zeros at the end of constants", "[compiler]") {
  std::vector<int64_t> two{64, 64, 0, 0}, three{64, 64, 64, 0};
  seen_by_others = two.data();
  seen_by_others = three.data();
  CHECK((two[0] == 64 && two[1] == 64 && two[2] == 0 && two[3] == 0));
  CHECK((three[0] == 64 && three[1] == 64 && three[2] == 64 && three[3] == 0));

  std::vector<float> floats{2, 2, 2, 2, 2, 2, 0, 0};
  seen_by_others = floats.data();
  CHECK((floats[5] == 2 && floats[6] == 0 && floats[7] == 0));
}

TEST_CASE("the compiler keeps the ones at the end of constants", "[compiler]") {
  std::vector<int64_t> negative{-64, -64, -64, -1};
  seen_by_others = negative.data();
  CHECK((negative[0] == -64 && negative[1] == -64 && negative[2] == -64 && negative[3] == -1));
}
